"""Deltas in the order of their numbers: each is applied once, and one that is missing is an error with its number.

`seq <= applied` is left out; `applied + 1` is applied; anything else is a gap, which the outbox may fill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any, Final, Literal, Protocol

import numpy as np

from viviane.core.errors import StoreError
from viviane.core.json_files import expected_form, json_object, parse_json
from viviane.core.logging import get_logger
from viviane.store.delta import Delta, DeltaKind, decode_delta
from viviane.store.row_layout import Found, Keys, Rows

Stream = tuple[str, int]
"""A table and a partition."""
Visible = Literal["row", "publication"]
Repair = Callable[[str, int, int, int], Iterable[bytes]]
"""Gives the deltas of a table and partition from one seq to another, both included."""
_MOST_TOLD: Final = 100
_log = get_logger("store")


class DeltaGapError(StoreError):
    """A delta is missing from its sequence; `table`, `partition` and `seq` say which."""

    def __init__(self, table: str, partition: int, seq: int, before: int, cause: str | None = None) -> None:
        super().__init__(
            "a delta is missing", where=f"table {table!r}, partition {partition}", value=f"seq {seq}",
            allowed=f"the one after {before} comes next" + (f"; {cause}" if cause else ""),
            fix="give the server the publisher's outbox, or load a newer snapshot",
        )  # fmt: skip
        self.table, self.partition, self.seq = table, partition, seq


@dataclass(frozen=True)
class Published:
    """Which deltas a snapshot contains.

    Args:
        publisher: whose deltas; 0: none.
        positions: by table and partition the seq of the last one.

    Example:
        >>> Published.from_json(Published(5, {("item", 0): 9}).to_json()).positions
        {('item', 0): 9}
    """

    publisher: int = 0
    positions: Mapping[Stream, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        positions = [[table, partition, seq] for (table, partition), seq in self.positions.items()]
        return {"version": 1, "publisher": self.publisher, "positions": positions}

    @classmethod
    def from_json(cls, value: Any, where: str = "published.json") -> Published:
        """Read what `to_json` wrote.

        Raises:
            StoreError: it is of another form.
        """
        content = json_object(value, where=where, error=StoreError)
        with expected_form(where, StoreError):
            positions = {(str(table), int(part)): int(seq) for table, part, seq in content["positions"]}
            return cls(int(content["publisher"]), positions)


@dataclass
class Changes:
    """Changes of one table, in order; the last one of a key counts."""

    parts: list[Delta] = field(default_factory=list)

    def merged(self, row_bytes: int) -> tuple[Keys, Rows, Keys]:
        """Return keys (n,), their last rows (n, row_bytes), and the keys whose last change removes them."""
        keys = np.concatenate([part.keys for part in self.parts])
        kept = _last_of_each(keys)
        lengths = [len(part.keys) for part in self.parts]
        removed = np.repeat([part.header.kind == DeltaKind.ERASED for part in self.parts], lengths)
        wanted = kept & ~removed
        rows = np.empty((np.count_nonzero(wanted), row_bytes), np.uint8)
        start = place = 0
        for part in self.parts:  # each row is copied once
            own = wanted[start : start + len(part.keys)]
            count = int(np.count_nonzero(own))
            if count:
                rows[place : place + count] = part.rows if count == len(own) else part.rows[own]
            start, place = start + len(own), place + count
        return keys[wanted], rows, keys[kept & removed]


def _last_of_each(keys: Keys) -> Found:
    """Return which keys do not come again."""
    order = np.argsort(keys, kind="stable")
    by_key = keys[order]
    kept = np.ones(len(keys), np.bool_)
    kept[order[:-1]] = by_key[1:] != by_key[:-1]
    return kept


class DeltaTarget(Protocol):
    """What deltas change."""

    model: str
    base: int
    """Digest of the weights that it began with; 0: unknown."""

    def row_bytes(self, table: str) -> int | None:
        """Return the bytes of a table's rows; None: it has no such table, and such deltas are left out."""

    def applied(self, stream: Stream) -> int:
        """Return the seq of the last delta that was applied; 0 before any."""

    def publisher(self) -> int:
        """Return whose deltas were applied; 0 before any."""

    def apply(
        self,
        changes: Mapping[str, Changes],
        last: Mapping[Stream, int],
        publisher: int,
        dense: bytes | None,
        publication: int,
    ) -> None:
        """Apply changes by table, and remember the last seq of each stream with them.

        Raises:
            StoreError: they cannot be written; they are offered again then.
        """


