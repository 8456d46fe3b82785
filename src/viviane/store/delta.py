"""Deltas: numbered, checksummed groups of changed rows, the same bytes in a stream, an outbox and a file.

A delta is a header of 128 bytes, the names, the keys and the rows, each beginning at a multiple of 64 bytes:

    0   magic "VVDELTA1"            64  first_step, last_step      (int64)
    8   CRC-32C of all that follows 80  publication                (int64)
    12  bytes of the whole delta    88  time_us, Unix microseconds (int64)
    16  kind: rows, erased, dense, end of publication (uint32)
    20  partition, num_partitions   96  num_rows, row_bytes        (uint32)
    28  part, num_parts (uint16)   104  bytes of model, table      (uint16)
    32  generation, 40 publisher   108  base (int64)
    48  seq, 56 prev_seq (int64)   128  model, table (UTF-8)
                                        keys int64 (n,), rows uint8 (n, row_bytes)
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np

from viviane.core.errors import ConfigError, StoreError
from viviane.ops.crc32c import crc32c
from viviane.store.row_layout import MAX_ROW_BYTES, Keys, Rows

MAX_DELTA_BYTES: Final = 1 << 20
_SENT_BYTES: Final = 960_000
"""Maximum size of a message: brokers refuse more than 1,000,000 bytes by default."""
MAX_NAME_BYTES: Final = 255
_MAGIC: Final = b"VVDELTA1"
_HEADER: Final = struct.Struct("<8sIIIIIHHqqqqqqqqIIHHq12x")
_ALIGNED: Final = 64
_CHECKED_FROM: Final = 12  # after magic and checksum


class DeltaKind(IntEnum):
    """The content of a delta."""

    ROWS = 0
    """Rows to insert or replace."""
    ERASED = 1
    """Keys to remove; there are no rows."""
    DENSE = 2
    """A part of the dense weights: one row, the bytes of a safetensors file; `table` is empty."""
    END = 3
    """A publication is complete in its partition; one row, JSON {"last": {table: seq}, "dense": parts of its dense
    weights in this partition}; `table` is empty."""


@dataclass(frozen=True)
class DeltaHeader:
    """The header of a delta: its kind and its position in the sequence.

    Args:
        model, table: names; `table` is empty for deltas about the whole model.
        generation: of the snapshot that the delta changes.
        partition: of all keys in it, one of `num_partitions`.
        seq: dense from 1 on for each table and partition of a generation; `prev_seq` is the one before, 0 at first.
        publication: the group of deltas that becomes visible together.
        publisher: a random number that stays with an outbox, so that two publishers are not taken for one.
        first_step, last_step: training steps whose changes are in it.
        part, num_parts: of dense weights.
        time_us: when it was made, microseconds since 1970.
        base: digest of the weights that the publisher began with, so that no other model takes its changes; 0: unknown.
    """

    model: str
    table: str
    generation: int
    partition: int
    seq: int
    prev_seq: int
    publication: int = 0
    publisher: int = 0
    num_partitions: int = 1
    first_step: int = 0
    last_step: int = 0
    kind: DeltaKind = DeltaKind.ROWS
    part: int = 0
    num_parts: int = 1
    time_us: int = 0
    base: int = 0

    @property
    def where(self) -> str:
        """The place of the delta in words, for messages."""
        table = f", table {self.table!r}" if self.table else ""
        return f"model {self.model!r}{table}, generation {self.generation}, partition {self.partition}, seq {self.seq}"


@dataclass(frozen=True)
class Delta:
    """A header with keys (n,) and rows (n, row_bytes)."""

    header: DeltaHeader
    keys: Keys
    rows: Rows = field(repr=False)

    def encode(self) -> bytes:
        """Return the delta as bytes.

        Raises:
            ConfigError: it would be larger than 1 MiB, or a field is out of range.
        """
        head, keys, rows = self.header, self.keys, self.rows
        if rows.ndim != 2 or len(rows) != len(keys):
            raise ConfigError("a delta has a row for each key", where=head.where, value=f"{len(keys)}, {rows.shape}")
        model, table = head.model.encode(), head.table.encode()
        if not model or max(len(model), len(table)) > MAX_NAME_BYTES:
            allowed = f"1 to {MAX_NAME_BYTES} bytes"
            raise ConfigError("a name in a delta is empty or too long", where=head.where, allowed=allowed)
        keys_at = _aligned(_HEADER.size + len(model) + len(table))
        rows_at = _aligned(keys_at + 8 * len(keys))
        total = _aligned(rows_at + rows.size)
        if total > MAX_DELTA_BYTES:
            allowed = f"{MAX_DELTA_BYTES:,} bytes"
            raise ConfigError("the delta is too large", where=head.where, value=f"{total:,} bytes", allowed=allowed)
        buffer = bytearray(total)
        try:
            _HEADER.pack_into(
                buffer, 0, _MAGIC, 0, total, int(head.kind), head.partition, head.num_partitions, head.part,
                head.num_parts, head.generation, head.publisher, head.seq, head.prev_seq, head.first_step,
                head.last_step, head.publication, head.time_us, len(keys), rows.shape[1], len(model), len(table),
                head.base,
            )  # fmt: skip
        except struct.error as error:
            raise ConfigError("a number in a delta is out of range", where=head.where, value=str(error)) from error
        buffer[_HEADER.size : _HEADER.size + len(model) + len(table)] = model + table
        whole = np.frombuffer(buffer, np.uint8)
        whole[keys_at : keys_at + 8 * len(keys)] = np.ascontiguousarray(keys).view(np.uint8)
        whole[rows_at : rows_at + rows.size] = np.ascontiguousarray(rows).reshape(-1)
        struct.pack_into("<I", buffer, 8, crc32c(whole[_CHECKED_FROM:]))
        return bytes(buffer)


def decode_delta(data: Any, *, where: str = "delta", row_bytes: int | None = None) -> Delta:
    """Read a delta; nothing in it is trusted.

    Args:
        data: bytes, or a uint8 array; keys and rows of the result are views of it.
        where: the file or message, for errors.
        row_bytes: what rows must have, where that is known.

    Raises:
        StoreError: it is truncated, too large, altered, or of another form.
    """
    whole = np.frombuffer(data, np.uint8)
    size = len(whole)
    if not _HEADER.size <= size <= MAX_DELTA_BYTES:
        allowed = f"{_HEADER.size} to {MAX_DELTA_BYTES:,}"
        raise StoreError("not a delta: its size", where=where, value=f"{size:,} bytes", allowed=allowed)
    (magic, checksum, total, kind, partition, num_partitions, part, num_parts, generation, publisher, seq, prev_seq,
     first_step, last_step, publication, time_us, count, width, model_bytes,
     table_bytes, base) = _HEADER.unpack_from(whole.data)  # fmt: skip
    if magic != _MAGIC:
        raise StoreError(
            "not a delta, or of another version", where=where, value=bytes(magic).hex(), allowed="VVDELTA1"
        )
    if total != size:
        raise StoreError("a delta is truncated or too long", where=where, value=f"{size:,} bytes", allowed=f"{total:,}")
    if crc32c(whole[_CHECKED_FROM:]) != checksum:
        raise StoreError("a delta was altered: its checksum differs", where=where)
    names_at = _HEADER.size
    keys_at = _aligned(names_at + model_bytes + table_bytes)
    rows_at = _aligned(keys_at + 8 * count)
    problem = _problem(kind, partition, num_partitions, part, num_parts, seq, prev_seq, count, width, model_bytes)
    if problem is None and _aligned(rows_at + count * width) != size:
        problem = f"{count} rows of {width} bytes do not fill {size} bytes"
    if problem is None and row_bytes is not None and kind == DeltaKind.ROWS and width != row_bytes:
        problem = f"rows have {width} bytes, the table's {row_bytes}"
    if problem is not None:
        raise StoreError("a delta contradicts itself or its table", where=where, value=problem)
    try:
        model = bytes(whole[names_at : names_at + model_bytes]).decode()
        table = bytes(whole[names_at + model_bytes : names_at + model_bytes + table_bytes]).decode()
    except UnicodeDecodeError as error:
        raise StoreError("a name in a delta is no text", where=where, value=str(error)) from error
    header = DeltaHeader(
        model, table, generation, partition, seq, prev_seq, publication, publisher, num_partitions, first_step,
        last_step, DeltaKind(kind), part, num_parts, time_us, base,
    )  # fmt: skip
    keys = whole[keys_at : keys_at + 8 * count].view(np.int64)
    return Delta(header, keys, whole[rows_at : rows_at + count * width].reshape(count, width))


def _problem(
    kind: int, partition: int, num_partitions: int, part: int, num_parts: int, seq: int, prev_seq: int, count: int,
    width: int, model_bytes: int,
) -> str | None:  # fmt: skip
    known = {int(one) for one in DeltaKind}
    whole_model = kind in (DeltaKind.DENSE, DeltaKind.END)
    found = {
        f"unknown kind {kind}": kind not in known,
        f"partition {partition} of {num_partitions}": partition >= num_partitions,
        f"part {part} of {num_parts}": part >= num_parts,
        f"seq {seq} after {prev_seq}": not 0 <= prev_seq < seq,
        f"{count} rows where there is one": whole_model and count != 1,
        f"rows of {width} bytes": width > MAX_ROW_BYTES or (kind == DeltaKind.ERASED and width > 0),
        "no model": not model_bytes,
    }
    return next((text for text, is_so in found.items() if is_so), None)


def most_rows(row_bytes: int, names: int = 2 * MAX_NAME_BYTES) -> int:
    """Return how many rows fit into one delta; at least 1.

    Example:
        >>> most_rows(512)
        1844
    """
    room = _SENT_BYTES - _aligned(_HEADER.size + names) - 2 * _ALIGNED
    return max(1, room // (8 + row_bytes))


def split_rows(header: DeltaHeader, keys: Keys, rows: Rows) -> Iterator[Delta]:
    """Cut rows of one partition into deltas, which are numbered on from the header's seq."""
    step = most_rows(rows.shape[1])
    stamped = replace(header, time_us=header.time_us or time.time_ns() // 1000)
    for number, start in enumerate(range(0, len(keys), step)):
        seq = header.seq + number
        own = replace(stamped, seq=seq, prev_seq=seq - 1)
        yield Delta(own, keys[start : start + step], rows[start : start + step])


def partition_of(keys: Keys, num_partitions: int) -> Keys:
    """Return the partition of each key, from the high bits of its splitmix64 (Steele et al. 2014).

    Example:
        >>> bool(np.bincount(partition_of(np.arange(0, 4000, 4), 4)).min() > 200)
        True
    """
    with np.errstate(over="ignore"):
        mixed = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(32)) * np.uint64(num_partitions) >> np.uint64(32)).astype(np.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
