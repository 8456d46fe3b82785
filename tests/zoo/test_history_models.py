"""DIN and BST: their formulas, and that they find the target in the history, which a mean of it cannot."""

import json

import numpy as np
import pytest
import torch
from planted import LENGTH, history_rows, history_schema, written

from viviane.batch import Batch
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.model import GraphModule, Model, plan_graph
from viviane.schema import Schema
from viviane.zoo import BST, DIN

SCHEMA = history_schema(vocabulary="item")
SMALL = {
    "din": DIN(dim=8, attention_mlp=[16], top_mlp=[32]),
    "din_softmax": DIN(dim=8, attention_mlp=[16], top_mlp=[32], pooling="softmax", activation="relu"),
    "bst": BST(dim=16, num_heads=2, top_mlp=[32], init={"type": "normal", "std": 0.3}),
    "bst_mean": BST(dim=16, num_heads=2, top_mlp=[32], pooling="mean", init={"type": "normal", "std": 0.3}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("history"), SCHEMA, history_rows, 12_000)


def trained(recipe, data, epochs=6) -> tuple[Model, float]:
    model = Model(Solver(batch_size=128, lr=5e-3, epochs=epochs, device="cpu"), SCHEMA)
    model.add(recipe)
    model.compile(Adam())
    return model, model.fit(data[0], data[1]).best("auc")


@pytest.fixture(scope="module")
def mean_auc(data) -> float:
    return trained(DIN(dim=8, top_mlp=[32], pooling="mean"), data)[1]


@pytest.mark.parametrize("name", SMALL)
def test_finds_the_target_in_the_history_better_than_a_mean_and_survives_saving(name, data, mean_auc, tmp_path) -> None:
    model, auc = trained(SMALL[name], data)
    # The label follows the match with 95 %: the best AUC is about 0.95, chance 0.5.
    assert auc > 0.85
    assert auc > mean_auc + 0.05
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model", device="cpu")
    assert np.array_equal(loaded.predict(data[1]), model.predict(data[1]))
    again = Model.from_json(json.loads(model.to_json()), Solver(device="cpu"), SCHEMA)
    assert again.nodes == model.nodes
    assert model.plan().unused == ()
    assert type(SMALL[name]).from_dict(json.loads(json.dumps(SMALL[name].to_dict()))) == SMALL[name]


def module_and_batch(recipe, rows=5) -> tuple[GraphModule, Batch, dict]:
    columns = history_rows(rows, 3)
    columns["hist"][0] = columns["hist"][0][:0]  # an empty history
    columns["hist"][1] = np.arange(3, 3 + LENGTH, dtype="int32")  # and a full one
    module = GraphModule(plan_graph(recipe.nodes(SCHEMA), SCHEMA), SGD()).eval()
    return module, Batch.from_columns(SCHEMA, columns), columns


def vectors(module, columns, row) -> tuple[torch.Tensor, torch.Tensor]:
    table = module.state_dict()["pair_0_emb.item.weight"].double()
    return table[torch.tensor(columns["hist"][row]).long()], table[int(columns["item"][row])]


def test_din_weighs_each_item_by_its_activation_unit() -> None:
    module, batch, columns = module_and_batch(DIN(dim=4, attention_mlp=[6], top_mlp=[5], activation="relu"))
    w = {key: value.double() for key, value in module.state_dict().items()}
    got = module.tensor("v", batch)
    for row in range(batch.size):
        hist, target = vectors(module, columns, row)
        expected = torch.zeros(4, dtype=torch.float64)
        for h in hist:
            x = torch.cat([h, target, h - target, h * target])
            x = torch.relu(w["unit_0.weight"] @ x + w["unit_0.bias"])
            expected = expected + (w["a_rows.weight"] @ x + w["a_rows.bias"]) * h
        # float32 vectors on their way out of the tables
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=1e-6)


def line(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w, name, x):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def block(w, x):
    share = torch.softmax(line(w, "q_0", x) @ line(w, "k_0", x).T / 2.0, -1)
    s = norm(w, "s_0", x + line(w, "o_0", share @ line(w, "v_0", x)))
    z = line(w, "ffn_0", s)
    return norm(w, "x_1", s + line(w, "ffn_0_out", torch.where(z > 0, z, 0.01 * z)))


TINY = {"dim": 4, "num_heads": 1, "ffn_dim": 6, "top_mlp": [5]}


def test_bst_attends_over_the_places_that_hold_an_item() -> None:
    module, batch, columns = module_and_batch(BST(**TINY))
    w = {key: value.double() for key, value in module.state_dict().items()}
    got = module.tensor("x_held", batch)
    for row in range(batch.size):
        hist, target = vectors(module, columns, row)
        x = torch.cat([hist, target[None]])
        x = block(w, x + w["x_0.weight"][: len(x)].flip(0))  # counted back from the target
        places = [*range(len(hist)), LENGTH]
        # LayerNorm of vectors near 0.01 magnifies their float32 rounding; 1e-3 is far below any change of formula
        torch.testing.assert_close(got[row, places].double(), x, rtol=1e-3, atol=1e-3)
        empty = [i for i in range(LENGTH) if i >= len(hist)]
        assert got[row, empty].abs().sum() == 0


