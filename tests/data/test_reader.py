from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_rows import SCHEMA, columns_of, make_rows, rows_of, same_bits, write_rows

from viviane.core.errors import CheckpointError, ConfigError, DataError
from viviane.data import Dataset, write_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_rows(tmp_path_factory.mktemp("data") / "set", make_rows(100))


def test_unshuffled_rows_come_in_the_order_of_the_files(data: Dataset) -> None:
    rows = [row for batch in data.reader(8) for row in rows_of(batch)]
    assert rows == make_rows(100)


def test_shuffled_rows_are_the_same_rows_in_another_order(data: Dataset) -> None:
    rows = [row for batch in data.reader(8, shuffle=True, seed=3, shuffle_rows=30) for row in rows_of(batch)]
    numbers = [row["row"] for row in rows]
    assert numbers != sorted(numbers)
    assert sorted(rows, key=lambda row: row["row"]) == make_rows(100)


def test_dtypes_and_shapes(data: Dataset) -> None:
    batch = next(iter(data.reader(8)))
    assert batch.labels.shape == (8, 2)
    assert batch.dense.shape == (8, 4)
    assert batch.one_hot.shape == (8, 2)
    assert batch.one_hot.dtype == torch.int64  # one of the two columns is int64
    assert batch.bags["tags"].values.dtype == torch.int32
    assert batch.bags["history"].values.dtype == torch.int64
    assert all(part.is_contiguous() for part in (batch.labels, batch.dense, batch.one_hot))
    assert "part-00000.parquet row group 0" in batch.origin


def test_threads_do_not_change_a_bit(data: Dataset) -> None:
    one, four = (list(data.reader(9, shuffle=True, seed=5, shuffle_rows=25, num_threads=n)) for n in (1, 4))
    assert len(one) == 12
    assert all(same_bits(a, b) for a, b in zip(one, four, strict=True))


def test_seed_and_epoch_choose_the_order(data: Dataset) -> None:
    def order(seed: int, epoch: int) -> tuple[float, ...]:
        reader = data.reader(100, shuffle=True, seed=seed, epoch=epoch)
        return tuple(next(iter(reader)).dense[:, 0].tolist())

    assert order(0, 0) == order(0, 0)
    assert len({order(0, 0), order(0, 1), order(1, 0)}) == 3


