"""Gradients that come back as columns of a wider one, as concatenation gives them, are read where they stand."""

import pytest
import torch

from viviane.batch import Bag
from viviane.config import Adam
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.lookup import flat_rows


def collection():
    tables = [TableConfig(name="a", num_rows=30, dim=3), TableConfig(name="b", num_rows=5, dim=3)]
    features = [
        FeatureConfig(name="one", table="a"),
        FeatureConfig(name="bag", table="b"),
        FeatureConfig(name="mean", table="a", combiner="mean"),
    ]
    return EmbeddingCollection(tables, features, Adam(), seed=4)


@pytest.mark.parametrize("size", [1, 2, 40])
def test_columns_of_a_wider_gradient_move_rows_as_a_copy_does(size):
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    keys = {
        "one": torch.randint(0, 30, (size,), generator=generator),
        "bag": Bag(torch.randint(0, 5, (int(offsets[-1]),), generator=generator), offsets),
        "mean": Bag(torch.randint(0, 30, (int(offsets[-1]),), generator=generator), offsets),
    }
    wide = torch.randn(size, 2 + 9 + 4, generator=generator)
    wide[:, :2], wide[:, 11:] = float("nan"), float("nan")  # others' columns must not be read as ours
    moved = []
    for gradient in (wide[:, 2:11], wide[:, 2:11].clone()):
        emb = collection()
        emb(keys).flat.backward(gradient)
        emb.step(0.1)
        moved.append([emb.export_table(name) for name in "ab"])
    for one, other in zip(*moved, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
        assert bool(torch.isfinite(one.weight).all())


def test_a_gradient_that_is_no_column_range_is_copied():
    one = torch.arange(6.0).view(2, 3)
    flat, apart = flat_rows(one.t())
    assert (flat.tolist(), apart) == ([0.0, 3.0, 1.0, 4.0, 2.0, 5.0], 2)
    flat, apart = flat_rows(torch.ones(1).expand(4, 3))
    assert (len(flat), apart) == (12, 3)
    flat, apart = flat_rows(one[:, 1:])
    assert (flat.tolist(), apart) == ([1.0, 2.0, 3.0, 4.0, 5.0], 3)
    assert flat.data_ptr() == one[:, 1:].data_ptr()