def test_bst_takes_the_time_before_the_target_as_position_and_the_mean_of_the_places() -> None:
    times = {"name": "hist_time", "num_ids": None, "kind": "sequence", "max_length": LENGTH}
    known = [*(c.to_dict() for c in SCHEMA.categorical), times, {"name": "time", "num_ids": None}]
    schema = Schema(labels=SCHEMA.labels, dense=SCHEMA.dense, categorical=known)
    recipe = BST(**TINY, pooling="mean", times=["hist_time", "time"], time_unit=3600)
    columns, now = history_rows(5, 3), 1_700_000_000
    columns["hist"][0] = columns["hist"][0][:0]
    hours = [2.0 ** np.arange(len(one)) for one in columns["hist"]]  # 1, 2, 4, ... hours ago, and less than one
    columns["time"] = np.full(5, now)
    columns["hist_time"] = [(now - 3600 * one + (3000 if row == 2 else 0)).astype("int64")
                            for row, one in enumerate(hours)]  # fmt: skip
    module = GraphModule(plan_graph(recipe.nodes(schema), schema), SGD()).eval()
    batch = Batch.from_columns(schema, columns)
    w = {key: value.double() for key, value in module.state_dict().items()}
    for row in range(5):
        hist, target = vectors(module, columns, row)
        ages = [int(now - one) // 3600 for one in columns["hist_time"][row]] + [0]
        x = torch.cat([hist, target[None]]) + w["x_0.weight"][[(1 + age).bit_length() - 1 for age in ages]]
        x = block(w, x)
        expected = {"x_mean": x.mean(0), "x_target": x[-1], "t": target}
        for name, value in expected.items():
            # as above
            torch.testing.assert_close(module.tensor(name, batch)[row].double(), value, rtol=1e-3, atol=1e-3)
    assert [name for name in w if "time" in name] == []  # no table of times
    with pytest.raises(SchemaError, match=r"(?s)as long as the history.*max_length 8"):
        BST(**TINY, history="hist", times=["user", "time"]).nodes(schema)


MISTAKES = [
    (Schema(labels=[{"name": "y"}], categorical=[{"name": "a", "num_ids": 5}]), {}, "no sequence column"),
    (history_schema(vocabulary="goods"), {}, r"(?s)which column is the target.*same vocabulary"),
    (history_schema(vocabulary="goods"), {"target": "item"}, "(?s)must share a table.*vocabulary='goods'"),
    (SCHEMA, {"history": "user"}, "(?s)column of several ids.*kind 'sequence'"),
    (SCHEMA, {"target": "hist"}, "takes a column of one id a row"),
    (SCHEMA, {"target": ["item", "user"]}, "(?s)a target of its own.*as many"),
    (SCHEMA, {"history": "hits"}, "did you mean 'hist'"),
]


@pytest.mark.parametrize("model", [DIN, BST])
@pytest.mark.parametrize(("schema", "roles", "message"), MISTAKES)
def test_wrong_roles_say_what_to_do(model, schema, roles, message) -> None:
    with pytest.raises(SchemaError, match=message):
        model(**roles).nodes(schema)


def test_dice_refuses_other_normalisations_and_heads_must_divide() -> None:
    with pytest.raises(ConfigError, match="dice normalises"):
        DIN(batch_norm=True)
    with pytest.raises(ConfigError, match="not a multiple of num_heads"):
        BST(dim=6, num_heads=4)


@pytest.mark.parametrize("recipe", [DIN, BST])
def test_two_histories_stand_side_by_side_and_options_reach_the_graph(recipe) -> None:
    extra = [
        {"name": "cats", "num_ids": 9, "kind": "sequence", "max_length": LENGTH, "vocabulary": "cat"},
        {"name": "cat", "num_ids": 9},
    ]
    schema = Schema(
        labels=SCHEMA.labels, dense=SCHEMA.dense, categorical=[*(c.to_dict() for c in SCHEMA.categorical), *extra]
    )
    model = Model(Solver(device="cpu"), schema)
    model.add(recipe(dim=4, dropout=0.1, embedding_dropout=0.1, activation="relu", layer_norm=True))
    model.compile()
    rows = history_rows(6, 0) | {"cat": np.full(6, 4), "cats": [one * 0 + 4 for one in history_rows(6, 0)["hist"]]}
    model.trainer.train_step(Batch.from_columns(schema, rows))
    assert np.isfinite(model.predict({k: v for k, v in rows.items() if k != "click"})).all()
    assert model.module.tensor("places", Batch.from_columns(schema, rows)).shape == (6, LENGTH + 1)
