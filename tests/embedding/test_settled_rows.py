"""Steps that read nothing of the batch any more."""

import torch

from viviane.batch import Bag, Batch
from viviane.config import SGD, AdaGrad
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.schema import Schema

SCHEMA = Schema(
    categorical=[
        {"name": "item", "num_ids": 9},
        {"name": "seen", "num_ids": 9, "kind": "multi_hot", "dtype": "int64", "weights": "how_much"},
    ]
)


def make():
    tables = [
        TableConfig(name="a", num_rows=9, dim=2, init="normal"),
        TableConfig(name="b", num_rows=9, dim=3, init="normal", optimizer=AdaGrad()),
    ]
    features = [
        FeatureConfig(name="item", table="a"),
        FeatureConfig(name="seen", table="b", combiner="sum"),
    ]
    return EmbeddingCollection(tables, features, SGD(), seed=1)


def batch_of(seed):
    rng = torch.Generator().manual_seed(seed)
    rows = {"item": torch.randint(3, 9, (5,), generator=rng), "seen": [[3, 3], [], [8], [4, 5, 6], [3]]}
    return Batch.from_columns(SCHEMA, {**rows, "how_much": [[1.0, 0.5], [], [2.0], [1.0, 0.0, 3.0], [0.25]]})


def weights_of(emb):
    return [emb.export_table(table).weight for table in emb.tables]


def test_weights_of_ids_may_change_once_rows_are_settled():
    plain, settled = make(), make()
    batch = batch_of(0)
    own = Batch(batch.layout, batch.labels, batch.dense, batch.one_hot, {"seen": copied(batch.bags["seen"])})
    for emb, given in ((plain, batch), (settled, own)):
        emb(given).flat.square().sum().backward()
    settled.settle_rows()
    settled.settle_rows()  # again changes nothing
    own.bags["seen"].weights.fill_(7.0)
    own.bags["seen"].offsets.fill_(0)
    for emb in (plain, settled):
        emb.step(0.1)
    assert all(map(torch.equal, weights_of(plain), weights_of(settled)))
    settled.settle_rows()  # where nothing waits there is nothing to do
    assert not all(map(torch.equal, weights_of(plain), weights_of(make())))


def copied(bag):
    return Bag(bag.values, bag.offsets.clone(), bag.weights.clone())
