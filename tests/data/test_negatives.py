"""Sampled negatives: how often each comes, what is never drawn, the same after a resume and on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import viviane as vv
from viviane.core.errors import CheckpointError, ConfigError, DataError, SchemaError
from viviane.data import Dataset, write_dataset
from viviane.data.negative_dataset import NegativeDataset
from viviane.data.negatives import Negatives, NegativeSampler
from viviane.schema import Schema

USERS, ITEMS = 20, 30


def schema(**more: Any) -> Schema:
    return Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "x"}],
        categorical=[
            {"name": "user", "num_ids": USERS, "dtype": "int64"},
            {"name": "item", "num_ids": ITEMS, "dtype": "int64"},
            {"name": "genre", "num_ids": 9, "dtype": "int64"},
            {"name": "tags", "num_ids": 9, "kind": "multi_hot"},
        ],
        **more,
    )


def written(folder: Path, count: int = 300, seed: int = 0) -> Dataset:
    """A user likes items of his class, of two; an item's genre follows from its id; item 29 never comes."""
    rng = np.random.default_rng(seed)
    user = rng.integers(3, USERS, count)
    item = 3 + (user % 2) + 2 * rng.integers(0, 12, count)
    rows = {
        "y": np.ones(count), "x": rng.random(count), "user": user, "item": item, "genre": 3 + item % 5,
        "tags": [rng.integers(3, 9, n).tolist() for n in rng.integers(0, 4, count)],
    }  # fmt: skip
    return write_dataset(folder, schema(), [rows])


def bags(data: Dataset, batch_size: int, **options: Any) -> list[list[int]]:
    """The negatives of an epoch, a list a batch."""
    with data.reader(batch_size, **options) as reader:
        return [batch.bags["negatives"].values.tolist() for batch in reader]


@pytest.mark.parametrize("alpha", [0.0, 0.75, 1.0])
def test_items_come_in_proportion_to_their_weights(alpha: float) -> None:
    counts = np.array([0, 0, 0, 1, 10, 100, 0, 3], float)
    weights = np.where(counts > 0, counts**alpha, 0)
    sampler = NegativeSampler(weights, seed=4)
    drawn = sampler.draw(np.full(20_000, 5), 5, epoch=2, first_place=0)
    weights[5] = 0  # the rows' own item
    expected = weights / weights.sum()
    found = np.bincount(drawn.ravel(), minlength=8) / drawn.size
    # 100,000 draws: a share p has a standard error of sqrt(p (1 - p) / 1e5) <= 0.0016; five of them
    np.testing.assert_allclose(found, expected, atol=0.008)
    assert (found[weights == 0] == 0).all()
    np.testing.assert_allclose(np.exp(sampler.log_probability(np.arange(8))).sum(), 1.0, rtol=1e-12)


def test_what_is_left_when_nearly_everything_was_seen() -> None:
    """Most draws are refused, so that the exact path decides; the shares stay those of the weights."""
    weights = np.array([0, 0, 0, 1000, 1, 3, 1000], float)
    seen = np.sort(np.array([3, 6]) + 2 * 7)  # of user 2
    sampler = NegativeSampler(weights, seen, seed=1)
    drawn = sampler.draw(np.full(4000, 6), 5, epoch=0, first_place=7, users=np.full(4000, 2))
    assert set(drawn.ravel()) == {4, 5}
    # 20,000 draws: a standard error of 0.003 at a share of 1/4; five of them
    assert abs((drawn == 4).mean() - 0.25) < 0.015
    other = sampler.draw(np.full(100, 6), 5, epoch=0, first_place=7, users=np.full(100, 1))
    assert (other == 3).mean() > 0.9  # another user has not seen it
    with pytest.raises(DataError, match="no item is left"):
        NegativeSampler(np.array([0, 0, 0, 1.0])).draw(np.array([3]), 1, epoch=0, first_place=0)
    with pytest.raises(ConfigError, match="non-negative weights, at least one above 0"):
        NegativeSampler(np.zeros(4))


