"""The start and end of a stream: offsets, times, or the beginning and end of the log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from viviane.core.errors import ConfigError
from viviane.data.streaming.topic import EndOfLog, Message, Topic

Bound = str | int | datetime | Mapping[int, int]
Position = tuple[int, int]
"""Offset of the next message, and the number of its rows already yielded."""


class StreamBounds:
    """The start and end of each partition of a topic.

    Args:
        path: path of the topic, for errors.
        start: "beginning", "end", offsets by partition, or a time.
        end: None (endless), "now", offsets by partition, or a time.

    Raises:
        ConfigError: a bound is none of these.
    """

    def __init__(self, path: str, start: Bound, end: Bound | None) -> None:
        self.path = path
        self.start, self.end = _bound(start, "start", ("beginning", "end")), _bound(end, "end", ("now",))

    def first_positions(self, topic: Topic) -> dict[int, Position]:
        """Return the start position of a new run in each partition."""
        start = self.start
        if isinstance(start, Mapping):
            unknown = sorted(set(start) - set(topic.partitions))
            if unknown:
                raise ConfigError("the topic has no such partition", where=self.path, value=unknown)
            return {one: (start[one] if one in start else topic.bounds(one)[0], 0) for one in topic.partitions}
        if isinstance(start, int):
            found = topic.offsets_at(start, topic.partitions)
            offsets = {one: topic.bounds(one)[1] if at is None else at for one, at in found.items()}
            return {one: (at, 0) for one, at in offsets.items()}
        return {one: (topic.bounds(one)[start == "end"], 0) for one in topic.partitions}

    def unfinished(self, topic: Topic, offsets: Mapping[int, int]) -> set[int]:
        """Return the partitions that have messages before the end, or may receive some."""
        end = self.end
        if not isinstance(end, Mapping):
            return set(offsets)
        return {one for one, offset in offsets.items() if offset < end.get(one, 0)}

    def is_end(self, found: Message | EndOfLog) -> bool:
        """Return whether a message or end of log is beyond the end."""
        end = self.end
        if end is None:
            return False
        if isinstance(end, Mapping):
            return found.offset >= end.get(found.partition, 0)
        if isinstance(found, EndOfLog):
            return end == "now" or self.is_over
        return isinstance(end, int) and found.time_ms >= end

    @property
    def is_bounded(self) -> bool:
        """Whether the stream ends at given offsets or at a time that has passed."""
        return self.end == "now" or isinstance(self.end, Mapping) or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the time that ends the stream has passed."""
        return isinstance(self.end, int) and time.time() * 1000 >= self.end


def _bound(value: Bound | None, name: str, words: Sequence[str]) -> str | int | dict[int, int] | None:
    """Return a word, milliseconds since 1970, or offsets by partition."""
    if value is None or (isinstance(value, str) and value in words):
        return value
    if isinstance(value, Mapping):
        offsets = {int(partition): int(offset) for partition, offset in value.items()}
        if any(number < 0 for pair in offsets.items() for number in pair):
            raise ConfigError(f"the stream's {name} has a negative offset", value=str(offsets))
        return offsets
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(moment, datetime):
            raise TypeError(f"{type(value).__name__}")
    except (ValueError, TypeError):
        raise ConfigError(
            f"the stream's {name} is not a valid bound", value=str(value),
            allowed=", ".join((*words, "offsets by partition", "a time such as 2026-01-31T12:00:00+00:00")),
        ) from None  # fmt: skip
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
