"""Rows that are put in order on a device: the batches of the reader, bit for bit; the device is a CPU here."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_rows import make_rows, same_bits, write_rows

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset, Negatives, device_shuffle, prefetch, write_dataset
from viviane.data import run as run_module
from viviane.data.negative_dataset import NegativeDataset
from viviane.data.packed_layout import PackedLayout
from viviane.data.reader import Reader
from viviane.data.run import Run
from viviane.schema import Schema

CPU = torch.device("cpu")
ROWS = 2000


def schema_of(kind: str) -> Schema:
    wide = "int64" if kind == "int64" else "int32"
    content: dict[str, Any] = {
        "labels": [{"name": "y"}, {"name": "z", "task": "regression"}],
        "dense": [{"name": "row"}, {"name": "x", "dim": 2}],
        "categorical": [{"name": "a", "num_ids": 3000, "dtype": wide}, {"name": "b", "num_ids": 70_000}],
    }
    if kind in ("weighted", "bags"):
        content["sample_weight"] = "importance"
    if kind == "bags":
        content["categorical"] += [
            {"name": "two", "num_ids": 90, "kind": "multi_hot", "hotness": 2, "weights": "two_weights"},
            {"name": "three", "num_ids": 2**40, "kind": "sequence", "hotness": 3, "max_length": 4, "dtype": "int64"},
            {"name": "pair", "num_ids": 10, "kind": "multi_hot", "hotness": 2},
        ]
    return Schema.from_dict(content)


def columns_for(schema: Schema, rows: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "y": rng.integers(0, 2, rows).astype(np.float32),
        "z": rng.normal(size=rows).astype(np.float32),
        "row": np.arange(rows, dtype=np.float32),
        "x": rng.normal(size=(rows, 2)).astype(np.float32),
        "a": rng.integers(0, 3000, rows),
        "b": rng.integers(0, 70_000, rows),
        "importance": rng.random(rows).astype(np.float32),
        "two": rng.integers(0, 90, (rows, 2)).tolist(),
        "two_weights": rng.random((rows, 2)).tolist(),
        "three": rng.integers(0, 2**40, (rows, 3)).tolist(),
        "pair": rng.integers(0, 10, (rows, 2)).tolist(),
    }
    return {name: columns[name] for name in schema.column_names}


@pytest.fixture(scope="module", params=["parquet", "viviane", "weighted", "int64", "bags"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    schema = schema_of(request.param)
    form = "parquet" if request.param in ("parquet", "bags") else "viviane"
    folder = tmp_path_factory.mktemp("shuffled") / "set"
    return write_dataset(folder, schema, [columns_for(schema)], rows_per_group=150, rows_per_file=900, format=form)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs have several batches, and windows go over in several parts."""
    monkeypatch.setattr(device_shuffle, "_RUN_ROWS", 320)
    monkeypatch.setattr(device_shuffle, "_LEAST_ROWS", 1)
    monkeypatch.setattr(run_module, "_SPLIT_TOGETHER", 2)


def mixed(reader: Reader) -> Iterator[Batch]:
    """An epoch of batches as a feed takes them."""
    there: weakref.WeakKeyDictionary[Run, Run] = weakref.WeakKeyDictionary()
    for run, number, origin in reader.pending_batches(CPU):
        assert run.is_pinned
        if run not in there:
            assert number == 0
            there[run] = run.to(CPU)
            run.copy_ahead()
        yield there[run].batch(number, origin)


def same(found: list[Batch], wanted: list[Batch]) -> bool:
    assert [one.origin for one in found] == [one.origin for one in wanted]
    assert [len(one) for one in found] == [len(one) for one in wanted]
    return all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("until_epoch", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 64, "shuffle_rows": 500},
        {"batch_size": 64},  # an epoch is one window
        {"batch_size": 50, "shuffle_rows": 300},  # cannot be cut
        {"batch_size": 7, "shuffle_rows": 300, "num_threads": 1},
        {"batch_size": 1999, "shuffle_rows": 700, "num_threads": 5},
        {"batch_size": 5000},
        {"batch_size": 192, "drop_last": True, "shuffle_rows": 1},
        {"batch_size": 128, "max_batches": 5, "shuffle_rows": 400},
        {"batch_size": 192, "rank": 1, "num_ranks": 3, "shuffle_rows": 500},
        {"batch_size": 256, "rank": 0, "num_ranks": 2},
        {"batch_size": 1024, "rank": 7, "num_ranks": 8, "shuffle_rows": 300},  # no rows in some windows
        {"batch_size": 192, "rank": 2, "num_ranks": 3, "shuffle_rows": 500, "drop_last": True, "num_threads": 1},
        # No rows in some batches.
        {"batch_size": 3, "rank": 3, "num_ranks": 4, "shuffle_rows": 150, "max_batches": 120},
    ],
    ids=str,
)
def test_batches_are_those_of_the_reader(data: Dataset, options: dict[str, Any], until_epoch: int) -> None:
    there = data.reader(shuffle=True, seed=5, until_epoch=until_epoch, **options)
    here = data.reader(shuffle=True, seed=5, **options)
    with there:
        for _ in range(3):
            assert same(list(mixed(there)), list(here))
            assert there.state() == here.state()