@dataclass
class ApplierStatus:
    """What an applier has done.

    Args:
        deltas, rows: applied; repeated: left out since they had been applied; repaired: taken from the outbox.
        refused: messages that are no deltas of this model, or damaged.
        publication: the last one that is complete.
        staleness_s: age of the newest delta when it was applied.
    """

    deltas: int = 0
    rows: int = 0
    repeated: int = 0
    repaired: int = 0
    refused: int = 0
    foreign: int = 0
    publication: int = 0
    staleness_s: float = 0.0
    last_error: str = ""


def _listed(end: Delta) -> tuple[dict[str, int], int]:
    """Return what the end of a publication lists: the last seq by table, and the number of dense parts before it.

    Raises:
        StoreError: it is of another form, or a number is out of range.
    """
    head = end.header
    data = parse_json(end.rows.tobytes(), where=head.where, error=StoreError)
    content = json_object(data, where=head.where, error=StoreError)
    with expected_form(head.where, StoreError):
        ends = {str(table): int(seq) for table, seq in content["last"].items()}
        num_parts = int(content.get("dense", 0))
    if wrong := [seq for seq in ends.values() if not 0 <= seq < 1 << 63]:
        raise StoreError("a seq at the end of a publication is out of range", where=head.where, value=wrong[0])
    if not 0 <= num_parts < head.seq:
        raise StoreError("the dense parts of a publication are not those before its end", where=head.where,
                         value=num_parts, allowed=f"0 to {head.seq - 1}")  # fmt: skip
    return ends, num_parts


