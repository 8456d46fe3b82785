"""The model's verbs: compile, fit, evaluate, predict, freeze."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from viviane.batch import Batch
from viviane.config import SGD, AdaGrad, Adam, Solver
from viviane.core.errors import ConfigError, DataError, DataNotFoundError, SchemaError
from viviane.data import write_dataset
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema
from viviane.training import Callback


def test_fit_learns_and_evaluate_repeats_the_history(model, data, valid) -> None:
    model.compile(Adam(), metrics=["auc"])
    history = model.fit(data, valid, epochs=5)
    assert [row["epoch"] for row in history if row["split"] == "valid"] == [1, 2, 3, 4, 5]
    assert history.best("auc") > 0.7  # the planted model reaches 0.86
    again = model.evaluate(valid)
    assert set(again) == {"loss", "auc"}
    assert again["auc"] == history.last("valid")["auc"]


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}])
def test_two_fits_are_one_longer_fit(build, data, valid, settings) -> None:
    one, two = build(epochs=2, **settings), build(epochs=1, **settings)
    for model in (one, two):
        model.compile(Adam())
    one.fit(data)
    two.fit(data)
    second = two.fit(data)
    assert two.trainer.step == one.trainer.step == 32
    assert [row["step"] for row in second if row["split"] == "train"][-1] == 32
    # same batches, same moments of Adam, same step counts: the same bits
    assert np.array_equal(one.predict(valid), two.predict(valid))


def test_epochs_of_fit_go_before_the_solver_s(model, data) -> None:
    model.compile()
    model.fit(data, epochs=2)
    assert model.trainer.epoch == 2
    assert model.solver.epochs == 1


def test_callbacks_and_run_folder_reach_the_trainer(model, data, valid, tmp_path) -> None:
    class Count(Callback):
        steps = 0

        def on_step_end(self, step, loss):
            self.steps += 1

    count = Count()
    model.compile()
    model.fit(data, valid, run_folder=tmp_path / "run", callbacks=[count])
    assert count.steps == 16
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    config = (tmp_path / "run" / "config.json").read_text()
    assert '"name": "small"' in config
    assert '"SparseEmbedding"' in config


def test_resume_goes_on_from_the_run_folder(build, data, valid, tmp_path) -> None:
    whole = build(epochs=2)
    whole.compile()
    whole.fit(data, valid)
    short, rest = build(epochs=2, max_steps=20, checkpoint_every=4), build(epochs=2, checkpoint_every=4)
    short.compile()
    short.fit(data, valid, run_folder=tmp_path / "run")
    rest.compile()
    rest.fit(data, valid, run_folder=tmp_path / "run", resume=True)
    assert np.array_equal(rest.predict(valid), whole.predict(valid))


def test_optimizers_of_dense_layers_tables_and_single_tables(build, data) -> None:
    model = build(lr=0.5)
    model.nodes[1] = SparseEmbedding("emb", "cats", 4, tables={"user": {"optimizer": {"type": "sgd", "lr": 1e-9}}})
    model.compile(SGD(lr=1e-9), embedding_optimizer=AdaGrad())
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.fit(data)
    after = model.module.state_dict()
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after if name.endswith("weight")}
    assert moved["emb.item.weight"] > 0.1
    assert moved["emb.user.weight"] < 1e-5
    assert moved["deep.layers.0.weight"] < 1e-5
    assert {line.name: line.optimizer for line in model.describe().tables} == {"emb.user": "sgd", "emb.item": "adagrad"}


def test_predictions_are_equal_from_every_kind_of_rows(model, data, valid, rows) -> None:
    model.compile()
    model.fit(data)
    expected = model.predict(valid)
    assert expected.shape == (500, 1)
    assert expected.dtype == np.float32
    columns = rows(500, seed=1)
    features = {name: values for name, values in columns.items() if name != "click"}
    table = pa.table({**features, "vector": features["vector"].tolist()})
    for given in (columns, features, Batch.from_columns(valid.schema, columns), table):
        # batches of another size may sum in another order: float32 rounding
        np.testing.assert_allclose(model.predict(given), expected, rtol=1e-5, atol=1e-6)
    frame = pd.DataFrame({**features, "vector": features["vector"].tolist()})
    np.testing.assert_allclose(model.predict(frame), expected, rtol=1e-5, atol=1e-6)
    stream = np.concatenate(list(model.predict_batches(valid)))
    assert np.array_equal(stream, expected)


def test_the_folder_of_a_data_set_is_a_data_set(build, data, valid) -> None:
    one, two, passes = build(), build(), build()
    for model in (one, two, passes):
        model.compile()
    one.fit(data, valid)
    two.fit(str(data.path), valid.path)
    passes.fit([str(data.path), valid.path])
    assert passes.trainer.step == 16 + 4
    expected = one.predict(valid)
    for path in (valid.path, str(valid.path)):
        assert np.array_equal(two.predict(path), expected)
        assert np.array_equal(np.concatenate(list(two.predict_batches(path))), expected)
        assert two.evaluate(path) == one.evaluate(valid)
        assert np.array_equal(two.tensor("logit", path), one.tensor("logit", valid))
    with pytest.raises(DataNotFoundError, match=r"(?s)folder not found.*absent.*schema\.json"):
        two.predict("absent")


def test_no_rows_cannot_be_trained_on(build, data, rows, tmp_path) -> None:
    model = build(drop_last=True)
    model.compile()
    empty = {name: values[:0] for name, values in rows(1).items()}
    with pytest.raises(DataError, match=r"the training set has no rows(?s:.)*where:.*none") as caught:
        model.fit(write_dataset(tmp_path / "none", data.schema, [empty]))
    assert caught.value.fix is None
    for call in (model.fit, model.evaluate):
        with pytest.raises(DataError, match=r"there are no rows(?s:.)*the given Table"):
            call(pa.table({**empty, "vector": [], "seen": []}))
    with pytest.raises(ConfigError, match=r"no complete batch(?s:.)*smaller batch_size"):
        model.fit(rows(100))


def test_no_rows_give_no_predictions(model, rows) -> None:
    model.compile()
    table = pa.table({"price": [], "vector": [], "user": [], "item": [], "seen": []})
    assert model.predict(table).shape == (0, 1)


def test_predict_refuses_what_it_cannot_read(model, rows) -> None:
    model.compile()
    with pytest.raises(ConfigError, match="columns by name, a list of dicts"):
        model.predict([1, 2])
    with pytest.raises(ConfigError, match=r"has no ETL.*(?s:.)*viviane etl"):
        model.predict(pa.table({"user": ["ann"]}), raw=True)
    with pytest.raises(ConfigError, match="has no ETL"):
        model.predict({"user": ["ann"]}, raw=True)
    with pytest.raises(SchemaError, match=r"(?s)a column is missing.*'vector'"):
        model.predict(pa.table({"price": [1.0]}))
    with pytest.raises(SchemaError, match=r"(?s)nulls.*column 'price'"):
        model.predict(
            pa.table({"price": [None, 1.0], "vector": [[1, 2]] * 2, "user": [3, 3], "item": [3, 3], "seen": [[], []]})
        )
    with pytest.raises(SchemaError, match="a column is missing"):
        model.predict({"price": [1.0]})


def test_a_data_set_of_other_columns_is_refused(model, tmp_path) -> None:
    model.compile()
    other = write_dataset(tmp_path / "d", Schema(dense=[{"name": "price"}]), [{"price": [1.0]}])
    with pytest.raises(SchemaError, match="columns differ from the model's"):
        list(model.predict_batches(other))


def test_order_of_verbs_is_checked(model, data) -> None:
    for verb in (lambda: model.fit(data), model.summary, lambda: model.predict({}), lambda: model.evaluate(data)):
        with pytest.raises(ConfigError, match=r"(?s)not compiled.*model\.compile"):
            verb()
    model.compile()
    with pytest.raises(ConfigError, match=r"(?s)is compiled; nothing can be added"):
        model.add(Input())
    with pytest.raises(ConfigError, match="compiled already"):
        model.compile()


def test_add_takes_nodes_and_recipes_only(model) -> None:
    with pytest.raises(ConfigError, match=r"(?s)made of nodes.*'Linear'.*viviane\.zoo"):
        model.add(nn.Linear(1, 1))


def test_names_of_models_are_checked() -> None:
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
    with pytest.raises(ConfigError, match="name"):
        Model(Solver(), schema, name="a/b")


# Freezing ---------------------------------------------------------------------------------------------------


def test_frozen_parts_do_not_move_and_unfrozen_do(model, data) -> None:
    model.compile(Adam())
    model.freeze_embedding("emb")
    model.freeze_dense()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    with pytest.raises(ConfigError, match="does not depend on any trained weight"):
        model.fit(data)
    model.unfreeze_dense()
    model.fit(data)
    middle = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert torch.equal(middle["emb.user.weight"], before["emb.user.weight"])
    assert not torch.equal(middle["logit.weight"], before["logit.weight"])
    model.unfreeze_embedding()
    model.freeze_dense()
    model.fit(data)
    after = model.module.state_dict()
    assert not torch.equal(after["emb.user.weight"], middle["emb.user.weight"])
    assert torch.equal(after["logit.weight"], middle["logit.weight"])


def test_an_unknown_embedding_cannot_be_frozen(model) -> None:
    model.compile()
    with pytest.raises(ConfigError, match=r"(?s)no such embedding.*'emv'.*did you mean 'emb'"):
        model.freeze_embedding("emv")


def test_tables_made_not_trainable_stay_so(build, data) -> None:
    model = build()
    model.nodes[1] = SparseEmbedding("emb", "cats", 4, tables={"user": {"trainable": False}})
    model.compile()
    before = model.module.state_dict()["emb.user.weight"].clone()
    model.unfreeze_embedding()
    model.fit(data)
    assert torch.equal(model.module.state_dict()["emb.user.weight"], before)


# Any module -------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(30, 4)
        self.out = nn.Linear(7, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.out(torch.cat([self.user(batch.one_hot[:, 0]), batch.dense], 1)).squeeze(1)


def test_any_torch_module_trains_saves_and_loads(data, valid, tmp_path, capsys) -> None:
    torch.manual_seed(0)
    model = Model(Solver(batch_size=64, lr=0.01, epochs=3, device="cpu"), data, module=Tower())
    model.compile(Adam(), metrics=["auc"])
    assert model.fit(data, valid).best("auc") > 0.6
    model.summary()
    assert "Embedding" in capsys.readouterr().out
    assert model.plot() == ""
    model.save(tmp_path / "m")
    again = Model.load(tmp_path / "m", device="cpu", module=Tower())
    assert np.array_equal(again.predict(valid), model.predict(valid))
    with pytest.raises(ConfigError, match=r"(?s)made from a torch module.*module=Tower\(\.\.\.\)"):
        Model.load(tmp_path / "m")
    with pytest.raises(ConfigError, match="no graph"):
        model.to_json()
    with pytest.raises(ConfigError, match="nothing can be added"):
        model.add(Input())


def test_a_module_s_tables_bring_their_own_optimizer(data) -> None:
    model = Model(Solver(device="cpu"), data, module=Tower())
    with pytest.raises(ConfigError, match=r"(?s)have their own optimizer.*EmbeddingCollection"):
        model.compile(embedding_optimizer=SGD())


def test_two_labels(tmp_path) -> None:
    schema = Schema(labels=[{"name": "a"}, {"name": "b"}], dense=[{"name": "x"}])
    x = np.linspace(-1, 1, 400).astype("float32")
    data = write_dataset(
        tmp_path / "d", schema, [{"a": (x > 0).astype("float32"), "b": (x < 0).astype("float32"), "x": x}]
    )
    model = Model(Solver(batch_size=50, lr=0.1, epochs=3, device="cpu"), data)
    model.add(Input(label={"label_b": "b", "label_a": "a"}))
    for name in ("a", "b"):
        model.add(DenseLayer(f"to_{name}", "InnerProduct", bottom="dense", num_output=1, bias_init_type="zero"))
        model.add(DenseLayer(f"loss_{name}", "BinaryCrossEntropyLoss", bottom=[f"to_{name}", f"label_{name}"]))
    model.compile(metrics=["auc"])
    model.fit(data)
    assert model.evaluate(data)["auc/a"] == model.evaluate(data)["auc/b"] == 1.0
    assert model.predict(data)[-1, 0] > 0.5 > model.predict(data)[-1, 1]
