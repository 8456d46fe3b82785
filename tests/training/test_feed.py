"""From the reader to the device: position, errors and bits are those of the batches that were handed out."""

import gc
import threading
import time

import pytest
import torch
from click_model import SCHEMA, columns, make_trainer

from viviane.batch import Batch
from viviane.config import Solver
from viviane.core.errors import ConfigError, VivianeError
from viviane.data import Dataset, prefetch, write_dataset
from viviane.data.buffers import Buffers, PackedMemory
from viviane.data.device_shuffle import ShuffledRun
from viviane.data.run import PendingBatch, Run
from viviane.schema import Schema
from viviane.training import feed as feeds
from viviane.training.feed import DeviceFeed, _Copies, _Waiting

CPU = torch.device("cpu")
BATCHES = 10  # of 64 rows


def reader_threads() -> int:
    return sum(one.name.startswith("viviane-reader") for one in threading.enumerate())


def test_on_a_cpu_batches_are_those_of_the_reader(train: Dataset) -> None:
    feed = DeviceFeed.open(train, 64, CPU, shuffle=True, seed=3)
    ours = [batch.one_hot for _ in range(2) for batch in feed]
    reader = train.reader(64, shuffle=True, seed=3)
    theirs = [batch.one_hot for _ in range(2) for batch in reader]
    assert len(ours) == len(theirs) == 2 * len(feed) == 20
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_state_is_that_of_the_batches_that_were_handed_out(train: Dataset) -> None:
    options = {"shuffle": True, "seed": 3}
    feed, reader = DeviceFeed.open(train, 64, CPU, **options), train.reader(64, **options)
    for one, other in zip(feed, reader, strict=True):
        assert torch.equal(one.labels, other.labels)
        assert feed.state() == reader.state()
    assert feed.state() == reader.state()
    assert feed.epoch == 1


@pytest.mark.parametrize("until_epoch", [0, 2, 5])
def test_epochs_that_are_read_on_have_the_same_batches_and_states(train: Dataset, until_epoch: int) -> None:
    options = {"shuffle": True, "seed": 3}
    feed, reader = DeviceFeed.open(train, 64, CPU, **options), train.reader(64, **options)
    feed.read_on(until_epoch)
    with feed:
        for epoch in range(3):
            assert (feed.epoch, reader_threads() > 0) == (epoch, 0 < epoch < until_epoch)
            for one, other in zip(feed, reader, strict=True):
                assert torch.equal(one.one_hot, other.one_hot)
                assert feed.state() == reader.state()
    assert reader_threads() == 0


class NoCopies:
    """Hands batches on as they are, as the copies to a GPU do later."""

    def start(self, pending: PendingBatch, place: tuple[int, int]) -> _Waiting:
        run, number, origin = pending
        return _Waiting(run.batch(number, origin), place)

    def finish(self, waiting: _Waiting) -> None:
        pass


@pytest.mark.parametrize("leave", [3, 8, 9, 10, 13])
def test_leaving_loses_nothing_whatever_was_taken_ahead(train: Dataset, leave: int) -> None:
    options = {"shuffle": True, "seed": 3}
    feed, reader = DeviceFeed.open(train, 64, CPU, until_epoch=3, **options), train.reader(64, **options)
    feed._copies = NoCopies()
    wanted = [(batch, reader.state()) for _ in range(3) for batch in reader]
    count = 0

    def take(most: int) -> None:
        nonlocal count
        for batch in feed:
            assert torch.equal(batch.one_hot, wanted[count][0].one_hot)
            assert feed.state() == wanted[count][1]
            count += 1
            time.sleep(0.002)  # the reader gets ahead, over the end of the epoch
            if count == most:
                return

    with feed:
        while count < leave:
            take(leave)
        while count < len(wanted):
            take(len(wanted) + 1)
    assert reader_threads() == 0


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"epochs": 3}, 3),
        ({"epochs": 9, "max_steps": 2 * BATCHES}, 2),
        ({"epochs": 9, "max_steps": 2 * BATCHES + 1}, 3),
        ({"epochs": 1, "max_steps": 2 * BATCHES + 1}, 1),
    ],
)
def test_fit_reads_the_epochs_that_it_trains_on(train, monkeypatch, settings, epochs) -> None:
    decoded = []
    decode = train.storage.decode
    monkeypatch.setattr(train.storage, "decode", lambda group, *rest: (decoded.append(group), decode(group, *rest))[1])
    trainer = make_trainer(Solver(batch_size=64, device="cpu", **settings))
    trainer.fit(train)
    assert trainer.step == min(settings["epochs"] * BATCHES, settings.get("max_steps", 1 << 30))
    assert len(decoded) == epochs * len(train.groups)
    assert reader_threads() == 0


