"""The two towers: they learn to retrieve, correct for popularity, give their vectors, and refuse wrong roles."""

import json

import numpy as np
import pytest
import torch
from planted import pair_rows, pair_schema, written

from viviane.batch import Batch
from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.model import Model
from viviane.nn import LogFrequency
from viviane.schema import Schema
from viviane.zoo import TwoTower

SMALL = {"dim": 8, "user_mlp": [16], "item_mlp": [16], "out_dim": 8}
BAG = {"name": "neg", "num_ids": 43, "kind": "multi_hot", "max_length": 3, "vocabulary": "item"}
PLAIN = pair_schema()
SAMPLED = Schema(labels=PLAIN.labels, categorical=[*(c.to_dict() for c in PLAIN.categorical), BAG])
FORMS = {
    "in batch": (TwoTower(user="user", item="item", **SMALL), PLAIN),
    "mixed": (TwoTower(user="user", item="item", negatives="neg", **SMALL), SAMPLED),
    "sampled": (TwoTower(user="user", item="item", negatives="neg", in_batch=False, **SMALL), SAMPLED),
}


def clicked_rows(count: int, seed: int) -> dict:
    """Rows with a click alone, as logs of positives are, and up to three sampled items each."""
    rows, rng = pair_rows(4 * count, seed), np.random.default_rng(seed)
    kept = np.flatnonzero(rows["click"])[:count]
    neg = [rng.integers(3, 43, n).astype("int32") for n in rng.integers(1, 4, len(kept))]
    return {name: values[kept] for name, values in rows.items()} | {"neg": neg}


@pytest.mark.parametrize("form", FORMS)
def test_learns_to_retrieve_from_clicks_alone_and_survives_saving(form, tmp_path) -> None:
    recipe, schema = FORMS[form]
    train, test = written(tmp_path, schema, clicked_rows, 6_000)
    model = Model(Solver(batch_size=128, lr=1e-2, epochs=4, device="cpu"), schema)
    model.add(recipe)
    assert Model.from_json(json.loads(model.to_json()), Solver(device="cpu"), schema).nodes == model.nodes
    assert type(recipe).from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    model.compile(Adam(), metrics=["log_loss"])
    model.fit(train)
    users = model.tensor("user_vector", {"user": np.arange(3, 63)})
    columns = {"item": np.arange(3, 43)} | ({} if schema is PLAIN else {"neg": [[]] * 40})
    items = model.tensor("item_vector", columns).reshape(40, -1, 8)[:, 0]
    assert users.shape == (60, 8)
    np.testing.assert_allclose(np.linalg.norm(users, axis=1), 1.0, rtol=1e-5)  # float32
    top = np.argsort(-users @ items.T, axis=1)[:, :5] + 3
    right = (top % 4 == np.arange(3, 63)[:, None] % 4).mean()
    assert right > 0.8  # of five retrieved items; chance is a quarter
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model", device="cpu")
    assert np.array_equal(loaded.predict(test), model.predict(test))
    assert np.array_equal(loaded.tensor("user_vector", test), model.tensor("user_vector", test))


def test_the_estimate_follows_how_often_ids_come_up() -> None:
    rng = np.random.default_rng(0)
    layer = LogFrequency([(1,)], num_buckets=50, rate=0.02).train()
    share = np.array([0.5, 0.1, 0.02])
    for _ in range(4000):
        ids = np.flatnonzero(rng.random(3) < share)
        layer(torch.tensor([*ids, 40, 40]).view(-1, 1))
    found = layer.eval()(torch.tensor([[0], [1], [2], [40], [7]])).exp().flatten().numpy()
    # A mean over about 1 / 0.02 = 50 gaps of a geometric law errs by 1 / sqrt(2 * 50) = 10 %: four times that
    np.testing.assert_allclose(found[:3], share, rtol=0.4)
    assert found[3] == 2.0  # in every batch, twice
    assert found[4] == pytest.approx(1 / 4000)  # never seen: once in all steps at most


