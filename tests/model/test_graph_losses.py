"""Several losses in one graph: columns, weights, regularizers, optional labels; the numbers by hand and by torch."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from viviane import nn
from viviane.batch import Batch
from viviane.config import SGD, Solver
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data import write_dataset
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.report import write_report
from viviane.schema import Schema
from viviane.training import LossTerm, Trainer

SCHEMA = Schema(
    labels=[
        {"name": "click"},
        {"name": "price", "task": "regression"},
        {"name": "buy", "optional": True},
        {"name": "like"},
        {"name": "stay"},
    ],
    dense=[{"name": "x", "dim": 3}],
    categorical=[{"name": "user", "num_ids": 20}],
    sample_weight="w",
)
INPUT = Input(label={"both": ["stay", "buy"], "like": "like", "click": "click", "price": "price"})
LAYERS = [
    DenseLayer("to_click", "InnerProduct", bottom="dense", num_output=1),
    DenseLayer("to_like", "InnerProduct", bottom="dense", num_output=2),
    DenseLayer("to_both", "InnerProduct", bottom="dense", num_output=2),
    DenseLayer("to_price", "InnerProduct", bottom="dense", num_output=1),
]


def losses(**options):
    kinds = {
        "both": ("MultiCrossEntropyLoss", {"target_weight_vec": [2.0, 0.5]}),
        "like": ("CrossEntropyLoss", {}),
        "price": ("MeanSquaredErrorLoss", {}),
        "click": ("BinaryCrossEntropyLoss", {}),
    }
    return [
        DenseLayer(f"loss_{name}", kind, bottom=[f"to_{name}", name], params={**params, **options.get(name, {})})
        for name, (kind, params) in kinds.items()
    ]


def make_rows(count=64, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    labels = {name: (x @ rng.normal(size=3) > 0).astype(np.float32) for name in ("click", "buy", "like", "stay")}
    labels["buy"][rng.random(count) < 0.3] = -1.0
    return {
        **labels,
        "price": (x @ np.float32([1, 2, -1])).astype(np.float32),
        "x": x,
        "user": rng.integers(0, 20, count).astype(np.int32),
        "w": rng.choice(np.float32([0.5, 1.0, 2.0]), count),
    }


def make_model(loss_weights=None, solver=None, **options):
    model = Model(Solver(**{"batch_size": 64, "lr": 0.5, "device": "cpu", **(solver or {})}), SCHEMA, name="many")
    for node in (INPUT, *LAYERS, *losses(**options)):
        model.add(node)
    model.compile(optimizer=SGD(), metrics=["auc", "log_loss"], loss_weights=loss_weights)
    return model


def expected_loss(module, batch, weights=(1.0, 1.0, 1.0, 1.0)):
    """The four losses once more, with torch's own functions, in float64."""
    out = module(batch).double()
    w, y = batch.weight.double(), {name: batch.label(name).double() for name in batch.layout.labels}
    mean = lambda values: (values * w).sum() / w.sum()  # noqa: E731
    bce = lambda z, t: F.binary_cross_entropy_with_logits(z, t, reduction="none")  # noqa: E731
    # the output's columns: click, price, then stay and buy (buy is the third label), then the two classes of like
    click, price, stay, buy, no_like, like = out.unbind(1)
    present = (y["buy"] >= 0).double()
    both = (2.0 * bce(stay, y["stay"]) + 0.5 * present * bce(buy, y["buy"].clamp_min(0))) / 2
    parts = [
        mean(bce(click, y["click"])),
        mean((price - y["price"]) ** 2),
        mean(both),
        mean(bce(like - no_like, y["like"])),
    ]
    return sum(a * b for a, b in zip(weights, parts, strict=True))


def test_the_loss_and_its_gradients_are_the_weighted_sum():
    batch = Batch.from_columns(SCHEMA, make_rows())
    model = make_model(loss_weights={"click": 0.5, "loss_price": 0.25, "both": 3.0})
    names = dict(model.module.named_parameters())
    before = {name: one.detach().clone() for name, one in names.items()}
    expected = expected_loss(model.module, batch, (0.5, 0.25, 3.0, 1.0))
    gradients = dict(zip(names, torch.autograd.grad(expected, list(names.values())), strict=True))
    # the losses are float32: 2^-24 of a sum of 64 terms
    assert model.trainer.train_step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    for name, one in names.items():
        torch.testing.assert_close(one.detach(), before[name] - 0.5 * gradients[name].float(), rtol=1e-5, atol=1e-6)