def test_fit_goes_on_in_a_second_call_and_reads_nothing_twice(train, monkeypatch) -> None:
    decoded = []
    decode = train.storage.decode
    monkeypatch.setattr(train.storage, "decode", lambda group, *rest: (decoded.append(group), decode(group, *rest))[1])
    trainer = make_trainer(Solver(batch_size=64, device="cpu", epochs=2))
    for count in (1, 2):
        trainer.fit(train)
        assert (trainer.epoch, len(decoded)) == (2 * count, 2 * count * len(train.groups))


def test_a_saved_position_continues_with_the_next_batch(train: Dataset) -> None:
    feed = DeviceFeed.open(train, 64, CPU, shuffle=True, seed=3)
    batches = iter(feed)
    next(batches)
    state, rest = feed.state(), [batch.one_hot for batch in batches]
    again = DeviceFeed.open(train, 64, CPU, shuffle=True, seed=3)
    again.restore(state)
    assert all(torch.equal(one, other.one_hot) for one, other in zip(rest, again, strict=True))


def test_an_error_comes_with_its_words_and_threads_end(train: Dataset, tmp_path) -> None:
    data = write_dataset(tmp_path / "bad", SCHEMA, [columns(200, 0)], rows_per_group=50)
    file = data.files[0]
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = b"\0" * 400
    file.write_bytes(content)
    feed = DeviceFeed.open(data, 50, CPU)
    with pytest.raises(VivianeError, match="part-00000"), feed:
        list(feed)
    assert reader_threads() == 0


def piece_of(batch: Batch) -> Batch:
    """Return the batch with its tensors in one piece of memory, as a reader with pin_memory makes them."""
    tensors = batch.tensors()
    piece = PackedMemory([(tuple(one.shape), one.dtype) for one in tensors])
    moved = {id(one): piece.new(tuple(one.shape), one.dtype)[0]().copy_(one) for one in tensors}
    return batch._map(lambda part: moved[id(part)]) if not batch.bags else _with_bags(batch, moved)


def _with_bags(batch: Batch, moved: dict[int, torch.Tensor]) -> Batch:
    from dataclasses import replace

    from viviane.batch import Bag

    bags = {name: Bag(moved[id(bag.values)], moved[id(bag.offsets)]) for name, bag in batch.bags.items()}
    return replace(
        batch, labels=moved[id(batch.labels)], dense=moved[id(batch.dense)], one_hot=moved[id(batch.one_hot)], bags=bags
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_one_copy_moves_a_batch_that_lies_in_one_piece(rows: int) -> None:
    there = torch.device("meta")  # a device of its own: shapes and sharing can be seen, without a GPU
    batch = Batch.from_columns(SCHEMA, columns(max(rows, 1), 0))
    if not rows:
        batch = batch._map(lambda part: part[:0] if isinstance(part, torch.Tensor) else type(part).from_lists([]))
    packed = piece_of(batch)
    moved = packed.to(there)
    storages = {one.untyped_storage()._cdata for one in moved.tensors() if one.numel()}
    assert len(storages) <= 1
    apart = batch.to(there)
    shapes = [[(one.shape, one.dtype, one.is_contiguous()) for one in b.tensors()] for b in (moved, apart)]
    assert shapes[0] == shapes[1]
    assert rows < 2 or len({one.untyped_storage()._cdata for one in apart.tensors()}) > 1


def test_memory_between_tensors_that_is_not_theirs_is_not_copied() -> None:
    from viviane.batch import _packed_bytes

    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    near, far = memory[:256], memory[1 << 15 : (1 << 15) + 256]
    assert _packed_bytes([near, far]) is None
    assert _packed_bytes([near, memory[256:300]]).numel() == 300
    assert _packed_bytes([near, memory[300:400]]) is None  # not at a multiple of 256


def test_ready_says_whether_a_batch_can_be_had_without_waiting(train: Dataset) -> None:
    reader = train.reader(64, shuffle=True)
    assert not reader.ready
    batches = iter(reader)
    next(batches)
    while not reader.ready:  # the threads come to it
        pass
    assert len(list(batches)) == 9
    assert not reader.ready


class FakeEvent:
    """Of a device whose steps end when somebody waits for them."""

    handed_out = ended = 0

    def record(self, stream: object) -> None:
        self.after = FakeEvent.handed_out

    def synchronize(self) -> None:
        FakeEvent.ended = max(FakeEvent.ended, self.after)


class HostCopies(_Copies):
    """Copies as to a GPU, to other memory of the host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.copied: list[int] = []

    def _copy(self, run: Run) -> tuple[Run, object]:
        if isinstance(run, ShuffledRun):
            there = run.to(CPU)
            run.copy_ahead()
            return there, FakeEvent()
        self.copied.append(run.whole.size)
        there = piece_of(run.whole) if run.whole.size else run.whole
        return Run(lambda: there, run._rows), FakeEvent()


@pytest.fixture
def as_for_a_gpu(monkeypatch, tmp_path):
    """Return a feed of 20 batches of 64 rows and one of 20, their labels numbers, with a GPU's ways, and its reader."""
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(feeds.torch.cuda, name, lambda *_: FakeEvent())
    monkeypatch.setattr(Batch, "wait", lambda self: None)
    monkeypatch.setattr(Buffers, "for_batch", lambda self, forms: PackedMemory(forms) if self.pin_memory else self)
    monkeypatch.setattr(prefetch, "_RUN_ROWS_FOR_GPU", 256)
    FakeEvent.handed_out = FakeEvent.ended = 0
    schema = Schema(dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 2000}])
    data = write_dataset(tmp_path / "rows", schema, [{"x": range(1300), "c": range(1300)}], rows_per_group=300)
    feed = DeviceFeed.open(data, 64, CPU, shuffle=True, seed=3)
    feed.reader._buffers.pin_memory = True
    feed._copies = HostCopies()
    return feed, data.reader(64, shuffle=True, seed=3)


