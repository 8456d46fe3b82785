"""The messages of several partitions in an order that depends only on their offsets, not on their arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from viviane.data.streaming.topic import Message, Topic


class Merge:
    """Buffers messages until all preceding ones have arrived.

    The next message is that with the smallest distance from its partition's base; on ties, that of the smaller
    partition. It is known as soon as each partition has a message or has ended. A partition that is far in advance is
    not fetched until the others have caught up.

    Args:
        topic: the topic.
        partitions: partitions that have messages, or may receive some.
        bases: base offset of each partition; unchanged when reading continues from later offsets.
        most: maximum number of messages to buffer per partition, and to return per call.
    """

    def __init__(self, topic: Topic, partitions: Iterable[int], bases: Mapping[int, int], most: int) -> None:
        self._topic, self._bases, self._most = topic, bases, most
        self._waiting: dict[int, deque[Message]] = {one: deque() for one in partitions}
        self._fetching = set(self._waiting)
        self._heads: list[tuple[int, int]] = []  # distance and partition of the next message of each
        self._paused: set[int] = set()

    @property
    def open(self) -> set[int]:
        """The partitions that have, or may receive, messages that were not returned yet."""
        return self._fetching | {one for one, messages in self._waiting.items() if messages}

    @property
    def is_ready(self) -> bool:
        """Whether the next message is known."""
        return bool(self._heads) and all(self._waiting[one] for one in self._fetching)

    def is_fetched(self, partition: int) -> bool:
        """Whether a partition has ended; some of its messages may still be buffered."""
        return partition not in self._fetching

    def end(self, partition: int) -> None:
        """Expect no more messages of a partition."""
        self._fetching.discard(partition)

    def add(self, messages: Iterable[Message]) -> list[Message]:
        """Add messages, ordered within each partition, and return those that are next."""
        for one in messages:
            waiting = self._waiting[one.partition]
            if not waiting:
                self._heads.append(self._key(one))
            waiting.append(one)
            if len(waiting) >= self._most and one.partition not in self._paused:
                self._paused.add(one.partition)
                self._topic.stop(one.partition)
        heapify(self._heads)
        given: list[Message] = []
        while len(given) < self._most and self.is_ready:
            partition = heappop(self._heads)[1]
            waiting = self._waiting[partition]
            given.append(waiting.popleft())
            if waiting:
                heappush(self._heads, self._key(waiting[0]))
        for partition in [one for one in self._paused if len(self._waiting[one]) < self._most]:
            self._paused.discard(partition)
            if partition in self._fetching:
                self._topic.resume(partition)
        return given

    def _key(self, message: Message) -> tuple[int, int]:
        return message.offset - self._bases.get(message.partition, 0), message.partition