def test_a_batch_mixes_row_groups_and_groups_are_mixed_over_the_whole_set(data: Dataset) -> None:
    batches = list(data.reader(10, shuffle=True, seed=1, shuffle_rows=35))
    groups = [{int(row) // 7 for row in batch.dense[:, 0].tolist()} for batch in batches]
    assert min(len(found) for found in groups) >= 3  # 10 rows out of 5 groups of 7
    first_half = {group for found in groups[:5] for group in found}
    assert max(first_half) >= 10  # in file order, 50 rows would not leave groups 0 to 7


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    shuffle_rows=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_holds_every_row_once(
    tmp_path: Path, sizes: list[list[int]], batch_size: int, shuffle_rows: int, shuffle: bool, drop_last: bool,
    epoch: int,
) -> None:  # fmt: skip
    # files of row groups of 0 to 5 rows; a file may have no row group at all
    total = sum(map(sum, sizes))
    table = pq.read_table(write_rows(tmp_path / "seed", make_rows(1)).files[0])
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.parquet"):
        old.unlink()
    SCHEMA.save(folder)
    number = 0
    for file, groups in enumerate(sizes):
        with pq.ParquetWriter(folder / f"part-{file}.parquet", table.schema) as writer:
            for rows in groups:
                group = table.take(np.zeros(rows, np.int64))
                where = group.schema.get_field_index("row")
                row_numbers = np.arange(number, number + rows, dtype=np.float32)
                group = group.set_column(where, group.schema.field("row"), [row_numbers])
                writer.write_table(group, row_group_size=max(rows, 1))
                number += rows
    data = Dataset(folder)
    assert len(data) == total
    reader = data.reader(
        batch_size, shuffle=shuffle, shuffle_rows=shuffle_rows, drop_last=drop_last, epoch=epoch, seed=2
    )
    expected = len(reader)
    batches = list(reader)
    assert len(batches) == expected == (total // batch_size if drop_last else -(-total // batch_size))
    assert all(len(batch) == batch_size for batch in batches[: total // batch_size])
    found = [row for batch in batches for row in batch.dense[:, 0].tolist()]
    if drop_last:
        assert len(set(found)) == len(found) == expected * batch_size
    else:
        assert sorted(found) == list(range(total))
    if not shuffle:
        assert found == sorted(found)
    assert (reader.epoch, reader.position) == (epoch + 1, 0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_every_position(data: Dataset, shuffle: bool) -> None:
    def new() -> object:
        return data.reader(9, shuffle=shuffle, seed=4, shuffle_rows=20)

    whole = list(new())
    for position in range(len(whole) + 1):
        reader = new()
        batches = iter(reader)
        for _ in range(position):
            next(batches)
        state = json.loads(json.dumps(reader.state()))
        assert state["batches"] == position
        reader.close()
        again = new()
        again.restore(state)
        rest = list(again)
        assert len(rest) == len(whole) - position
        assert all(same_bits(a, b) for a, b in zip(rest, whole[position:], strict=True))


def test_resume_decodes_only_what_is_needed(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = data.reader(10, shuffle=True, seed=1, shuffle_rows=20)
    reader.restore({**reader.state(), "batches": 9})
    decoded = []
    decode = data.storage.decode
    monkeypatch.setattr(data.storage, "decode", lambda group, *rest: (decoded.append(group), decode(group, *rest))[1])
    assert len(list(reader)) == 1
    assert decoded
    assert sum(group.num_rows for group in decoded) <= 20 + 7


def test_state_counts_delivered_batches_not_prefetched_ones(data: Dataset) -> None:
    reader = data.reader(5)
    for number, _ in enumerate(reader, start=1):
        assert reader.state()["batches"] == number
        if number == 3:
            break
    assert next(iter(reader)).dense[0, 0] == 15


def test_max_batches_and_drop_last(data: Dataset) -> None:
    assert [len(batch) for batch in data.reader(30, max_batches=2)] == [30, 30]
    assert [len(batch) for batch in data.reader(30, max_batches=9)] == [30, 30, 30, 10]
    assert [len(batch) for batch in data.reader(30, drop_last=True)] == [30, 30, 30]
    assert list(data.reader(101, drop_last=True)) == []


def test_batch_larger_than_the_set_and_batch_of_one(data: Dataset) -> None:
    assert [len(batch) for batch in data.reader(1000)] == [100]
    assert [row["row"] for batch in data.reader(1) for row in rows_of(batch)] == list(range(100))


def test_set_epoch_keeps_the_position_within_an_epoch(data: Dataset) -> None:
    reader = data.reader(10, shuffle=True)
    next(iter(reader))
    reader.set_epoch(0)
    assert reader.position == 1
    reader.set_epoch(3)
    assert (reader.epoch, reader.position) == (3, 0)
    with pytest.raises(ConfigError, match="epoch is negative"):
        reader.set_epoch(-1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch_size": 11}, "another batch_size"),
        ({"seed": 1}, "another seed"),
        ({"shuffle": False}, "another shuffle"),
        ({"shuffle_rows": 50}, "another shuffle_rows"),
        ({"drop_last": True}, "another drop_last"),
    ],
)
def test_a_state_of_another_order_is_refused(data: Dataset, other: dict[str, object], message: str) -> None:
    arguments = {"batch_size": 10, "shuffle": True, "seed": 0, "shuffle_rows": 20}
    state = data.reader(**arguments).state()
    with pytest.raises(CheckpointError, match=message):
        data.reader(**{**arguments, **other}).restore(state)


def test_a_state_of_another_data_set_is_refused(data: Dataset, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other", make_rows(99))
    with pytest.raises(CheckpointError, match="another data set"):
        other.reader(10).restore(data.reader(10).state())
    with pytest.raises(CheckpointError, match="keys are missing\n  value:   'fingerprint'"):
        other.reader(10).restore({k: v for k, v in data.reader(10).state().items() if k != "fingerprint"})
    with pytest.raises(CheckpointError, match="not a position of a reader"):
        data.reader(10).restore({**data.reader(10).state(), "batches": -1})


@pytest.mark.parametrize("name", ["batch_size", "num_threads", "shuffle_rows", "max_batches"])
def test_too_small_arguments(data: Dataset, name: str) -> None:
    with pytest.raises(ConfigError, match=f"reader's {name} is too small"):
        data.reader(**{"batch_size": 1, name: 0})


def ours() -> int:
    return sum(thread.name.startswith("viviane-reader") for thread in threading.enumerate())


def test_no_thread_outlives_its_iterator(data: Dataset) -> None:
    for batch in data.reader(5):  # broken off: the loop's iterator is dropped
        assert len(batch) == 5
        break
    assert ours() == 0

    reader = data.reader(5)
    batches = iter(reader)
    next(batches)
    assert 1 <= ours() <= 2
    reader.close()
    assert ours() == 0
    with pytest.raises(StopIteration):
        next(batches)

    with data.reader(5, num_threads=4) as reader:
        held = iter(reader)
        next(held)
    assert ours() == 0

    first = iter(reader)
    next(first)
    second = iter(reader)  # closes the first
    with pytest.raises(StopIteration):
        next(first)
    assert next(second).dense[0, 0] == 10  # the batch after the two that were delivered
    del second, first
    gc.collect()
    assert ours() == 0


def test_no_thread_outlives_an_exception_in_the_loop(data: Dataset) -> None:
    def consume() -> None:
        for batch in data.reader(5):
            raise RuntimeError(str(len(batch)))

    with pytest.raises(RuntimeError, match="5"):
        consume()
    gc.collect()
    assert ours() == 0


def test_the_interpreter_ends_with_a_reader_open(data: Dataset) -> None:
    code = f"from viviane.data import Dataset; it = iter(Dataset({str(data.path)!r}).reader(2)); print(len(next(it)))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_an_error_in_a_thread_reaches_the_consumer_at_its_batch(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(100))
    reader = data.reader(7)
    data.files[2].unlink()  # rows 42 to 62
    seen = []

    def consume() -> None:
        for batch in reader:
            seen.append(batch.dense[0, 0].item())

    with pytest.raises(DataError, match=r"cannot be opened\n  where:   .*part-00002.parquet"):
        consume()
    assert seen == [0, 7, 14, 21, 28, 35]
    assert reader.state()["batches"] == 6


def test_a_file_that_changes_after_opening_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(50))
    whole = data.files[1].read_bytes()
    data.files[1].write_bytes(whole[:-100])
    with pytest.raises(DataError, match="changed after the data set was opened"):
        list(data.reader(10))


def test_batches_stay_valid_while_later_ones_are_read(data: Dataset) -> None:
    kept = list(data.reader(6, shuffle=True, shuffle_rows=14, seed=9))
    fresh = data.reader(6, shuffle=True, shuffle_rows=14, seed=9)
    assert all(same_bits(a, b) for a, b in zip(kept, fresh, strict=True))
    kept[0].dense.fill_(-1)  # batches own their memory
    assert kept[1].dense[:, 0].min() >= 0


def test_no_labels_no_one_hot_only_bags(tmp_path: Path) -> None:
    schema = SCHEMA.from_dict({"categorical": [{"name": "t", "num_ids": 9, "kind": "multi_hot"}]})
    data = write_dataset(tmp_path / "s", schema, [{"t": [[1], [], [2, 2]]}])
    batch = data.head(3)
    assert batch.labels.shape == (3, 0)
    assert batch.one_hot.shape == (3, 0)
    assert batch.bags["t"].offsets.tolist() == [0, 1, 1, 3]


def test_one_key_a_hundred_thousand_times_and_one_huge_bag(tmp_path: Path) -> None:
    schema = SCHEMA.from_dict(
        {
            "categorical": [
                {"name": "k", "num_ids": 2**31, "dtype": "int32"},
                {"name": "t", "num_ids": 2**40, "kind": "multi_hot", "dtype": "int64"},
            ]
        }
    )
    rows = 100_000
    bags = [[2**40 - 1] * rows] + [[]] * (rows - 1)
    data = write_dataset(tmp_path / "s", schema, [{"k": np.full(rows, 2**31 - 1), "t": bags}])
    batches = list(data.reader(30_000, shuffle=True))
    assert sum(int((batch.one_hot == 2**31 - 1).sum()) for batch in batches) == rows
    assert sum(int((batch.bags["t"].values == 2**40 - 1).sum()) for batch in batches) == rows


def test_ignored_columns_are_not_read(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "set", make_rows(20))
    narrow = Dataset(data.path, SCHEMA.select(["click", "row", "b"]))
    assert "vector" in narrow.schema.ignored
    batch = narrow.head(20)
    assert batch.one_hot[:, 0].tolist() == columns_of(make_rows(20))["b"]
    assert not batch.bags