def equal(one: Batch, other: Batch) -> bool:
    assert one.origin == other.origin
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def test_one_copy_moves_the_batches_of_a_run(as_for_a_gpu) -> None:
    feed, reader = as_for_a_gpu
    with feed:
        for _ in range(2):
            feed._copies.copied.clear()
            for one, other in zip(feed, reader, strict=True):
                assert equal(one, other)
                assert feed.state() == reader.state()
            assert feed._copies.copied == [64, 128, 256, 256, 256, 256, 84]
    assert not feed._copies._there


def test_batches_of_a_run_are_there_when_their_copy_is(as_for_a_gpu) -> None:
    feed, _ = as_for_a_gpu
    events = [batch.ready for batch in feed]
    assert None not in events
    assert [events.index(event) for event in events] == [0, 1, 1] + [i // 4 * 4 + 3 for i in range(18)]


@pytest.mark.parametrize("until_epoch", [0, 3])
def test_batches_whose_rows_are_put_in_order_there_are_the_same(as_for_a_gpu, until_epoch: int) -> None:
    feed, reader = as_for_a_gpu
    feed._shuffle_device = CPU
    feed.read_on(until_epoch)
    with feed:
        for _ in range(3):
            for one, other in zip(feed, reader, strict=True):
                assert equal(one, other)
                assert feed.state() == reader.state()
        assert not feed._copies.copied
    assert reader_threads() == 0


def test_where_rows_are_put_in_order_is_refused_by_its_reason(train: Dataset) -> None:
    with pytest.raises(ConfigError, match="shuffled on the device: the device is not a GPU"):
        DeviceFeed.open(train, 64, CPU, shuffle=True, shuffle_on="device")
    solver = Solver(batch_size=64, device="cpu", shuffle_on="device")
    with pytest.raises(ConfigError, match="the device is not a GPU"):
        make_trainer(solver).fit(train)
    for where in ("auto", "host"):
        assert DeviceFeed.open(train, 64, CPU, shuffle=True, shuffle_on=where)._shuffle_device is None


def test_threads_that_only_copy_are_fewer(monkeypatch) -> None:
    monkeypatch.setattr(feeds, "usable_cores", lambda: 32)
    assert (feeds.num_threads(), feeds.num_threads(only_copies=True)) == (8, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (feeds.num_threads(), feeds.num_threads(only_copies=True)) == (2, 2)


@pytest.mark.parametrize("shuffle_device", [None, CPU])
def test_leaving_in_the_middle_of_a_run_loses_no_batch_and_keeps_no_copy(as_for_a_gpu, shuffle_device) -> None:
    feed, reader = as_for_a_gpu
    feed._shuffle_device = shuffle_device
    wanted, found = list(reader), []
    while len(found) < len(wanted):
        for batch in feed:
            found.append(batch)
            if len(found) % 5 == 0:
                break
        feed.close()
        gc.collect()
        assert not feed._copies._there
    assert all(equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_no_more_steps_are_queued_than_is_said(as_for_a_gpu) -> None:
    feed, _ = as_for_a_gpu
    most = 0
    for _ in feed:
        FakeEvent.handed_out += 1
        most = max(most, FakeEvent.handed_out - FakeEvent.ended)
    assert most == feeds._MOST_QUEUED