class DeltaApplier:
    """Applies encoded deltas to a target.

    Args:
        target: what is changed.
        num_partitions: of the stream.
        visible: "row": changes as they come; "publication": all of a publication together, when it is complete.
        repair: where missing deltas may be had.
    """

    def __init__(
        self, target: DeltaTarget, num_partitions: int, *, visible: Visible = "row", repair: Repair | None = None
    ) -> None:
        self.target, self.num_partitions, self.visible, self._repair = target, num_partitions, visible, repair
        self.status = ApplierStatus()
        self.gaps: dict[Stream, DeltaGapError] = {}
        self._seen: dict[Stream, int] = {}
        self._publisher = target.publisher()
        self._staged: list[Delta] = []
        self._ended: dict[int, int] = {}
        self._dense: dict[int, dict[int, bytes]] = {}
        """By publication the parts of its dense weights; a later publication may arrive before an earlier one ends."""
        self._num_parts: dict[int, int] = {}
        self._told: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def offer(self, messages: Iterable[bytes]) -> None:
        """Take messages in and apply what is due.

        Raises:
            StoreError: the target cannot be written; offer the same messages again.
        """
        with self._lock:
            dense = {publication: dict(parts) for publication, parts in self._dense.items()}
            before = (dict(self._seen), list(self._staged), dict(self._ended), dense)
            try:
                for data in messages:
                    self._take(data)
                self._flush()
            except StoreError:
                self._seen, self._staged, self._ended, self._dense = before
                raise

    def check(self) -> None:
        """Raise the first gap that nothing could fill.

        Raises:
            DeltaGapError: with the number that is missing.
        """
        for error in self.gaps.values():
            raise error

    # Order ------------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        try:
            delta = decode_delta(data, where="a message of the stream")
            self._check(delta)
        except StoreError as error:
            self._refuse(error, 0)
            return
        head = delta.header
        if head.model != self.target.model:
            self.status.foreign += 1
            return
        if self._publisher not in (0, head.publisher):
            self._refuse(_other_publisher(delta), head.publisher)
            return
        if not self._publisher and head.base and self.target.base not in (0, head.base):
            self._refuse(_other_weights(delta), head.publisher)
            return
        self._publisher = head.publisher
        self._number(delta)

    def _refuse(self, error: StoreError, publisher: int) -> None:
        """Count a message that is left out; the first one of a publisher is logged for each reason."""
        self.status.refused += 1
        self.status.last_error = error.what
        if (error.what, publisher) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((error.what, publisher))
            _log.warning("a message was left out, and others like it will be: %s", str(error).replace("\n", ";"))

    def _check(self, delta: Delta) -> None:
        head = delta.header
        if head.num_partitions != self.num_partitions:
            raise StoreError("a delta is for another number of partitions", where=head.where,
                             value=head.num_partitions, allowed=str(self.num_partitions))  # fmt: skip
        width = self.target.row_bytes(head.table) if head.table else None
        if head.kind == DeltaKind.ROWS and width is not None and delta.rows.shape[1] != width:
            raise StoreError("rows of a delta have another length", where=head.where, value=delta.rows.shape[1],
                             allowed=str(width))  # fmt: skip
        if bool(head.table) != (head.kind in (DeltaKind.ROWS, DeltaKind.ERASED)):
            raise StoreError("a delta about a table names none, or the reverse", where=head.where)
        if head.kind == DeltaKind.END:
            _listed(delta)

    def _number(self, delta: Delta) -> None:
        head = delta.header
        stream = (head.table, head.partition)
        seen = self._seen_of(stream)
        if head.seq <= seen:
            self.status.repeated += 1
            if head.kind == DeltaKind.END:
                self._ended[head.partition] = max(self._ended.get(head.partition, 0), head.publication)
            return
        # Deltas about the whole model are complete in themselves: the end of a publication lists what is before it.
        if head.table and head.seq > seen + 1 and not self._fill(stream, seen + 1, head.seq - 1):
            return
        self._admit(delta)

    def _seen_of(self, stream: Stream) -> int:
        if stream not in self._seen:
            self._seen[stream] = self.target.applied(stream)
        return self._seen[stream]

    def _fill(self, stream: Stream, first: int, last: int) -> bool:
        """Get missing deltas from the outbox; False where they are not to be had: the partition is blocked then."""
        cause = None
        try:
            found = [] if self._repair is None else list(self._repair(*stream, first, last))
            deltas = [decode_delta(data, where="the outbox") for data in found]
            # The range may be of any size: a message tells where it ends.
            numbers = range(first, last + 1)
            if deltas and len(deltas) == len(numbers) and all(map(eq, (one.header.seq for one in deltas), numbers)):
                for one in deltas:
                    self._check_filling(one)
                for one in deltas:
                    self._admit(one)
                self.status.repaired += len(deltas)
                self.gaps.pop(stream, None)
                return True
        except (StoreError, OSError) as error:
            cause = str(error).split("\n", 1)[0]
        if stream not in self.gaps:
            self.gaps[stream] = DeltaGapError(*stream, first, first - 1, cause)
            self.status.last_error = self.gaps[stream].what
            _log.error("%s", self.gaps[stream])
        return False

    def _check_filling(self, delta: Delta) -> None:
        """See that a delta of the outbox is one that the stream has lost."""
        head = delta.header
        self._check(delta)
        if (head.model, head.publisher) != (self.target.model, self._publisher) or head.kind == DeltaKind.END:
            raise StoreError("the outbox is of another model or publisher", where=head.where)

    def _admit(self, delta: Delta) -> None:
        head = delta.header
        self._seen[head.table, head.partition] = head.seq
        if head.kind == DeltaKind.DENSE:
            self._dense.setdefault(head.publication, {})[head.part] = delta.rows.tobytes()
            self._num_parts[head.publication] = head.num_parts
        elif head.kind == DeltaKind.END and not self._end(delta):
            return  # the next publication's end lists what is missing here, too
        self._staged.append(delta)

    def _end(self, delta: Delta) -> bool:
        """Note that a publication is complete in a partition; what it lists and was not seen is missing."""
        head = delta.header
        ends, num_parts = _listed(delta)
        for table, seq in ends.items():
            stream = (table, head.partition)
            seen = self._seen_of(stream)
            if seen < seq and not self._fill(stream, seen + 1, seq):
                return False
        # Rows without the dense weights of their publication would be a mixture.
        if num_parts > len(self._dense.get(head.publication, ())) and self.visible == "publication":
            stream = ("", head.partition)
            found = self._fill(stream, head.seq - num_parts, head.seq - 1)
            self._seen[stream] = head.seq
            if not found:
                return False
        self.gaps.pop(("", head.partition), None)
        self._ended[head.partition] = head.publication
        return True

    # Visibility -------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Apply what may become visible now."""
        complete = min((self._ended.get(one, 0) for one in range(self.num_partitions)), default=0)
        due = self._staged
        if self.visible == "publication":
            due = [one for one in self._staged if one.header.publication <= complete]
        if not due:
            self.status.publication = max(self.status.publication, complete)
            return
        dense_due = self._dense_due(complete)
        changes: dict[str, Changes] = {}
        last: dict[Stream, int] = {}
        for one in due:
            head = one.header
            # Dense weights come before the end of their publication, in the same partition.
            if head.table or (head.kind == DeltaKind.END and head.publication <= complete):
                last[head.table, head.partition] = head.seq
            if head.table and self.target.row_bytes(head.table) is not None:
                changes.setdefault(head.table, Changes()).parts.append(one)
        parts = self._dense.get(dense_due, {})
        dense = b"".join(parts[i] for i in sorted(parts)) if parts else None
        self.target.apply(changes, last, self._publisher, dense, complete)
        for publication in [one for one in self._dense if one <= dense_due]:
            del self._dense[publication], self._num_parts[publication]
        left = [] if self.visible == "row" else [one for one in self._staged if one.header.publication > complete]
        self._staged = left
        self._count(due, complete)

    def _dense_due(self, complete: int) -> int:
        """Return the newest publication whose dense weights are all there and may become visible; 0: none."""
        whole = [one for one, parts in self._dense.items() if len(parts) == self._num_parts[one]]
        return max((one for one in whole if self.visible == "row" or one <= complete), default=0)

    def _count(self, due: Sequence[Delta], complete: int) -> None:
        status = self.status
        status.deltas += len(due)
        status.rows += sum(len(one.keys) for one in due if one.header.table)
        status.publication = max(status.publication, complete)
        status.staleness_s = max(0.0, time.time() - max(one.header.time_us for one in due) / 1e6)

    def to_dict(self) -> dict[str, Any]:
        """Return counts and gaps as plain data."""
        gaps = [{"table": one.table, "partition": one.partition, "seq": one.seq} for one in self.gaps.values()]
        return {**vars(self.status), "gaps": gaps, "waiting": len(self._staged)}


def _other_publisher(delta: Delta) -> StoreError:
    return StoreError("deltas of another publisher", where=delta.header.where, value=delta.header.publisher,
                      allowed="that of the deltas that were applied, or of the snapshot",
                      fix="load a snapshot of this publisher, or give each publisher its own topic")  # fmt: skip


def _other_weights(delta: Delta) -> StoreError:
    return StoreError("deltas of a model that began with other weights", where=delta.header.where,
                      value=delta.header.publisher, allowed="those of a publisher that began with the served snapshot",
                      fix="load a snapshot of this publisher: Publication.snapshot, or Model.save while it publishes",
                      )  # fmt: skip
