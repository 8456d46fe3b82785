"""The publisher's log of deltas on disk: what a stream may still lose, and what consumers may ask for again.

    outbox/
        lock                    one publisher at a time
        outbox.json             the publisher's random number, generation, what weights it began and ended with
        00000001.vvlog, ...     frames: length, CRC-32C of the length and offset, delta; the delta has its own checksum
        sent.json               up to which frame the broker has confirmed everything

A frame is in the log when `append` has returned: it was written and synchronized. After a crash the last file may end
in a torn frame, which `append` had not returned from; it is cut off. A damaged frame anywhere else is an error.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self, TypeAlias

from viviane.core.errors import StoreError
from viviane.core.file_names import refuse_links
from viviane.core.files import remove_unfinished, write_json_atomic
from viviane.core.json_files import expected_form, read_json_object
from viviane.core.locations import local_path
from viviane.ops.crc32c import crc32c
from viviane.store.delta import MAX_DELTA_BYTES, DeltaHeader, decode_delta

_FRAME: Final = struct.Struct("<II")  # bytes of the delta, checksum of them and of the frame's number
_LOG_NAME: Final = re.compile("[0-9a-f]{16}")
_SEGMENT_BYTES: Final = 64 << 20
_VERSION: Final = 1
_Stream: TypeAlias = tuple[str, int]
"""A table and a partition: what is numbered on its own."""


@dataclass
class _Segment:
    path: Path
    first: int
    """Number of its first frame in the log."""
    count: int
    num_bytes: int


class Outbox:
    """An append-only log of encoded deltas.

    Args:
        folder: made if it is absent.
        model: whose deltas these are.
        base: digest of the weights that a new outbox begins with; 0: unknown.
        keep_bytes: how much of what the broker has confirmed stays, for consumers that have lost something.

    Raises:
        StoreError: another publisher has the folder, it is of another model, or a file is damaged.
    """

    def __init__(self, folder: str | Path, model: str, *, base: int = 0, keep_bytes: int = 4 << 30) -> None:
        self.folder, self.model, self.keep_bytes = local_path(folder), model, keep_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        refuse_links(self.folder, error=StoreError)
        self._lock_file: int | None = _locked(self.folder)
        self._lock = threading.Lock()
        self._file: int | None = None
        self.last: dict[_Stream, int] = {}
        self.publication = 0
        try:
            self._read_identity(base)
            self._segments = [self._scan(path, last=i == 0) for i, path in enumerate(reversed(self._paths()))][::-1]
        except BaseException:
            self.close()
            raise
        self._number()
        self.next_frame = self._segments[-1].first + self._segments[-1].count if self._segments else self.sent
        if self.sent > self.next_frame:
            raise StoreError(
                "the outbox has lost frames that were sent", where=str(self.folder), value=self.next_frame,
                allowed=f"{self.sent} or more", fix="publish a new generation into a new folder",
            )  # fmt: skip

    # Identity ---------------------------------------------------------------------------------------------------

    def _read_identity(self, base: int) -> None:
        path, sent = self.folder / "outbox.json", self.folder / "sent.json"
        for one in (path, sent):
            remove_unfinished(one)
        if not path.exists():
            self.publisher, self.generation, self.base, self.weights = secrets.randbits(62), 1, base, 0
            self._write_identity()
        content = read_json_object(path, error=StoreError)
        with expected_form(str(path), StoreError):
            if content["version"] != _VERSION or content["model"] != self.model:
                what = "the outbox is of another model or version"
                raise StoreError(what, where=str(path), value=str(content.get("model"))[:100], allowed=self.model)
            self.publisher, self.generation = int(content["publisher"]), int(content["generation"])
            self.base, self.weights = int(content.get("base", 0)), int(content.get("weights", 0))
        self.sent = 0
        if sent.exists():
            content = read_json_object(sent, error=StoreError)
            with expected_form(str(sent), StoreError):
                self.sent = int(content["frame"])
                self.last = {(str(t), int(p)): int(s) for t, p, s in content["last"]}
                self.publication = int(content["publication"])

    def _write_identity(self) -> None:
        content = {"version": _VERSION, "model": self.model, "publisher": self.publisher,
                   "generation": self.generation, "base": self.base, "weights": self.weights}  # fmt: skip
        write_json_atomic(self.folder / "outbox.json", content)

    def begin_with(self, base: int) -> None:
        """Note with which weights the first delta begins."""
        assert not self.publication
        self.base = base
        self._write_identity()

    def end_with(self, weights: int) -> None:
        """Note which weights servers have when they have applied all that was published."""
        self.weights = weights
        self._write_identity()

    # Reading what is there --------------------------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        return _log_files(self.folder)

    def _scan(self, path: Path, *, last: bool) -> _Segment:
        """Check every frame of a file; of the last one, cut a torn end off."""
        first, count, end = int(path.stem, 16), 0, 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for data, after in _frames(file, first, size):
                self._note(decode_delta(data, where=f"{path}, frame {first + count}").header)
                count, end = count + 1, after
        if end != size:
            if not last:
                raise StoreError("a file of the outbox is damaged", where=f"{path}, frame {first + count}",
                                 value=f"{size - end:,} bytes that are no frame",
                                 fix="publish a new generation into a new folder")  # fmt: skip
            os.truncate(path, end)
        return _Segment(path, first, count, end)

    def _note(self, header: DeltaHeader) -> None:
        stream = (header.table, header.partition)
        self.last[stream] = max(self.last.get(stream, 0), header.seq)
        self.publication = max(self.publication, header.publication)

    def _number(self) -> None:
        """See that files follow each other."""
        for before, after in zip(self._segments, self._segments[1:], strict=False):
            if before.first + before.count != after.first:
                raise StoreError("a file of the outbox is missing", where=str(after.path), value=after.first,
                                 allowed=str(before.first + before.count))  # fmt: skip

    # Writing ----------------------------------------------------------------------------------------------------

    def append(self, deltas: Iterable[bytes]) -> range:
        """Write encoded deltas and return when the disk has them; returns the numbers of their frames.

        Raises:
            StoreError: the disk is full or not writable; nothing was appended then.
        """
        with self._lock:
            first = number = self.next_frame
            segment = self._open_segment()
            parts, headers = [], []
            for data in deltas:
                headers.append(decode_delta(data).header)
                parts += [_FRAME.pack(len(data), _checksum(data, number)), data]
                number += 1
            if number == first:
                return range(first, first)
            block = b"".join(parts)
            assert self._file is not None
            try:
                written = 0
                while written < len(block):
                    written += os.write(self._file, memoryview(block)[written:])
                os.fsync(self._file)
            except OSError as error:
                os.ftruncate(self._file, segment.num_bytes)
                os.lseek(self._file, segment.num_bytes, os.SEEK_SET)
                raise StoreError(
                    "the outbox cannot be written", where=str(segment.path), value=str(error),
                    fix="make room; what was not published stays marked as changed",
                ) from error  # fmt: skip
            segment.num_bytes += len(block)
            segment.count += number - first
            self.next_frame = number
            for header in headers:
                self._note(header)
            return range(first, number)

    def _open_segment(self) -> _Segment:
        if self._segments and self._segments[-1].num_bytes < _SEGMENT_BYTES:
            segment = self._segments[-1]
            if self._file is None:
                self._file = os.open(segment.path, os.O_WRONLY | os.O_APPEND)
            return segment
        if self._file is not None:
            os.close(self._file)
        path = self.folder / f"{self.next_frame:016x}.vvlog"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        _sync_folder(self.folder)
        self._segments.append(_Segment(path, self.next_frame, 0, 0))
        return self._segments[-1]

    def confirm(self, frame: int) -> None:
        """Note that the broker has all frames before `frame`, and remove old files beyond `keep_bytes`."""
        with self._lock:
            self.sent = max(self.sent, frame)
            last = [[table, partition, seq] for (table, partition), seq in self.last.items()]
            content = {"frame": self.sent, "publication": self.publication, "last": last}
            write_json_atomic(self.folder / "sent.json", content)
            kept = sum(one.num_bytes for one in self._segments)
            while len(self._segments) > 1 and kept > self.keep_bytes:
                oldest = self._segments[0]
                if oldest.first + oldest.count > self.sent:
                    break
                oldest.path.unlink()
                kept -= oldest.num_bytes
                del self._segments[0]

    # Asking -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Frames that the broker has not confirmed."""
        return self.next_frame - self.sent

    def frames(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and deltas of the log from a frame on."""
        with self._lock:
            segments = [(one.path, one.first, one.num_bytes) for one in self._segments if one.first + one.count > start]
        for path, first, size in segments:
            with path.open("rb") as file:
                for number, (data, _) in enumerate(_frames(file, first, size), first):
                    if number >= start:
                        yield number, data

    def close(self) -> None:
        """Let other publishers have the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_outbox(folder: str | Path, table: str, partition: int, first_seq: int, last_seq: int) -> Iterator[bytes]:
    """Yield the deltas of a table and partition with seq from `first_seq` to `last_seq`, beside a publisher.

    Raises:
        StoreError: a file is damaged, or some of them are not there any more.
    """
    wanted, place = first_seq, _existing(folder)
    for path in _log_files(place):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for data, _ in _frames(file, int(path.stem, 16), size):
                header = decode_delta(data, where=str(path)).header
                if (header.table, header.partition) == (table, partition) and header.seq == wanted <= last_seq:
                    yield data
                    wanted += 1
    if wanted <= last_seq:
        raise StoreError("the outbox no longer has a delta", where=f"{folder}, table {table!r}, partition {partition}",
                         value=f"seq {wanted}", fix="load a newer snapshot")  # fmt: skip


def check_outbox(folder: str | Path, model: str | None = None) -> None:
    """Refuse a folder that is not there, or is the outbox of another model; an empty one waits for its publisher.

    Args:
        folder: of the outbox.
        model: whose deltas it has to hold; None: any.

    Raises:
        StoreError: with what is wrong.
    """
    path = _existing(folder) / "outbox.json"
    if not path.exists():
        return
    content = read_json_object(path, error=StoreError)
    if model is not None and content.get("model") != model:
        raise StoreError("the outbox is of another model", where=str(path), value=str(content.get("model"))[:100],
                         allowed=model, fix="name the outbox of the publisher that this server follows")  # fmt: skip


def _existing(folder: str | Path) -> Path:
    """Return the path of an outbox that is there."""
    place = local_path(folder)
    if not place.is_dir():
        raise StoreError("there is no such outbox", where=str(place),
                         fix="correct the path, or mount the publisher's folder")  # fmt: skip
    refuse_links(place, error=StoreError)
    return place


def _log_files(folder: Path) -> list[Path]:
    """Return the files of a log in their order: each is named by the number of its first frame."""
    found = sorted(folder.glob("*.vvlog"))
    for path in found:
        if not _LOG_NAME.fullmatch(path.stem):
            raise StoreError("a file in the outbox is not its own", where=str(path), fix="move it elsewhere")
    return found


def _frames(file: BinaryIO, first: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield frames up to the first one that is not whole, and where each ends."""
    number, at = first, 0
    while at + _FRAME.size <= size:
        length, checksum = _FRAME.unpack(file.read(_FRAME.size))
        if length > MAX_DELTA_BYTES or at + _FRAME.size + length > size:
            return
        data = file.read(length)
        if len(data) != length or _checksum(data, number) != checksum:
            return
        at += _FRAME.size + length
        yield data, at
        number += 1


def _checksum(data: bytes, number: int) -> int:
    """Return the checksum of a frame; a frame at another offset has another one."""
    return crc32c(data[:16], crc32c(struct.pack("<QI", number, len(data))))


def _locked(folder: Path) -> int:
    import fcntl

    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreError("another publisher writes to this outbox", where=str(folder),
                         fix="end it, or choose another folder") from error  # fmt: skip
    return handle


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
