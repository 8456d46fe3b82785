"""From the reader to the device: position, errors and bits are those of the batches that were handed out."""

import threading

import pytest
import torch
from click_model import SCHEMA, columns

from viviane.batch import Batch
from viviane.core.errors import VivianeError
from viviane.data import Dataset, write_dataset
from viviane.data.buffers import Piece
from viviane.training.feed import DeviceFeed

CPU = torch.device("cpu")


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
    assert not [one for one in threading.enumerate() if one.name.startswith("viviane-reader")]


def piece_of(batch: Batch) -> Batch:
    """Return the batch with its tensors in one piece of memory, as a reader with pin_memory makes them."""
    tensors = batch.tensors()
    piece = Piece([(tuple(one.shape), one.dtype) for one in tensors])
    moved = {id(one): piece.new(tuple(one.shape), one.dtype)[0].copy_(one) for one in tensors}
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
    from viviane.batch import _piece

    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    near, far = memory[:256], memory[1 << 15 : (1 << 15) + 256]
    assert _piece([near, far]) is None
    assert _piece([near, memory[256:300]]).numel() == 300
    assert _piece([near, memory[300:400]]) is None  # not at a multiple of 256


def test_ready_says_whether_a_batch_can_be_had_without_waiting(train: Dataset) -> None:
    reader = train.reader(64, shuffle=True)
    assert not reader.ready
    batches = iter(reader)
    next(batches)
    while not reader.ready:  # the threads come to it
        pass
    assert len(list(batches)) == 9
    assert not reader.ready