def test_predictions_are_in_the_schema_s_order():
    batch = Batch.from_columns(SCHEMA, make_rows(5))
    model = make_model()
    click, price, stay, buy, no_like, like = model.module(batch).detach().unbind(1)
    expected = [click.sigmoid(), price, buy.sigmoid(), (like - no_like).sigmoid(), stay.sigmoid()]
    np.testing.assert_allclose(model.predict(batch), torch.stack(expected, 1).numpy(), rtol=1e-6)  # float32


@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_regularizers_of_joint_losses_add_up_and_do_not_enter_the_evaluation(kind, tmp_path):
    rows = make_rows()
    batch = Batch.from_columns(SCHEMA, rows)
    click = {"use_regularizer": True, "regularizer_type": kind, "lambda": 0.8}
    price = {"use_regularizer": True, "regularizer_type": "L2", "lambda_": 2.0, "loss_weight": 0.5}
    model, plain = make_model(click=click, price=price), make_model(price={"loss_weight": 0.5})
    weights = [one.detach().clone() for one in model.module.parameters()]
    squares = sum((one.double() ** 2).sum() for one in weights)
    first = 0.8 * (sum(one.double().abs().sum() for one in weights) if kind == "L1" else squares / 2)
    penalty = (first + 0.5 * 2.0 * squares / 2) / 64
    difference = model.trainer.train_step(batch) - plain.trainer.train_step(batch)
    assert difference.item() == pytest.approx(penalty.item(), rel=1e-4)  # a difference of float32 sums near 5
    for one, other, old in zip(model.module.parameters(), plain.module.parameters(), weights, strict=True):
        slope = (0.8 * (old.sign() if kind == "L1" else old) + 0.5 * 2.0 * old) / 64
        torch.testing.assert_close(one.detach(), other.detach() - 0.5 * slope, rtol=1e-5, atol=1e-6)
    data = write_dataset(tmp_path / "data", SCHEMA, [rows])
    with torch.no_grad():
        loss = expected_loss(model.module, batch, (1.0, 0.5, 1.0, 1.0)).item()
    assert model.evaluate(data)["loss"] == pytest.approx(loss, rel=1e-5)


def test_fit_save_load_and_json(tmp_path):
    train = write_dataset(tmp_path / "train", SCHEMA, [make_rows(600)])
    options = {"both": {"use_regularizer": True, "regularizer_type": "L2", "lambda": 1e-4}}
    model = make_model({"price": 0.1}, {"lr": 0.1, "epochs": 20}, **options)
    history = model.fit(train, train)
    last = history.last()
    assert all(last[f"auc/{name}"] > 0.95 for name in ("click", "buy", "like", "stay"))
    folder = model.save(tmp_path / "model")
    again = Model.load(folder, device="cpu")
    np.testing.assert_array_equal(again.predict(train), model.predict(train))
    assert again.evaluate(train) == model.evaluate(train)
    text = model.to_json()
    params = {node["name"]: node.get("params") for node in json.loads(text)["nodes"] if "name" in node}
    assert params["loss_price"] == {"loss_weight": 0.1}
    assert params["loss_both"]["lambda"] == 1e-4
    copy = Model.from_json(json.loads(text), Solver(lr=0.1, epochs=20, batch_size=64, device="cpu"), SCHEMA)
    copy.compile(optimizer=SGD(), metrics=["auc", "log_loss"])
    copy.fit(train, train)
    np.testing.assert_array_equal(copy.predict(train), model.predict(train))