def test_layout_and_types_are_those_of_the_reader(data: Dataset) -> None:
    one = next(mixed(data.reader(64, shuffle=True)))
    other = next(iter(data.reader(64, shuffle=True)))
    assert one.layout == other.layout
    assert [part.dtype for part in one.tensors()] == [part.dtype for part in other.tensors()]
    assert [part.shape for part in one.tensors()] == [part.shape for part in other.tensors()]
    assert all(part.is_contiguous() for part in one.tensors())
    # Without the offsets of bags, which batches of a run share.
    parts = [one.labels, one.dense, one.one_hot, *(bag.values for bag in one.bags.values())]
    first = one.labels.data_ptr()
    assert all((part.data_ptr() - first) % 256 == 0 for part in parts)


@pytest.mark.parametrize("share", [{}, {"rank": 1, "num_ranks": 3}], ids=["whole", "share"])
@pytest.mark.parametrize("leave", [0, 1, 5, 12, 31])
def test_a_saved_position_continues_with_the_next_batch_either_way(
    data: Dataset, leave: int, share: dict[str, int]
) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 2, "shuffle_rows": 500, **share}
    wanted = [batch for epoch in range(2) for batch in data.reader(64, epoch=epoch, **options)]
    reader = data.reader(64, until_epoch=2, **options)
    for begin in (mixed, iter):
        batches = begin(reader)
        for _ in range(leave):
            if next(batches, None) is None:
                batches = begin(reader)
                next(batches)
        reader.restore(reader.state())  # windows are on their way
    position = reader.epoch * len(reader) + reader.position
    assert position == 2 * leave
    rest = list(mixed(reader))
    if reader.epoch < 2:
        rest += list(mixed(reader))
    assert same(rest, wanted[position:])
    reader.close()


def test_an_epoch_that_was_begun_for_a_device_can_be_read_without_it(data: Dataset) -> None:
    options = {"shuffle": True, "seed": 2, "shuffle_rows": 500}
    there, here = data.reader(64, until_epoch=3, **options), data.reader(64, **options)
    with there:
        assert same(list(mixed(there)), list(here))
        assert same(list(there), list(here))
        assert same(list(mixed(there)), list(here))
    assert not [one for one in threading.enumerate() if one.name.startswith("viviane-reader")]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_the_memory_of_a_window_lives_no_longer_than_it_is_needed(data: Dataset) -> None:
    reader = data.reader(64, shuffle=True, shuffle_rows=300)
    windows: dict[int, weakref.ref[Any]] = {}
    most = 0
    for run, number, _ in reader.pending_batches(CPU):
        if number == 0:
            windows |= {window.window.number: weakref.ref(window) for window, _ in run._parts_of_windows}
            run.to(CPU)
            run.copy_ahead()
        del run
        most = max(most, sum(one() is not None for one in windows.values()))
    assert sorted(windows) == list(range(7))
    assert most <= 3
    assert not any(one() is not None for one in windows.values())


