"""The messages of several partitions in an order that depends on their offsets alone, whenever they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from viviane.data.streaming.topic import Message, Topic


class Merge:
    """Holds messages back until those that stand before them are there.

    The next message is that with the smallest distance from its partition's base, of equal ones that of the smaller
    partition. It is known as soon as each partition has a message or has ended. A partition that is far ahead is
    not fetched from until the others have caught up.

    Args:
        topic: of the partitions.
        partitions: that have messages, or may get some.
        bases: offset from which each is counted; unchanged when reading continues from later offsets.
        most: messages to hold of a partition, and to give at a time.
    """

    def __init__(self, topic: Topic, partitions: Iterable[int], bases: Mapping[int, int], most: int) -> None:
        self._topic, self._bases, self._most = topic, bases, most
        self._waiting: dict[int, deque[Message]] = {one: deque() for one in partitions}
        self._fetching = set(self._waiting)
        self._heads: list[tuple[int, int]] = []  # distance and partition of each one's next message
        self._paused: set[int] = set()

    @property
    def open(self) -> set[int]:
        """The partitions with messages that were not given yet, or may come."""
        return self._fetching | {one for one, messages in self._waiting.items() if messages}

    @property
    def is_ready(self) -> bool:
        """Whether the next message is known."""
        return bool(self._heads) and all(self._waiting[one] for one in self._fetching)

    def is_fetched(self, partition: int) -> bool:
        """Whether a partition has ended, though messages of it may wait."""
        return partition not in self._fetching

    def end(self, partition: int) -> None:
        """Expect no more messages of a partition."""
        self._fetching.discard(partition)

    def add(self, messages: Iterable[Message]) -> list[Message]:
        """Take messages in, each partition's in order, and return those whose turn it is."""
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