def test_metrics_leave_out_rows_without_the_label(tmp_path):
    rows = make_rows(300)
    data = write_dataset(tmp_path / "data", SCHEMA, [rows])
    model = make_model()
    scores, there = model.predict(data)[:, 2], rows["buy"] >= 0
    kept = {name: value[there] for name, value in rows.items()}
    only = write_dataset(tmp_path / "only", SCHEMA, [kept])
    assert model.evaluate(data)["auc/buy"] == model.evaluate(only)["auc/buy"]
    p, y = scores[there], rows["buy"][there]
    expected = np.average(-np.log(np.where(y == 1, p, 1 - p)), weights=rows["w"][there])
    assert model.evaluate(data)["log_loss/buy"] == pytest.approx(expected, rel=1e-5)  # p is float32


def test_binary_cross_entropy_of_an_optional_label_counts_the_labelled_rows_alone():
    schema = Schema(labels=[{"name": "buy", "optional": True}], dense=[{"name": "x"}])
    batch = Batch.from_columns(schema, {"buy": [1.0, -1.0, 0.0], "x": [1.0, 5.0, 0.0]})
    model = Model(Solver(device="cpu", lr=1.0), schema)
    model.add(Input(label="buy"))
    model.add(DenseLayer("logit", "InnerProduct", bottom="dense", num_output=1, weight_init_type="zero",
                         bias_init_type="Zero"))  # fmt: skip
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "buy"]))
    model.compile(optimizer=SGD())
    assert model.trainer.train_step(batch).item() == pytest.approx(math.log(2), rel=1e-6)
    assert model.module.logit.weight.item() == pytest.approx(0.25)  # (1 - 0.5) * 1 / 2 rows; the 5 does not count


def test_a_label_of_minus_one_is_for_optional_labels(tmp_path):
    rows = {"y": np.float32([1, -1]), "x": np.float32([0, 0])}
    for optional in (True, False):
        schema = Schema(labels=[{"name": "y", "optional": optional}], dense=[{"name": "x"}])
        data = write_dataset(tmp_path / str(optional), schema, [rows])
        with data.reader(2) as reader:
            if optional:
                assert next(iter(reader)).label("y").tolist() == [1.0, -1.0]
                continue
            with pytest.raises(DataError, match="neither 0 nor 1"):
                next(iter(reader))
    with pytest.raises(ConfigError, match="optional is for binary labels"):
        Schema(labels=[{"name": "y", "task": "regression", "optional": True}], dense=[{"name": "x"}])


def test_metrics_by_group_in_training(tmp_path):
    rows = make_rows(400)
    data = write_dataset(tmp_path / "data", SCHEMA, [rows])
    model = Model(Solver(batch_size=64, eval_batch_size=37, device="cpu", epochs=2), SCHEMA)
    for node in (INPUT, *LAYERS, *losses()):
        model.add(node)
    model.compile(metrics=["gauc:user", "hit_rate@2:user", "ndcg@3:user", "mrr:user", "average_loss"])
    history = model.fit(data, data)
    assert history.best("gauc:user/click") >= history.last()["gauc:user/click"] > 0
    found, p = model.evaluate(data), model.predict(data)[:, 0]
    known = rows["user"] >= 3  # 0 to 2 stand for missing and unknown users, who are nobody in particular
    hits = []
    for user in np.unique(rows["user"][known]):
        mine = rows["user"] == user
        if rows["click"][mine].any():
            hits.append(rows["click"][mine][np.argsort(-p[mine])[:2]].any())
    assert found["hit_rate@2:user/click"] == pytest.approx(np.mean(hits))
    assert math.isfinite(found["average_loss"])


def test_groups_of_raw_ids_are_all_ordinary_and_the_report_shows_them(tmp_path):
    schema = Schema(
        labels=[{"name": "click"}], dense=[{"name": "x"}], categorical=[{"name": "session", "num_ids": None}]
    )
    x = np.float32([3.0, 2.0, 1.0, 0.0, 5.0, 4.0])
    sessions = np.int64([0, 0, -7, -7, 2**62, 2**62])
    rows = {"click": np.float32([1, 0, 1, 0, 0, 1]), "x": x, "session": sessions}
    data = write_dataset(tmp_path / "data", schema, [rows])
    model = Model(Solver(device="cpu", lr=1e-9), schema)
    model.add(Input(label="label"))
    model.add(DenseLayer("logit", "MLP", bottom="dense", num_outputs=[1], act_type="none", use_bias=False))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile(metrics=["gauc:session", "mrr:session"])
    model.module.logit.layers[0].weight.data.fill_(1.0)
    history = model.fit(data, data, run_folder=tmp_path / "run")
    assert history.best("gauc:session") == pytest.approx(2 / 3)
    assert history.best("mrr:session") == pytest.approx((1 + 1 + 0.5) / 3)
    model.save(tmp_path / "run" / "model")
    assert "gauc:session" in write_report(tmp_path / "run").read_text()


