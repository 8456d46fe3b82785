"""Batches that are taken together for a GPU: the same bits as one by one, each as aligned as on its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from sample_rows import same_bits

from viviane.batch import Batch
from viviane.core.errors import DataError
from viviane.data import Dataset, prefetch, write_dataset
from viviane.data import run as run_module
from viviane.data.buffers import Buffers, PackedMemory
from viviane.data.packed_layout import PackedLayout
from viviane.data.plan import EpochPlan, RowGroup, Window
from viviane.data.reader import Reader
from viviane.data.run import Run
from viviane.schema import Schema

ROWS = 2000


@pytest.fixture(scope="module", params=["parquet", "viviane", "weighted", "int64"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    wide = "int64" if request.param == "int64" else "int32"
    content: dict[str, Any] = {
        "labels": [{"name": "y"}, {"name": "z", "task": "regression"}],
        "dense": [{"name": "row"}, {"name": "x", "dim": 2}],
        "categorical": [{"name": "a", "num_ids": 3000, "dtype": wide}, {"name": "b", "num_ids": 70_000}],
    }
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "y": rng.integers(0, 2, ROWS).astype(np.float32),
        "z": rng.normal(size=ROWS).astype(np.float32),
        "row": np.arange(ROWS, dtype=np.float32),
        "x": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "a": rng.integers(0, 3000, ROWS),
        "b": rng.integers(0, 70_000, ROWS),
    }
    if request.param == "weighted":
        content["sample_weight"] = "importance"
        columns["importance"] = rng.random(ROWS).astype(np.float32)
    form = "parquet" if request.param == "parquet" else "viviane"
    folder = tmp_path_factory.mktemp("run") / "set"
    return write_dataset(folder, Schema.from_dict(content), [columns], rows_per_group=150, format=form)


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_RUN_ROWS_FOR_GPU", 320)
    monkeypatch.setattr(run_module, "_SPLIT_TOGETHER", 2)
    monkeypatch.setattr(Buffers, "for_batch", lambda self, forms: PackedMemory(forms) if self.pin_memory else self)


def for_gpu(reader: Reader) -> Reader:
    reader._buffers.pin_memory = True
    return reader


def numbers(reader: Reader) -> list[tuple[int, int]]:
    """Return the number of each batch in its run, and the length of the run."""
    return [(number, len(run)) for run, number, _ in reader.pending_batches()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "shuffle_rows": 200},
        {"shuffle": True, "shuffle_rows": 500, "drop_last": True, "num_threads": 4},
        {"shuffle": True, "shuffle_rows": 500, "rank": 1, "num_ranks": 3},
        {"shuffle": True, "rank": 1, "num_ranks": 2, "max_batches": 7},
        {"rank": 2, "num_ranks": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [64, 100, 128, 192, 640, 1999])
def test_batches_are_those_that_are_taken_one_by_one(data: Dataset, batch_size: int, options: dict[str, Any]) -> None:
    for epoch, reader in enumerate([for_gpu(data.reader(batch_size, until_epoch=3, **options))] * 3):
        wanted = list(data.reader(batch_size, epoch=epoch, **options))
        found = list(reader)
        assert [batch.origin for batch in found] == [batch.origin for batch in wanted]
        assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


def test_runs_begin_small_and_hold_the_rows_of_a_task(data: Dataset) -> None:
    found = numbers(for_gpu(data.reader(64, shuffle=True, shuffle_rows=500)))
    sizes = [length for number, length in found if number == 0]
    assert sizes == [1, 2, 4, 5, 5, 5, 5, 5]  # 32 batches
    assert found == [(number, length) for length in sizes for number in range(length)]
    # rows whose tensors would begin anywhere: kernels would see a difference
    assert set(numbers(for_gpu(data.reader(50)))) == {(0, 1)}
    # the consumer's memory is used again batch by batch
    assert set(numbers(data.reader(64, shuffle=True))) == {(0, 1)}


def test_batches_of_a_run_lie_in_one_piece_as_aligned_as_alone_and_count_their_own_writes(data: Dataset) -> None:
    batches = list(for_gpu(data.reader(64, shuffle=True)))[7:12]
    assert len({part.untyped_storage().data_ptr() for batch in batches for part in batch.tensors()}) == 1
    base = batches[0].labels.untyped_storage().data_ptr()
    for part in (part for batch in batches for part in batch.tensors()):
        assert part.is_contiguous()
        assert (part.data_ptr() - base) % 256 == 0
    batches[1].dense[0] = 1.0
    assert [batch._versions() > 0 for batch in batches] == [False, True, False, False, False]


def test_a_run_goes_to_a_device_as_one(data: Dataset) -> None:
    pending_batches = list(for_gpu(data.reader(64)).pending_batches())[3:7]
    there = pending_batches[0][0].to(torch.device("meta"))
    assert len({part.untyped_storage()._cdata for i in range(4) for part in there.batch(i, "").tensors()}) == 1
    for run, number, origin in pending_batches:
        moved, batch = there.batch(number, origin), run.batch(number, origin)
        shapes = [[(part.shape, part.dtype, part.stride()) for part in b.tensors()] for b in (batch, moved)]
        assert shapes[0] == shapes[1]


def test_memory_of_a_run_lives_as_long_as_one_of_its_batches(data: Dataset) -> None:
    batches = iter(for_gpu(data.reader(64, num_threads=1)))
    held = [next(batches) for _ in range(3)]  # runs of 1 and 2
    storage = weakref.ref(held[2].labels.untyped_storage())
    assert held[1].labels.untyped_storage() is storage()
    del batches, held[2]
    gc.collect()
    assert storage() is not None
    held.clear()
    assert storage() is None


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_inside_a_run(data: Dataset, shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "shuffle_rows": 500}
    wanted = list(data.reader(64, **options))
    for position in (1, 2, 5, 9, 31):
        reader = for_gpu(data.reader(64, **options))
        reader.restore({**reader.state(), "batches": position})
        assert all(same_bits(a, b) for a, b in zip(list(reader), wanted[position:], strict=True))


def test_an_error_comes_in_place_of_its_batch(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = for_gpu(data.reader(64, shuffle=True, shuffle_rows=300, num_threads=2))
    plan = EpochPlan(data.groups, 300, 0, 0)
    lost = plan.windows[3].groups[0]  # from row 900 on: batch 14, the third of a run of 5
    name = "view" if data.storage.mapped else "decode"
    plain = getattr(data.storage, name)

    def read(group: RowGroup, *rest: Any) -> Any:
        if group == lost:
            raise DataError("lost")
        return plain(group, *rest)

    monkeypatch.setattr(data.storage, name, read)
    found: list[Batch] = []
    with pytest.raises(DataError, match="lost"):
        found.extend(reader)  # those before the error stay
    assert len(found) == reader.position == 900 // 64
    monkeypatch.undo()
    wanted = list(data.reader(64, shuffle=True, shuffle_rows=300))
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=False))


def test_bags_are_not_cut() -> None:
    one = {"name": "a", "num_ids": 9}
    plain, bags = Schema(categorical=[one]), Schema(categorical=[one, {"name": "b", "num_ids": 9, "kind": "multi_hot"}])
    assert [PackedLayout(plain).can_be_sliced(rows) for rows in (0, 32, 64, 65, 128)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert PackedLayout(bags).dynamic_shape_reason == "bags of column 'b' have no fixed hotness"


@pytest.mark.parametrize("rows", [1, 2, 4095, 4096, 4097, 20_000])
def test_the_order_of_a_window_is_what_it_was_whatever_memory_it_is_in(rows: int) -> None:
    plan, window = EpochPlan([RowGroup(0, 0, 0, rows)], 1, seed=7, epoch=3), Window(5, 0, rows, ())
    wanted = plan._random("rows", 5).permutation(rows)
    out = np.full(rows, -1)
    assert plan.permutation(window, out) is out
    assert np.array_equal(out, wanted)
    assert np.array_equal(plan.permutation(window), wanted)  # type: ignore[arg-type]


def test_an_order_is_found_once_and_an_epoch_ahead(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    plain = EpochPlan.permutation

    def permutation(self: EpochPlan, window: Window, out: Any = None) -> Any:
        asked.append((self.epoch, window.number))
        return plain(self, window, out)

    monkeypatch.setattr(EpochPlan, "permutation", permutation)
    with data.reader(64, shuffle=True, num_threads=1, until_epoch=4) as reader:
        list(reader)
        reader._ahead._tasks[-1].result()  # type: ignore[union-attr]
        assert {(0, 0), (1, 0), (2, 0)} >= set(asked) >= {(0, 0), (1, 0)}
        for _ in range(3):
            list(reader)
    assert asked == [(epoch, 0) for epoch in range(4)]


def test_epochs_may_end_sooner_than_was_said(data: Dataset) -> None:
    reader = data.reader(64, shuffle=True, until_epoch=3)
    list(reader)
    reader.until_epoch = 2  # what was put in order of epoch 2 is forgotten
    assert all(same_bits(a, b) for a, b in zip(list(reader), list(data.reader(64, shuffle=True, epoch=1)), strict=True))
    assert all(same_bits(a, b) for a, b in zip(list(reader), list(data.reader(64, shuffle=True, epoch=2)), strict=True))


@pytest.mark.parametrize("numbers", [[4, 0, 3, 1, 2], [2, 2, 0]])
def test_batches_of_a_run_may_be_taken_in_any_order(numbers: list[int]) -> None:
    schema = Schema(
        dense=[{"name": "row"}],
        categorical=[{"name": "pair", "num_ids": 20, "kind": "multi_hot", "hotness": 2, "weights": "w"}],
        sample_weight="s",
    )
    columns = {
        "row": range(9),
        "pair": [[i, i + 1] for i in range(9)],
        "w": [[i, 0.5] for i in range(9)],
        "s": range(9),
    }
    whole = Batch.from_columns(schema, columns)
    run = Run(lambda: whole, 2, {"pair": 2})
    assert len(run) == 5
    for number in numbers:
        rows = list(range(2 * number, min(9, 2 * number + 2)))
        batch = run.batch(number, "here")
        assert batch.dense[:, 0].tolist() == batch.weight.tolist() == rows
        assert batch.bags["pair"].values.tolist() == [i + j for i in rows for j in (0, 1)]
        assert batch.bags["pair"].weights.tolist() == [part for i in rows for part in (i, 0.5)]
        assert batch.bags["pair"].offsets.tolist() == [2 * i for i in range(len(rows) + 1)]
