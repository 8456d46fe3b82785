"""Batches that are copied ahead on a GPU: the same bits as without, also when copies are slow, and the same errors."""

import itertools

import pytest
import torch
from click_model import LONG, SCHEMA, columns, make_trainer
from test_gpu import host_tensors, same

from viviane.core.errors import ConfigError, VivianeError
from viviane.data import Dataset, device_shuffle, prefetch, write_dataset
from viviane.data.buffers import Buffers, PackedMemory
from viviane.schema import Schema
from viviane.training import feed as feeds
from viviane.training.feed import DeviceFeed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("feed") / "rows"
    return write_dataset(folder, SCHEMA, [columns(20_000, 5)], rows_per_group=1024, format="viviane")


def without_bags(folder, **options) -> Dataset:
    content = {name: values for name, values in columns(20_000, 5).items() if name != "seen"}
    schema = SCHEMA.to_dict()
    schema["categorical"] = [one for one in schema["categorical"] if one["name"] != "seen"]
    return write_dataset(folder, Schema.from_dict(schema), [content], rows_per_group=1024, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Dataset:
    """Rows without bags, whose batches are copied together, and which can be put in order on the GPU."""
    return without_bags(tmp_path_factory.mktemp("feed") / "plain", format="viviane")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Dataset:
    """Rows with two ids in each bag, and weights."""
    content = columns(20_000, 5)
    content["seen"] = [[i % 7, i % 11] for i in range(20_000)]
    schema = SCHEMA.to_dict()
    for one in schema["categorical"]:
        if one["name"] == "seen":
            one["hotness"] = 2
    folder = tmp_path_factory.mktemp("feed") / "pairs"
    return write_dataset(folder, Schema.from_dict(schema), [content], rows_per_group=1024, format="viviane")


def equal(there, here) -> bool:
    return all(torch.equal(one.cpu(), other) for one, other in zip(there.tensors(), here.tensors(), strict=True))


@pytest.mark.parametrize("until_epoch", [0, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_three_epochs_have_the_bits_of_the_reader(rows, shuffle, until_epoch):
    options = {"shuffle": shuffle, "seed": 4, "shuffle_rows": 3000}
    feed, reader = DeviceFeed.open(rows, 768, GPU, **options), rows.reader(768, **options)
    feed.read_on(until_epoch)
    for epoch in range(3):
        count = 0
        for there, here in zip(feed, reader, strict=True):
            assert there.device == GPU
            assert equal(there, here)
            assert feed.state() == reader.state()
            count += 1
        assert count == len(feed) == 27  # the last batch has 32 rows
        assert feed.epoch == epoch + 1
        assert feed.state() == reader.state()


@pytest.mark.parametrize("kind", ["plain", "pairs"])
@pytest.mark.parametrize("until_epoch", [0, 3])
@pytest.mark.parametrize("size", [768, 750])  # of 750 rows batches cannot be cut
def test_rows_put_in_order_on_the_gpu_are_those_of_the_reader(request, kind, size, until_epoch):
    data = request.getfixturevalue(kind)
    options = {"shuffle": True, "seed": 4, "shuffle_rows": 3000}
    there = DeviceFeed.open(data, size, GPU, shuffle_on="device", **options)
    here = DeviceFeed.open(data, size, GPU, shuffle_on="host", **options)
    reader = data.reader(size, **options)
    for feed in (there, here):
        feed.read_on(until_epoch)
    for _ in range(3):
        for one, other, wanted in zip(there, here, reader, strict=True):
            assert equal(one, wanted)
            assert equal(other, wanted)
            assert there.state() == here.state() == reader.state()
            assert one.origin == other.origin == wanted.origin


def test_rows_go_to_the_gpu_in_the_order_of_the_files(plain, monkeypatch):
    monkeypatch.setattr(device_shuffle, "_LEAST_ROWS", 1 << 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        batches = list(DeviceFeed.open(plain, 64, GPU, shuffle=True))
        torch.cuda.synchronize()
    copies = [one for one in profiler.events() if "HtoD" in one.name]
    assert len(batches) == 313
    # One window: its rows, its order, and what says where its matrices stand; 3 more if a part of it was early.
    assert 2 <= len(copies) <= 6
    assert sum("take_rows" in one.name for one in profiler.events()) <= 10


def test_what_cannot_be_put_in_order_on_the_gpu_is_refused_or_goes_by_the_host(rows, plain, monkeypatch):
    with pytest.raises(ConfigError, match=r"bags of column 'seen' have no fixed hotness"):
        DeviceFeed.open(rows, 768, GPU, shuffle=True, shuffle_on="device")
    with pytest.raises(ConfigError, match="the reader does not shuffle"):
        DeviceFeed.open(plain, 768, GPU, shuffle_on="device")
    monkeypatch.setattr(device_shuffle, "_SHARE_OF_MEMORY", 1 << 40)
    with pytest.raises(ConfigError, match="take 1 MiB of the GPU, and 0 are allowed"):
        DeviceFeed.open(plain, 768, GPU, shuffle=True, shuffle_on="device")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        list(DeviceFeed.open(plain, 768, GPU, shuffle=True))
        torch.cuda.synchronize()
    assert not any("take_rows" in one.name for one in profiler.events())


def slowed(feed: DeviceFeed, cycles: int) -> None:
    """Let each copy begin late, so that the memory it reads would be written to before, if that were allowed."""
    start = feed._copies.start

    def late(cut, place):
        with torch.cuda.stream(feed._copies.stream):
            torch.cuda._sleep(cycles)
        return start(cut, place)

    feed._copies.start = late


@pytest.mark.parametrize("early", [False, True])
def test_memory_is_not_used_again_before_a_slow_copy_is_done(rows, monkeypatch, early):
    monkeypatch.setattr(prefetch, "_RUN_ROWS", 1)  # a batch a task: few are made ahead, so memory has to come back
    if early:  # the control: memory that is given out in turn, whatever still reads it
        ring = itertools.cycle([torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(8)])

        def in_turn(self, forms):
            piece = PackedMemory([], pin_memory=True)
            piece._bytes = next(ring)
            piece._array = piece._bytes.numpy()
            return piece

        monkeypatch.setattr(Buffers, "for_batch", in_turn)
    feed = DeviceFeed.open(rows, 768, GPU, shuffle=True, seed=1, num_threads=1)
    slowed(feed, 20_000_000)  # about 10 ms, where a batch is made in less than 1
    there = list(feed)
    torch.cuda.synchronize()
    monkeypatch.undo()
    right = [equal(one, other) for one, other in zip(there, rows.reader(768, shuffle=True, seed=1), strict=True)]
    assert all(right) == (not early)


@pytest.mark.parametrize("where", ["host", "device"])
def test_batches_that_are_copied_together_are_right_though_copies_are_slow(plain, monkeypatch, where):
    monkeypatch.setattr(prefetch, "_RUN_ROWS_FOR_GPU", 4 * 768)
    monkeypatch.setattr(device_shuffle, "_RUN_ROWS", 4 * 768)
    monkeypatch.setattr(device_shuffle, "_LEAST_ROWS", 1)
    options = {"shuffle": True, "seed": 1, "shuffle_rows": 3000}
    feed, reader = DeviceFeed.open(plain, 768, GPU, shuffle_on=where, **options), plain.reader(768, **options)
    slowed(feed, 5_000_000)
    there = list(feed)
    torch.cuda.synchronize()
    assert all(equal(one, other) for one, other in zip(there, reader, strict=True))


def test_device_memory_is_not_used_again_before_a_slow_step_is_done(rows):
    sums = []
    for batch in DeviceFeed.open(rows, 768, GPU, shuffle=True, seed=1):
        torch.cuda._sleep(10_000_000)  # the step is late, and the batch is forgotten long before it
        sums.append(batch.dense.double().sum() + batch.bags["seen"].values.sum())
        del batch
    wanted = [b.dense.double().sum() + b.bags["seen"].values.sum() for b in rows.reader(768, shuffle=True, seed=1)]
    # Sums of at most 2,304 float32 numbers in float64; only their order differs.
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(wanted), rtol=1e-12, atol=1e-9)


def test_a_batch_is_moved_in_one_copy(rows):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        batches = list(DeviceFeed.open(rows, 4096, GPU))
        torch.cuda.synchronize()
    copies = [one for one in profiler.events() if "HtoD" in one.name]
    assert len(batches) == 5
    assert len(copies) == 5
    assert all("Pinned" in one.name for one in copies)


def test_batches_of_a_run_are_moved_in_one_copy(plain, monkeypatch):
    monkeypatch.setattr(prefetch, "_RUN_ROWS_FOR_GPU", 4 * 768)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        batches = list(DeviceFeed.open(plain, 768, GPU))
        torch.cuda.synchronize()
    copies = [one for one in profiler.events() if "HtoD" in one.name]
    assert len(batches) == 27
    assert len(copies) == 8  # 1, 2 and 6 times 4 batches


@pytest.mark.parametrize("where", ["host", "device"])
def test_device_memory_of_a_run_is_not_used_again_before_a_slow_step_is_done(plain, where):
    sums = []
    for batch in DeviceFeed.open(plain, 768, GPU, shuffle=True, seed=1, shuffle_on=where):
        torch.cuda._sleep(10_000_000)
        sums.append(batch.dense.double().sum() + batch.one_hot.sum())
        del batch
    wanted = [b.dense.double().sum() + b.one_hot.sum() for b in plain.reader(768, shuffle=True, seed=1)]
    # Sums of at most 2,304 float32 numbers in float64; only their order differs.
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(wanted), rtol=1e-12, atol=1e-9)


def test_training_has_the_same_bits_as_with_batches_moved_one_by_one(train, valid):
    settings = LONG.model_copy(update={"device": "cuda"})
    first, second = make_trainer(settings), make_trainer(settings)
    first.fit(train, valid)
    with second.switches():
        second.module.train()
        reader = train.reader(settings.batch_size, shuffle=settings.shuffle, seed=settings.seed)
        for _ in range(settings.epochs):
            for batch in reader:
                second.train_step(batch.to(GPU))
    assert same(host_tensors(first), host_tensors(second))


@pytest.mark.parametrize("shuffle_rows", [None, 100])
def test_an_error_comes_in_place_of_its_batch(tmp_path, shuffle_rows):
    data = without_bags(tmp_path / "bad")
    options = {} if shuffle_rows is None else {"shuffle": True, "shuffle_rows": shuffle_rows}
    content = bytearray(data.files[0].read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = b"\0" * 400
    data.files[0].write_bytes(content)
    with pytest.raises(VivianeError) as wanted:
        list(data.reader(100, **options))
    feed, count = DeviceFeed.open(data, 100, GPU, **options), 0
    batches = iter(feed)
    found: Exception | None = None
    while found is None:
        try:
            count += len(next(batches)) // 100
        except VivianeError as error:
            found = error
    assert str(found) == str(wanted.value)
    assert feed.state()["batches"] == count


@pytest.mark.parametrize("shuffle", [False, True])
def test_leaving_in_the_middle_loses_no_batch(plain, shuffle):
    options = {"shuffle": shuffle, "shuffle_rows": 3000}
    feed, reader = DeviceFeed.open(plain, 768, GPU, **options), list(plain.reader(768, **options))
    for i in range(12):
        assert equal(next(iter(feed)), reader[i])


def test_the_host_is_held_back_when_too_many_steps_are_queued(rows):
    feed = DeviceFeed.open(rows, 64, GPU)
    torch.cuda.reset_peak_memory_stats()
    before, most = torch.cuda.memory_stats()["active_bytes.all.current"], 0
    for batch in feed:
        torch.cuda._sleep(1_000_000)
        del batch
        most = max(most, len(feed._copies.queued))
    assert most <= feeds._MOST_QUEUED // 2  # events: one for every other step
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    assert peak - before < 24 * 64 * 200  # three times what 16 batches take; all of them would take 1.2 MB
