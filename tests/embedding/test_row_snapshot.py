"""Rows held for a reader while steps move them, against a copy that was taken at the start."""

import threading

import numpy as np
import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad, Adam
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, row_snapshot
from viviane.embedding.row_snapshot import RowSnapshot


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_snapshot, "PIECE_BYTES", 96)
    monkeypatch.setattr(row_snapshot, "_BLOCK_BYTES", 64)


def bytes_of(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dim", [1, 3, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_reader_sees_the_rows_of_the_beginning(dim, dtype, index):
    rng = np.random.default_rng(dim)
    tensors = {"weight": torch.randn(101, dim).to(dtype), "state": torch.randn(101)}
    truth = {name: one.clone() for name, one in tensors.items()}
    held = RowSnapshot(tensors)

    def move():
        kinds = [rng.integers(0, 101, 20), np.array([0, 100]), np.full(100_000, 7), np.empty(0)]
        rows = torch.from_numpy(kinds[rng.integers(4)].astype(np.int64)).to(index)
        with held.moving(rows):
            for one in tensors.values():
                one[rows.long()] = 9.0

    for start, stop in ((0, 40), (40, 41), (41, 41), (41, 101)):
        for name in tensors:
            found = []
            for piece in held.read(name, start, stop):
                found.append(piece.tobytes())
                move()
            assert b"".join(found) == bytes_of(truth[name][start:stop])
        held.release(start, stop)
    kept = held.kept_bytes
    assert 0 < kept < sum(len(bytes_of(one)) for one in tensors.values())
    for _ in range(8):
        move()
    assert held.kept_bytes == kept  # nobody reads any more


@pytest.mark.parametrize("rule", [SGD(), Adam(), Adam(update="lazy_global"), AdaGrad(row_wise=True)])
def test_steps_of_a_collection_go_on_while_rows_are_read(rule):
    tables = [
        TableConfig(name="a", num_rows=50, dim=3, optimizer=rule), TableConfig(name="b", num_rows=20, dim=3),
        TableConfig(name="c", num_rows=10, dim=3, trainable=False),
    ]  # fmt: skip
    emb = EmbeddingCollection(tables, [FeatureConfig(name=n, table=n, combiner="sum") for n in "abc"], SGD())

    def step(seed):
        rng = np.random.default_rng(seed)
        rows = {n: [rng.integers(0, emb.tables[n].num_rows, k).tolist() for k in (2, 0, 5)] for n in "abc"}
        emb({name: Bag.from_lists(lists) for name, lists in rows.items()}).flat.square().sum().backward()
        emb.step(lr=0.5)

    step(0)
    (storage,) = emb.all_storages()
    truth = {i: {n: t.clone() for n, t in named(storage, i).items()} for i in range(len(storage.rule_ranges))}
    assert storage.take_snapshots()
    held = storage.snapshots
    found = {(i, n): b"" for i in held for n in truth[i]}
    seed = 1
    for i, name in found:
        for piece in held[i].read(name, 0, len(truth[i][name])):
            found[i, name] += piece.tobytes()
            step(seed)
            seed += 1
    assert all(found[i, name] == bytes_of(truth[i][name]) for i, name in found)
    assert not torch.equal(truth[0]["weight"], named(storage, 0)["weight"])


def named(storage, index):
    one = storage.rule_ranges[index]
    return {"weight": storage.weight[one.start : one.stop], **storage._state(index, one.start, one.stop)}


def test_other_changes_wait_for_the_reader():
    table = TableConfig(name="a", num_rows=5, dim=2)
    emb = EmbeddingCollection([table], [FeatureConfig(name="a", table="a")], SGD())
    (storage,) = emb.all_storages()
    before = storage.weight.clone()
    storage.take_snapshots()
    thread = threading.Thread(target=emb.copy_rows, args=("a", torch.ones(5, 2)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert torch.equal(storage.weight, before)
    storage.end_snapshots()
    thread.join(30)
    assert storage.table_rows("a").eq(1).all()
