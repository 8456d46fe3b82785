"""Rows of the next epoch are read while one ends: same batches, same errors, and nothing that nobody wants."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_rows import SCHEMA, columns_of, make_rows, same_bits, write_rows

from viviane.batch import Batch
from viviane.core.errors import DataError
from viviane.data import Dataset, Negatives, prefetch, write_dataset
from viviane.data.buffers import Buffers, PackedMemory
from viviane.data.negative_dataset import NegativeDataset
from viviane.data.reader import Reader
from viviane.data.row_buffer import RowBuffer

EPOCHS = 4


@pytest.fixture(scope="module", params=["parquet", "viviane"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data") / "set"
    if request.param == "parquet":
        return write_rows(folder, make_rows(100))
    rows = columns_of(make_rows(100))
    return write_dataset(folder, SCHEMA, [rows], rows_per_group=7, rows_per_file=40, format=request.param)


@pytest.fixture(params=["", "as for a GPU", "a batch a task"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Reader], Reader]:
    """Let a reader work as it does for a GPU, its memory alone is not page-locked; or with many small tasks."""
    if request.param == "a batch a task":
        monkeypatch.setattr(prefetch, "_RUN_ROWS", 1)

    def change(reader: Reader) -> Reader:
        if request.param == "as for a GPU":
            monkeypatch.setattr(
                Buffers, "for_batch", lambda self, forms: PackedMemory(forms) if self.pin_memory else self
            )
            reader._buffers.pin_memory = True
        return reader

    return change


def threads() -> int:
    return sum(thread.name.startswith("viviane-reader") for thread in threading.enumerate())


def read(reader: Reader, epochs: int = EPOCHS) -> list[list[Batch]]:
    with reader:
        return [list(reader) for _ in range(epochs)]


def same(found: list[list[Batch]], wanted: list[list[Batch]]) -> bool:
    assert [len(epoch) for epoch in found] == [len(epoch) for epoch in wanted]
    pairs = [(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    assert [a.origin for a, _ in pairs] == [b.origin for _, b in pairs]
    return all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "shuffle_rows": 20},
        {"shuffle": True, "shuffle_rows": 20, "drop_last": True, "num_threads": 4},
        {"shuffle": True, "shuffle_rows": 30, "max_batches": 3},
        {"shuffle": True},  # an epoch is one window
        {"shuffle": True, "rank": 1, "num_ranks": 3, "shuffle_rows": 15},
        {"rank": 2, "num_ranks": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [4, 9, 100, 150])
def test_batches_are_those_of_epochs_read_one_by_one(
    data: Dataset, way: Callable[[Reader], Reader], batch_size: int, options: dict[str, Any]
) -> None:
    wanted = [list(data.reader(batch_size, seed=3, epoch=epoch, **options)) for epoch in range(EPOCHS)]
    assert same(read(way(data.reader(batch_size, seed=3, until_epoch=EPOCHS, **options))), wanted)
    assert threads() == 0


def test_all_ranks_together_see_what_one_reader_does(data: Dataset) -> None:
    options: dict[str, Any] = {"shuffle": True, "shuffle_rows": 20, "until_epoch": EPOCHS}
    whole = [batch for epoch in read(data.reader(7, **options)) for batch in epoch]
    shares = [read(data.reader(7, rank=rank, num_ranks=3, **options)) for rank in range(3)]
    for number, parts in enumerate(zip(*([b for e in share for b in e] for share in shares), strict=True)):
        assert torch.equal(torch.cat([part.dense for part in parts]), whole[number].dense)


def test_resume_at_every_position(data: Dataset) -> None:
    options: dict[str, Any] = {"shuffle": True, "shuffle_rows": 20, "until_epoch": 3}
    reader, states = data.reader(9, **options), []
    whole = []
    for _ in range(3):
        states.append(json.loads(json.dumps(reader.state())))
        for batch in reader:
            whole.append(batch)
            states.append(json.loads(json.dumps(reader.state())))
        states.pop()  # of the end of an epoch, which is the start of the next
    places = [(state["epoch"], state["batches"]) for state in states]
    assert places == [(epoch, number) for epoch in range(3) for number in range(12)]
    for position, state in enumerate(states):
        again = data.reader(9, **options)
        again.restore(state)
        rest = [batch for epoch in read(again, 3 - state["epoch"]) for batch in epoch]
        assert len(rest) == len(whole) - position
        assert all(same_bits(a, b) for a, b in zip(rest, whole[position:], strict=True))


def test_a_position_is_restored_between_epochs(data: Dataset) -> None:
    reader = data.reader(9, shuffle=True, until_epoch=9)
    with reader:
        state, first = reader.state(), list(reader)
        reader.restore(state)  # back, though rows of epoch 1 are there
        assert threads() == 0
        assert same([list(reader)], [first])
        reader.set_epoch(5)
        assert same([list(reader)], [list(data.reader(9, shuffle=True, epoch=5))])


@pytest.fixture
def decoded(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the groups that are read, in order."""
    found: list[Any] = []
    for name in ("decode", "view"):
        if name == "decode" and data.storage.mapped:
            continue  # it calls the other
        plain = getattr(data.storage, name)
        monkeypatch.setattr(data.storage, name, lambda group, *rest, f=plain: (found.append(group), f(group, *rest))[1])
    return found


@pytest.mark.parametrize("until", [0, 1, 2, 3])
def test_nothing_is_read_that_is_not_wanted(data: Dataset, decoded: list[Any], until: int) -> None:
    reader = data.reader(9, shuffle=True, shuffle_rows=20, until_epoch=until)
    for _ in range(max(until, 1)):
        list(reader)
    assert len(decoded) == max(until, 1) * len(data.groups)
    assert threads() == 0  # nobody had to close it