def test_summary_and_plot_show_losses_and_rows():
    options = {"loss_weight": 0.5, "use_regularizer": True, "regularizer_type": "L1", "lambda": 0.01}
    model = make_model(click=options)
    drawing = model.plot()
    assert "weight 0.5" in drawing
    assert "L1 0.01" in drawing
    lines = {layer.names[0]: layer for layer in model.describe().layers}
    assert lines["loss_both"].bottoms == ("to_both", "both")
    assert lines["loss_both"].num_parameters == 0
    assert lines["loss_both"].options == ()
    assert lines["loss_click"].options == ("weight 0.5", "L1 0.01")


def test_a_deep_interest_network_of_hugectr_s_layers_trains(tmp_path):
    """Histories as rows of their own: ten layers that change the number of rows, there and back."""
    length, dim = 4, 3
    schema = Schema(
        labels=[{"name": "click"}],
        categorical=[{"name": "items", "num_ids": 30, "kind": "sequence", "max_length": length + 1}],
    )
    rng = np.random.default_rng(0)
    items = rng.integers(3, 30, (500, length + 1)).astype(np.int32)
    rows = {"click": (items[:, -1] > items[:, 0]).astype(np.float32), "items": items.tolist()}
    data = write_dataset(tmp_path / "data", schema, [rows])
    model = Model(Solver(batch_size=64, lr=0.02, epochs=12, device="cpu"), schema)
    for node in (
        Input(label="label", sparse="cats"),
        SparseEmbedding("emb", "cats", dim, combiner="concat"),
        DenseLayer("split", "FusedReshapeConcat", bottom="emb", top=["history", "target"]),
        DenseLayer("tiled", "Scale", bottom="target", axis=1, factor=length),
        DenseLayer("difference", "Sub", bottom=["history", "tiled"]),
        DenseLayer("product", "ElementwiseMultiply", bottom=["history", "tiled"]),
        DenseLayer("pairs", "Concat", bottom=["history", "tiled", "difference", "product"]),
        DenseLayer("hidden", "InnerProduct", bottom="pairs", num_output=8),
        DenseLayer("dice", "PReLU_Dice", bottom="hidden", elu_alpha=0.2),
        DenseLayer("score", "InnerProduct", bottom="dice", num_output=1),
        DenseLayer("scores", "Reshape", bottom="score", leading_dim=length),
        DenseLayer("shares", "Softmax", bottom="scores"),
        DenseLayer("steps", "Reshape", bottom="history", leading_dim=dim, time_step=length),
        DenseLayer("interest", "MatrixMultiply", bottom=["shares", "steps"]),
        DenseLayer("flat", "Reshape", bottom="emb", leading_dim=(length + 1) * dim),
        DenseLayer("x", "Concat", bottom=["interest", "target", "flat"]),
        DenseLayer("logit", "MLP", bottom="x", num_outputs=[16, 1], activations=["relu", "none"]),
        DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]),
    ):
        model.add(node)
    model.compile(metrics=["auc"])
    assert "(4 B, 3)" in model.plot()
    plan = model.plan()
    assert str(plan.shapes["history"].rows) == "4 B"
    assert plan.shapes["scores"] == (length,)
    assert model.fit(data, data).best("auc") > 0.9