def test_the_estimate_of_items_drawn_by_popularity_is_right_on_either_side_of_one_a_batch() -> None:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 41)
    share /= share.sum()
    layer = LogFrequency([(1,)], num_buckets=40, rate=0.01).train()
    for _ in range(1500):
        layer(torch.from_numpy(rng.choice(40, (64, 1), p=share)))
    found = layer.eval()(torch.arange(40).view(-1, 1)).exp().flatten().numpy()
    assert 64 * share.max() > 14  # a batch holds the first item so often, where a share of batches would stop at 1
    # C and D are means over about 100 batches of a Poisson and a geometric law: 10 % at most each; four times that
    np.testing.assert_allclose(found, 64 * share, rtol=0.5)


def test_the_estimate_by_a_loop_with_huge_negative_and_empty_ids() -> None:
    from viviane.nn import EMPTY_ID

    layer = LogFrequency([(3,)], num_buckets=5, rate=0.25, first_counted=1).train()
    rng, gaps, counts, seen = np.random.default_rng(1), {}, {}, {}
    known = [2**62, -7, 3, EMPTY_ID, -(2**63) + 1]
    for step in range(1, 30):
        ids = rng.choice(known, (4, 3))
        got = layer(torch.from_numpy(ids))
        counted = [int(one) % 5 for one in ids[:, 1:].flatten() if one != EMPTY_ID]
        for bucket in set(counted):
            gap, count = step - seen.get(bucket, 0), counted.count(bucket)
            gaps[bucket] = gaps[bucket] + 0.25 * (gap - gaps[bucket]) if bucket in gaps else gap
            counts[bucket] = counts[bucket] + 0.25 * (count - counts[bucket]) if bucket in counts else count
            seen[bucket] = step
        ratio = {bucket: counts[bucket] / gaps[bucket] for bucket in gaps}
        share = np.array([[ratio.get(int(one) % 5, 1 / step) for one in row] for row in ids])
        expected = np.where(ids == EMPTY_ID, 0.0, np.log(share))
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)  # the mean is kept in float32


def test_dense_columns_and_several_columns_enter_their_tower() -> None:
    schema = Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "age"}, {"name": "price", "dim": 2}],
        categorical=[
            {"name": "u", "num_ids": None},
            {"name": "i", "num_ids": None},
            {"name": "tags", "num_ids": 9, "kind": "multi_hot"},
        ],
    )
    model = Model(Solver(device="cpu"), schema)
    model.add(TwoTower(user=["u", "age"], item=["i", "tags", "price"], embedding_dropout=0.1, dropout=0.1, **SMALL))
    model.compile()
    columns = {
        "y": [1, 1],
        "u": [-5, 2**40],
        "i": [7, -1],
        "tags": [[3], []],
        "age": [0.5, 1.0],
        "price": np.ones((2, 2)),
    }
    model.trainer.train_step(Batch.from_columns(schema, columns))
    assert model.module.columns_of("user_vector") == {"u", "age"}
    assert model.tensor("item_vector", {key: columns[key] for key in ("i", "tags", "price")}).shape == (2, 8)
    with pytest.raises(ConfigError, match="did you mean 'user_vector'"):
        model.tensor("user_vectr", columns)


MISTAKES = [
    (PLAIN, {"user": "user", "item": "itm"}, "did you mean 'item'"),
    (PLAIN, {"user": "click", "item": "item"}, "(?s)takes features.*user_id"),
    (PLAIN, {"user": "item", "item": "item"}, "belongs to one tower"),
    (SAMPLED, {"user": "user", "item": "neg"}, "one id a row"),
    (SAMPLED, {"user": "user", "item": "item", "negatives": "user"}, "(?s)bag of the item's ids.*vocabulary"),
    (pair_schema(("click", "buy")), {"user": "user", "item": "item"}, "predict one label"),
]


@pytest.mark.parametrize(("schema", "roles", "message"), MISTAKES)
def test_wrong_roles_say_what_to_do(schema, roles, message) -> None:
    with pytest.raises(SchemaError, match=message):
        TwoTower(**roles).nodes(schema)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="name their column in negatives"):
        TwoTower(user="user", item="item", in_batch=False)
    model = Model(Solver(device="cpu", label_smoothing=0.1), PLAIN)
    model.add(TwoTower(user="user", item="item", **SMALL))
    model.compile()
    with pytest.raises(ConfigError, match="no classes to weigh or smooth"):
        model.trainer.train_step(Batch.from_columns(PLAIN, {"click": [1], "user": [3], "item": [4]}))