def test_the_next_epoch_is_begun_before_it_is_asked_for(data: Dataset, decoded: list[Any]) -> None:
    reader = data.reader(9, shuffle=True, until_epoch=2)
    list(reader)
    reader._ahead._tasks[0].result()
    assert len(decoded) > len(data.groups)
    reader.close()
    assert threads() == 0


@pytest.mark.parametrize("closed", [False, True])
def test_leaving_an_epoch_in_its_middle_or_between_two_loses_nothing(data: Dataset, closed: bool) -> None:
    options: dict[str, Any] = {"shuffle": True, "shuffle_rows": 20}
    wanted = [list(data.reader(9, epoch=epoch, **options)) for epoch in range(2)]
    reader, found = data.reader(9, until_epoch=2, **options), []
    for wait in (3, 99, 1, 99):
        for number, batch in enumerate(reader, start=1):
            found.append(batch)
            if number == wait:
                break
        if (reader.epoch, reader.position) == (1, 0) and closed:
            assert threads() > 0
            reader.close()  # what is read ahead is thrown away
        assert threads() == 0 or (reader.epoch, reader.position) == (1, 0)
    assert same([found], [[batch for epoch in wanted for batch in epoch]])
    assert threads() == 0


def test_an_iterator_that_is_dropped_before_it_begins_leaves_what_was_read(data: Dataset) -> None:
    reader = data.reader(9, shuffle=True, until_epoch=3)
    list(reader)
    iter(reader)
    begun = reader._ahead
    assert begun is not None
    assert same([list(reader)], [list(data.reader(9, shuffle=True, epoch=1))])
    reader.close()
    assert threads() == 0


def test_an_error_comes_at_its_batch_and_not_before(
    data: Dataset, way: Callable[[Reader], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = way(data.reader(9, shuffle=True, shuffle_rows=20, until_epoch=3))
    plan = [group for window in _plan(reader, 1).windows for group in window.groups]
    lost, calls = plan[3], []

    def refuse(group: Any, *rest: Any, f: Callable[..., Any]) -> Any:
        calls.append(group)
        if group == lost and calls.count(group) == 2:  # in epoch 1
            raise DataError("lost")
        return f(group, *rest)

    name = "view" if data.storage.mapped else "decode"
    plain = getattr(data.storage, name)
    monkeypatch.setattr(data.storage, name, lambda group, *rest: refuse(group, *rest, f=plain))
    first = list(reader)
    assert len(first) == 12
    good = 0
    batches = iter(reader)
    for _ in range(21 // 9):  # without a row of the second window, which begins at row 21
        next(batches)
        good += 1
    with pytest.raises(DataError, match="lost"):
        next(batches)
    assert (reader.epoch, reader.position) == (1, good)
    assert threads() == 0
    rest = list(reader)  # the file is back
    wanted = list(data.reader(9, shuffle=True, shuffle_rows=20, epoch=1))
    assert same([rest], [wanted[good:]])
    reader.close()


def _plan(reader: Reader, epoch: int) -> Any:
    from viviane.data.plan import EpochPlan

    return EpochPlan(reader.dataset.groups, reader.shuffle_rows, reader.seed, epoch)


def test_no_more_windows_are_in_memory_than_within_an_epoch(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_RUN_ROWS", 1)
    live: weakref.WeakSet[RowBuffer] = weakref.WeakSet()

    class Counted(RowBuffer):
        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest)
            live.add(self)

    monkeypatch.setattr(prefetch, "RowBuffer", Counted)

    def peak(epochs: int, until: int) -> int:
        most, reader = 0, data.reader(7, shuffle=True, shuffle_rows=14, num_threads=1, until_epoch=until)
        with reader:
            for _ in range(epochs):
                for _ in reader:
                    while not reader.ready:
                        pass
                    most = max(most, len(live))
        return most

    # One more where an epoch ends with a short window: rows that are read ahead are as many as ever.
    assert 2 <= peak(3, 3) <= peak(1, 0) + 1
    assert not live


def test_a_forgotten_reader_lets_its_threads_end(data: Dataset) -> None:
    reader: Reader | None = data.reader(9, shuffle=True, until_epoch=2)
    list(reader)
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("viviane-reader")]
    assert waiting
    del reader
    for thread in waiting:
        thread.join(10)
    assert threads() == 0


def test_negatives_are_those_of_their_epoch(tmp_path: Path) -> None:
    schema = SCHEMA.from_dict(
        {"labels": [{"name": "y"}], "categorical": [{"name": "user", "num_ids": 9}, {"name": "item", "num_ids": 50}]}
    )
    rows = {"y": [1] * 60, "user": [3 + i % 6 for i in range(60)], "item": [3 + i % 40 for i in range(60)]}
    data = write_dataset(tmp_path / "s", schema, [rows], rows_per_group=10)
    drawn = NegativeDataset(data, Negatives(item="item", user="user", num=3))
    wanted = [list(drawn.reader(8, shuffle=True, epoch=epoch)) for epoch in range(3)]
    assert same(read(drawn.reader(8, shuffle=True, until_epoch=3), 3), wanted)


def epochs_of(reader: Reader) -> Iterator[Batch]:
    while True:
        yield from reader


def test_endless_reading_ends_with_its_generator(data: Dataset) -> None:
    reader = data.reader(9, shuffle=True, until_epoch=1 << 60)
    batches = epochs_of(reader)
    for _ in range(40):
        next(batches)
    assert (reader.epoch, reader.position) == (3, 4)
    batches.close()
    gc.collect()
    assert threads() == 0