def test_a_torch_module_trains_with_terms():
    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, batch):
            return self.layer(batch.dense)

    schema = SCHEMA.select(["price", "like", "x"])
    rows = {name: value for name, value in make_rows().items() if name in ("price", "like", "x", "w")}
    batch = Batch.from_columns(schema, rows)
    terms = [
        LossTerm(nn.MeanSquaredErrorLoss([(1,), (1,)], loss_weight=0.5), (2, 3), (0,)),
        LossTerm(nn.CrossEntropyLoss([(2,), (1,)]), (0, 2), (1,)),
    ]
    trainer = Trainer(Heads(), schema, Solver(device="cpu", lr=0.1), SGD(), terms=terms, progress=False)
    out, w = trainer.module(batch).detach(), batch.weight
    square = ((out[:, 2] - batch.label("price")) ** 2 * w).sum() / w.sum()
    cross = (F.cross_entropy(out[:, :2], batch.label("like").long(), reduction="none") * w).sum() / w.sum()
    assert trainer.train_step(batch).item() == pytest.approx((0.5 * square + cross).item(), rel=1e-5)  # float32
    predictions = trainer.objective.predictions(out, batch.size)
    torch.testing.assert_close(predictions, torch.stack([out[:, 2], out[:, :2].softmax(1)[:, 1]], 1))


def test_a_loss_of_ones_own_goes_by_its_name(monkeypatch):
    class HingeLoss(nn.Loss):
        """max(0, 1 - (2 y - 1) z)."""

        def build(self, init):
            return [()]

        def mean_loss(self, output, label, weight=None, class_weights=None, label_smoothing=0.0):
            return (1 - (2 * label - 1) * output).clamp_min(0).mean()

    monkeypatch.setitem(nn.LAYERS._items, "HingeLoss", HingeLoss)
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
    model = Model(Solver(device="cpu"), schema)
    for node in (
        Input(label="y"),
        DenseLayer("z", "InnerProduct", bottom="dense", num_output=1, weight_init_type="zero", bias_init_type="zero"),
        DenseLayer("hinge", "HingeLoss", bottom=["z", "y"]),
    ):
        model.add(node)
    model.compile(loss_weights={"y": 3.0})
    batch = Batch.from_columns(schema, {"y": [1.0, 0.0], "x": [1.0, 2.0]})
    assert model.trainer.train_step(batch).item() == 3.0
    assert "weight 3" in model.plot()


MISTAKES = [
    ([LAYERS[1], DenseLayer("l", "MultiCrossEntropyLoss", bottom=["to_like", "both"], target_weight_vec=[1.0])],
     SchemaError, "as many target weights"),
    ([DenseLayer("z", "InnerProduct", bottom="dense", num_output=3),
      DenseLayer("l", "CrossEntropyLoss", bottom=["z", "like"])], SchemaError, r"a logit \(B, 2\)"),
    ([LAYERS[0], DenseLayer("l", "BinaryCrossEntropyLoss", bottom=["to_click", "price"])],
     ConfigError, "BinaryCrossEntropyLoss needs a binary label"),
    ([LAYERS[3], DenseLayer("l", "MeanSquaredErrorLoss", bottom=["to_price", "click"])],
     ConfigError, "MeanSquaredErrorLoss needs a regression label"),
    ([DenseLayer("rows", "Reshape", bottom="dense", leading_dim=1),
      DenseLayer("l", "BinaryCrossEntropyLoss", bottom=["rows", "click"])], SchemaError, "same number of rows"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "kind", "words"), MISTAKES)
def test_mistakes_are_named(nodes, kind, words):
    model = Model(Solver(device="cpu"), SCHEMA)
    for node in (INPUT, *nodes):
        model.add(node)
    with pytest.raises(kind, match=words):
        model.compile()


def test_weights_and_regularizers_that_name_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"no loss of this name[\s\S]*did you mean 'click'"):
        make_model(loss_weights={"clack": 1.0})
    with pytest.raises(ConfigError, match="weighed twice"):
        make_model(loss_weights={"click": 1.0, "loss_click": 1.0})
    with pytest.raises(ConfigError, match="lambda needs use_regularizer"):
        make_model(click={"lambda": 0.1})
    with pytest.raises(ConfigError, match="greater than or equal to 0"):
        make_model(loss_weights={"click": -1.0})
    for name, words in (("gauc", "gauc:user"), ("gauc:x", "must be one-hot")):
        model = Model(Solver(device="cpu"), SCHEMA)
        for node in (INPUT, *LAYERS, *losses()):
            model.add(node)
        with pytest.raises((ConfigError, SchemaError), match=words):
            model.compile(metrics=[name])
