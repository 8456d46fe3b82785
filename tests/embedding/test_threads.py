"""Several threads at one table: its memory stays whole, no gradient is lost, and one thread trains a dynamic table."""

import copy
import pickle
import threading

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, Adam
from viviane.core.errors import ConfigError
from viviane.embedding import (
    DynamicTable,
    DynamicTableConfig,
    EmbeddingBag,
    EmbeddingCollection,
    FeatureConfig,
    TableConfig,
)


def run(count, work):
    """Run `work(number)` on threads that begin together; return what was raised."""
    start, raised = threading.Barrier(count), []

    def one(number):
        start.wait()
        try:
            work(number)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def dynamic(**options):
    return DynamicTable(DynamicTableConfig(name="user", dim=4, initial_capacity=4, **options), SGD())


@pytest.mark.parametrize("options", [{}, {"max_capacity": 64, "when_full": "evict", "eviction": "lfu"}])
def test_threads_that_train_one_dynamic_table_are_told_or_wait(options):
    table, done, refusals = dynamic(**options), [], set()

    def train(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(200):
            try:
                out = table(torch.randint(1000, (64 if not options else 16,), generator=generator))
                out.sum().backward()
                table.step(0.1)
                done.append(number)
            except ConfigError as error:
                refusals.add(error.what)

    assert run(4, train) == []
    assert table.num_steps == len(done) > 0
    assert all(one.startswith("another thread is training this table") for one in refusals)
    table.release()
    keys = table.export().keys
    assert len(keys) == len(set(keys.tolist())) == len(table)
    assert table.find(keys)[1].all()


def test_reading_beside_training_gives_rows_of_the_table():
    table, stop = dynamic(init={"type": "constant", "value": 2.0}), threading.Event()

    def work(number):
        if number == 0:
            for first in range(0, 20_000, 100):
                table(torch.arange(first, first + 100)).sum().backward()
                table.step(0.0)
            stop.set()
        while not stop.is_set():
            found, there = table.find(torch.randint(40_000, (100,)))
            assert bool((found[there] == 2.0).all())
            assert bool((found[~there] == 0.0).all())

    assert run(3, work) == []
    assert len(table) == 20_000


def test_one_thread_trains_until_its_step():
    table = dynamic()
    out = table(torch.tensor([1, 2]))

    def other(_):
        table.find(torch.tensor([1]))  # reading is for all
        for call in (
            lambda: table(torch.tensor([3])),
            lambda: table.step(0.1),
            table.release,
            lambda: table.rows(torch.tensor([1])),
        ):
            with pytest.raises(ConfigError, match="another thread is training this table"):
                call()

    assert run(1, other) == []
    out.sum().backward()
    table.step(0.1)
    assert run(1, lambda _: table(torch.tensor([3]))) == []
    table.release()  # that thread has ended
    assert len(table) == 3


def test_no_gradient_of_a_thread_is_lost_or_counted_twice():
    emb = EmbeddingCollection(
        [TableConfig(name="x", num_rows=50, dim=8, init="zero")], [FeatureConfig(name="f", table="x")], SGD()
    )

    def train(number):
        for _ in range(200):
            emb({"f": Bag.from_lists([[number, 7], [number]])}).flat.sum().backward()
            emb.step(1.0)

    assert run(4, train) == []
    emb.step(1.0)
    rows = emb.export_table("x").weight[:, 0]
    assert rows[:4].tolist() == [-400.0] * 4
    assert rows[7].item() == -800.0


def test_threads_that_train_one_embedding_bag():
    bag = EmbeddingBag(1000, 16, mode="sum", optimizer=Adam())

    def train(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(100):
            bag(torch.randint(1000, (64, 5), generator=generator)).sum().backward()
            bag.step(0.01)

    assert run(4, train) == []
    assert torch.isfinite(bag.weight).all()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_locks_of_their_own(again):
    table = dynamic()
    table(torch.tensor([1]))
    other = EmbeddingBag(9, 2)
    for one in (other, EmbeddingBag(3, 1).collection):
        assert again(one).step(0.1) is None