def test_a_draw_depends_on_seed_epoch_and_place_alone() -> None:
    sampler = NegativeSampler(np.ones(1000), seed=3)
    items = np.arange(50)
    whole = sampler.draw(items, 4, epoch=1, first_place=100)
    parts = [
        sampler.draw(items[:20], 4, epoch=1, first_place=100),
        sampler.draw(items[20:], 4, epoch=1, first_place=120),
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    for other in (
        sampler.draw(items, 4, epoch=2, first_place=100),
        sampler.draw(items, 4, epoch=1, first_place=150),
        NegativeSampler(np.ones(1000), seed=4).draw(items, 4, epoch=1, first_place=100),
    ):
        assert (whole == other).mean() < 0.05
    assert sampler.draw(items[:0], 4, epoch=0, first_place=0).shape == (0, 4)


def test_a_bag_of_items_that_the_user_never_had(tmp_path: Path) -> None:
    data, test = written(tmp_path / "train"), written(tmp_path / "test", 50, seed=1)
    made = NegativeDataset(data, Negatives(item="item", user="user", num=3, alpha=0.75), seen=[test])
    column = made.schema.categorical_column("negatives")
    assert (column.num_ids, column.table, column.max_length, column.dtype) == (ITEMS, "item", 3, "int64")
    assert column.hotness == 3
    had = {
        (int(u), int(i))
        for one in (data, test)
        for batch in one.reader(64)
        for u, i in zip(batch.bag("user").values, batch.bag("item").values, strict=True)
    }
    known = {int(i) for batch in data.reader(64) for i in batch.bag("item").values}
    for batch in made.reader(64, shuffle=True):
        users = batch.bag("user").values.repeat_interleave(3).tolist()
        drawn = batch.bags["negatives"].values.tolist()
        assert len(drawn) == 3 * batch.size
        assert not had.intersection(zip(users, drawn, strict=True))
        assert known.issuperset(drawn)
    assert len(made) == 300
    made.check()


@pytest.mark.parametrize("column", ["negatives", None])
def test_reserved_ids_are_never_drawn(tmp_path: Path, column: str | None) -> None:
    """Padding, missing and unknown ids of the item column stand for no item, however frequent they are."""
    one = Schema(labels=[{"name": "y"}], categorical=[{"name": "item", "num_ids": 6, "dtype": "int64"}])
    items = [0, 1, 2] * 50 + [3, 4, 5]
    data = write_dataset(tmp_path / "data", one, [{"y": [1] * len(items), "item": items}])
    made = NegativeDataset(data, Negatives(item="item", num=3, column=column, alpha=1.0))
    drawn: list[int] = []
    for batch in made.reader(51 if column else 52):
        if column:
            drawn += batch.bags[column].values.tolist()
        else:
            drawn += batch.bag("item").values[batch.label("y") == 0].tolist()
    assert len(drawn) == 3 * len(items)
    assert set(drawn) == {3, 4, 5}


def test_epochs_differ_resumes_and_ranks_do_not(tmp_path: Path) -> None:
    data = NegativeDataset(written(tmp_path / "train"), Negatives(item="item", num=2, seed=9))
    options: dict[str, Any] = {"shuffle": True, "seed": 1}
    first = bags(data, 64, **options)
    assert first == bags(data, 64, **options, num_threads=3)
    assert first != bags(data, 64, **options, epoch=1)
    assert first != bags(NegativeDataset(data.data, Negatives(item="item", num=2, seed=8)), 64, **options)
    reader = data.reader(64, **options)
    batches = iter(reader)
    next(batches)
    next(batches)
    state = reader.state()
    reader.close()
    again = data.reader(64, **options)
    again.restore(state)
    assert [batch.bags["negatives"].values.tolist() for batch in again] == first[2:]
    with pytest.raises(CheckpointError, match="another data set"):
        data.data.reader(64, **options).restore(state)
    ranks = [bags(data, 64, **options, rank=rank, num_ranks=3) for rank in range(3)]
    assert [[*a, *b, *c] for a, b, c in zip(*ranks, strict=True)] == first  # an uneven last batch of 44 rows, too


def test_negatives_in_rows(tmp_path: Path) -> None:
    data = written(tmp_path / "train")
    made = NegativeDataset(data, Negatives(item="item", num=2, column=None, item_columns=("genre",)))
    assert len(made) == 900
    assert made.schema == data.schema
    plain = next(iter(data.reader(21)))
    batch = next(iter(made.reader(64)))  # 21 rows and 42 negatives
    assert batch.size == 63
    assert batch.label("y").tolist() == [1.0, 0.0, 0.0] * 21
    items = batch.bag("item").values.reshape(21, 3)
    assert torch.equal(items[:, 0], plain.bag("item").values)
    assert not (items[:, 1:] == items[:, :1]).any()
    assert torch.equal(batch.bag("genre").values, 3 + batch.bag("item").values % 5)
    for name in ("user",):
        assert torch.equal(batch.bag(name).values, plain.bag(name).values.repeat_interleave(3))
    assert torch.equal(batch.dense, plain.dense.repeat_interleave(3, 0))
    tags, wanted = batch.bags["tags"], plain.bags["tags"]
    for row in range(63):
        mine = tags.values[tags.offsets[row] : tags.offsets[row + 1]].tolist()
        assert mine == wanted.values[wanted.offsets[row // 3] : wanted.offsets[row // 3 + 1]].tolist()
    with pytest.raises(ConfigError, match="too small for a row and its negatives"):
        made.reader(2)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    data = written(tmp_path / "train")
    for negatives, message in (
        (Negatives(item="tags", num=1), "one-hot columns"),
        (Negatives(item="item", num=1, column="x"), "already exists"),
        (Negatives(item="nothing", num=1), "no such column"),
    ):
        with pytest.raises(SchemaError, match=message):
            NegativeDataset(data, negatives)
    with pytest.raises(ConfigError, match="item_columns are for negatives in rows"):
        Negatives(item="item", num=1, item_columns=("genre",))
    with pytest.raises(ConfigError, match="other columns"):
        NegativeDataset(data, Negatives(item="item", num=1), seen=[_other(tmp_path)])


def _other(folder: Path) -> Dataset:
    small = Schema(categorical=[{"name": "item", "num_ids": ITEMS}])
    return write_dataset(folder / "other", small, [{"item": [3]}])


INIT = {"type": "normal", "std": 0.1}


@pytest.mark.parametrize("in_batch", [True, False])
def test_a_two_tower_model_learns_from_them_and_resumes(tmp_path: Path, in_batch: bool) -> None:
    data = written(tmp_path / "train", 1000)
    made = NegativeDataset(data, Negatives(item="item", num=4, user="user"))
    recipe = vv.zoo.TwoTower(
        user=["user"], item=["item"], negatives="negatives", in_batch=in_batch, dim=8, out_dim=8, user_mlp=[16],
        item_mlp=[16], init=INIT,
    )  # fmt: skip

    def model(epochs: int) -> vv.Model:
        one = vv.Model(vv.Solver(batch_size=50, lr=0.01, epochs=epochs, device="cpu"), made)
        one.add(recipe)
        one.compile(vv.Adam())
        return one

    whole = model(2)
    whole.fit(made, run_folder=tmp_path / "whole")
    half = model(1)
    half.fit(made, run_folder=tmp_path / "halves")
    rest = model(2)
    rest.fit(made, run_folder=tmp_path / "halves", resume=True)
    users, items = {"user": np.arange(3, USERS)}, {"item": np.arange(3, ITEMS - 3)}
    assert np.array_equal(whole.tensor("user_vector", users), rest.tensor("user_vector", users))
    rows = {**items, "negatives": [[3] * 4] * (ITEMS - 6)}
    vectors = whole.tensor("item_vector", rows)[:, 0]
    scores = whole.tensor("user_vector", users) @ vectors.T
    match = users["user"][:, None] % 2 == (items["item"][None] - 3) % 2
    assert scores[match].mean() > scores[~match].mean() + 0.2


def test_ncf_learns_from_rows(tmp_path: Path) -> None:
    data = written(tmp_path / "train", 2000)
    made = NegativeDataset(data, Negatives(item="item", num=2, column=None, user="user", item_columns=("genre",)))
    model = vv.Model(vv.Solver(batch_size=300, lr=0.02, epochs=3, device="cpu"), made)
    model.add(vv.zoo.NCF(user="user", item="item", dim=8, init=INIT))
    model.compile(vv.Adam(), metrics=["auc"])
    model.fit(made)
    result = model.evaluate(made)
    assert result["auc"] > 0.8  # users have seen items of their class alone; within it nothing can be told