@pytest.mark.parametrize("form", ["parquet", "viviane"])
@pytest.mark.parametrize("until_epoch", [0, 3])
def test_an_error_comes_in_place_of_its_batch(tmp_path: Path, form: str, until_epoch: int) -> None:
    schema = schema_of("bags")
    data = write_dataset(tmp_path / "bad", schema, [columns_for(schema)], rows_per_group=150, format=form)
    content = bytearray(data.files[0].read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = b"\0" * 3000
    data.files[0].write_bytes(content)
    data = Dataset(tmp_path / "bad")
    options = {"shuffle": True, "shuffle_rows": 150, "seed": 1}

    def read(batches: Iterator[Batch]) -> tuple[list[Batch], str]:
        found: list[Batch] = []
        with pytest.raises(DataError) as raised:
            found.extend(iter(lambda: next(batches), None))
        return found, str(raised.value)

    there, here = data.reader(64, until_epoch=until_epoch, **options), data.reader(64, **options)
    found, message = read(mixed(there))
    wanted, other = read(iter(here))
    assert same(found, wanted)
    assert message == other
    assert wanted


def test_what_stands_in_the_way_is_said(data: Dataset, tmp_path: Path) -> None:
    reader = data.reader(64)
    assert reader.no_device_shuffle_reason(CPU) == "the reader does not shuffle"
    with pytest.raises(ConfigError, match="rows cannot be shuffled on the device: the reader does not shuffle"):
        reader.pending_batches(CPU)
    assert data.reader(64, shuffle=True).no_device_shuffle_reason(CPU) is None
    loose = write_rows(tmp_path / "loose", make_rows(20))
    wanted = "bags of column 'tags' have no fixed hotness"
    assert loose.reader(8, shuffle=True).no_device_shuffle_reason(CPU) == wanted
    negatives = NegativeDataset(data, Negatives(item="a", num=1, column=None))
    reason = negatives.reader(64, shuffle=True).no_device_shuffle_reason(CPU)
    assert reason is not None
    assert "negatives" in reason


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_each_row_goes_to_one_device_of_several(data: Dataset, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[int] = []
    stage = device_shuffle.DeviceShuffle.stage

    def noted(self: Any, *rest: Any) -> Any:
        window = stage(self, *rest)
        staged.append(window.num_rows)
        return window

    monkeypatch.setattr(device_shuffle.DeviceShuffle, "stage", noted)
    for rank in range(num_ranks):
        list(mixed(data.reader(100, shuffle=True, shuffle_rows=450, rank=rank, num_ranks=num_ranks)))
    assert sum(staged) == ROWS
    assert max(staged) <= -(-450 // num_ranks) + 100  # a batch may begin in the window before


def test_the_memory_of_windows_counts_only_rows_of_this_rank(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []
    monkeypatch.setattr(
        device_shuffle.DeviceShuffle,
        "too_large_reason",
        staticmethod(lambda layout, rows, device: requested.append(rows)),
    )
    for batch_size, num_ranks in ((100, 1), (100, 4), (2, 4), (5000, 4)):
        data.reader(batch_size, shuffle=True, shuffle_rows=850, num_ranks=num_ranks).no_device_shuffle_reason(CPU)
    # A window has 1,000 rows at most; a batch of two rows may be of one rank alone.
    assert requested == [1000, 12 * 25, 502, 1000]


def test_windows_that_take_much_of_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 1 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    layout, gpu = PackedLayout(schema_of("bags")), torch.device("cuda", 0)
    # 2 labels, 3 dense numbers, 2 ids, a weight, 2 + 2 + 6 + 2 of bags, and 1 of the order: words of four bytes
    assert layout.row_bytes == 4 * 21
    most = (1 << 25) // 3 // layout.row_bytes
    assert device_shuffle.DeviceShuffle.too_large_reason(layout, most, gpu) is None
    reason = device_shuffle.DeviceShuffle.too_large_reason(layout, most + 1, gpu)
    assert reason == f"windows of {most + 1:,} rows take 32 MiB of the GPU, and 32 are allowed"
    assert device_shuffle.DeviceShuffle.too_large_reason(layout, 1 << 40, CPU) is None


def test_runs_are_as_long_as_is_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = device_shuffle.DeviceShuffle(PackedLayout(schema_of("int64")), CPU)
    assert found.run_rows(64) == 320
    assert found.run_rows(1000) == 1000
    monkeypatch.setattr(device_shuffle, "_RUN_BYTES", 64 * found.layout.row_bytes)
    assert found.run_rows(8) == 64


def test_bags_of_another_length_than_the_files_say_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not seen where lengths are checked: this is for files that are trusted."""
    schema = schema_of("bags")
    data = write_dataset(tmp_path / "rows", schema, [columns_for(schema, 300)], rows_per_group=150, format="viviane")
    decode = type(data.storage).decode

    def shorter(self: Any, group: Any, block: Any, start: int, part: int) -> None:
        decode(self, group, block, start, part)
        bag = block.parts["three"][part]
        block.parts["three"][part] = type(bag)(bag.values[:-1], bag.offsets)

    monkeypatch.setattr(type(data.storage), "decode", shorter)
    with pytest.raises(
        DataError, match=r"(?s)number of ids of a row differs from its column's hotness.*'three'.*449.*450"
    ):
        list(mixed(data.reader(64, shuffle=True)))


def test_the_order_of_the_next_window_is_found_before_a_window_is_decoded(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    order_of, decode = prefetch._order_for_device, prefetch._stage

    def order_noted(plan: Any, window: Any, *rest: Any) -> Any:
        done.append(("order", window.number))
        return order_of(plan, window, *rest)

    def decode_noted(storage: Any, window: Any, *rest: Any) -> None:
        done.append(("decode", window.window.number))
        decode(storage, window, *rest)

    monkeypatch.setattr(prefetch, "_order_for_device", order_noted)
    monkeypatch.setattr(prefetch, "_stage", decode_noted)
    list(mixed(data.reader(64, shuffle=True, shuffle_rows=300, num_threads=1)))  # one thread: one after another
    assert [number for what, number in done if what == "order"] == list(range(7))
    for number in range(6):
        assert done.index(("order", number + 1)) < done.index(("decode", number))


def test_old_names_of_the_reader_warn(data: Dataset) -> None:
    reader = data.reader(64, shuffle=True)
    with pytest.warns(DeprecationWarning, match="no_device_shuffle_reason"):
        assert reader.why_not_mixed_on(CPU) is None
    with pytest.warns(DeprecationWarning, match="pending_batches"), closing(reader.cuts(CPU)) as pending:
        assert next(iter(pending))[1] == 0
    reader.close()
