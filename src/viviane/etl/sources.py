"""The raw files: which they are, of what kind, and their text in blocks of whole lines."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, cast
from urllib.parse import unquote

import numpy as np

from viviane.core.errors import ConfigError, DataError, DataNotFoundError
from viviane.core.locations import AnyPath, RemotePath, location

BLOCK_BYTES: Final = 2 << 20  # what is at work stays in the cache; smaller blocks cost more calls
_TAIL_BYTES: Final = 4096
_NEWLINE: Final = ord("\n")
_COUNTED_BYTES: Final = 1 << 17
_MISSING_IN_PATH: Final = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_LINE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Source:
    """One raw file."""

    path: AnyPath
    kind: Literal["text", "gzip", "parquet"]
    size_bytes: int
    modified_ns: int
    path_values: tuple[tuple[str, str | None], ...] = ()  # columns that its folders name, where they are to
    given_as: str = ""  # what the rows of a temporary file were

    @property
    def shown(self) -> str:
        """What messages and records call it: a temporary file would be gone when they are read."""
        return self.given_as or str(self.path)

    def stamp(self) -> list[object]:
        """What distinguishes this file from a changed one, cheaply."""
        return [str(self.path), self.size_bytes, self.modified_ns]


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of a text file, the last newline included where there is one."""

    data: bytes
    first_line: int  # counted from 1 in the file
    num_lines: int


def find_sources(
    paths: str | AnyPath | Sequence[str | AnyPath], *, hive_partitioning: bool = False, file_name: str | None = None
) -> list[Source]:
    """Return the files that paths, folders and patterns name, in the order given; within one, by name.

    Args:
        hive_partitioning: folders called `name=value` inside a folder are searched too, and name columns.
        file_name: a column that the name of the file becomes.

    Raises:
        ConfigError: nothing was named, a file is named twice, or a folder names the column `file_name` as well.
        DataError: a path does not exist or cannot be read.
    """
    files: list[AnyPath] = []
    if not isinstance(paths, str | Path | RemotePath | Sequence):
        raise ConfigError("not a path, nor a list of paths", value=type(paths).__name__)
    for item in [paths] if isinstance(paths, (str, Path, RemotePath)) else paths:
        path = location(item)
        found: list[AnyPath]
        if path.is_dir():
            found = _files_in(path, hive_partitioning)
        elif path.exists():
            found = [path]
        elif isinstance(path, RemotePath):
            found = [one for one in path.parent.glob(path.name) if one.is_file()]
        else:
            found = [Path(one) for one in sorted(glob.glob(str(item)))]  # noqa: PTH207 - patterns may be absolute
        if not found:
            raise DataNotFoundError("no such input file", where=str(item))
        files += found
    twice = sorted({str(file) for file in files if files.count(file) > 1})
    if twice or not files:
        raise ConfigError("the input files must be named, each once", value=", ".join(twice) or "none")
    found_in = [path_values(file) if hive_partitioning else () for file in files]
    if file_name is not None:
        for file, values in zip(files, found_in, strict=True):
            if file_name in dict(values):
                raise ConfigError(
                    "file_name is also the name of a folder's column", where=str(file), value=file_name,
                    fix="choose another file_name",
                )  # fmt: skip
        found_in = [(*values, (file_name, file.name)) for file, values in zip(files, found_in, strict=True)]
    return [_source(file.resolve(), values) for file, values in zip(files, found_in, strict=True)]


def _files_in(folder: AnyPath, hive_partitioning: bool) -> list[AnyPath]:
    found: list[AnyPath] = []
    inside: list[AnyPath] = list(folder.iterdir())
    for one in sorted(inside, key=str):
        if one.name.startswith((".", "_")):
            continue
        if one.is_file():
            found.append(one)
        elif hive_partitioning and "=" in one.name and one.is_dir():
            found += _files_in(one, hive_partitioning)
    return found


def path_values(path: AnyPath) -> tuple[tuple[str, str | None], ...]:
    """Return the columns that the folders of a path name, the innermost last; None is a missing value.

    Example:
        >>> from pathlib import Path
        >>> path_values(Path("/logs/date=2024-01-01/city=New%20York/part-0.csv"))
        (('date', '2024-01-01'), ('city', 'New York'))
    """
    found: dict[str, str | None] = {}
    for folder in str(path).split("/")[:-1]:
        name, sign, value = folder.partition("=")
        if name and sign:
            found[unquote(name)] = None if value == _MISSING_IN_PATH else unquote(value)
    return tuple(found.items())


def _source(path: AnyPath, values: tuple[tuple[str, str | None], ...]) -> Source:
    try:
        stat = path.stat()
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError("cannot read the input file", where=str(path), value=str(error)) from error
    kind: Literal["text", "gzip", "parquet"] = "text"
    if head == b"PAR1" or path.suffix in (".parquet", ".pq"):
        kind = "parquet"
    elif head[:2] == b"\x1f\x8b":
        kind = "gzip"
    return Source(path, kind, stat.st_size, stat.st_mtime_ns, values)


def text_blocks(
    source: Source, *, skip_bytes: int = 0, first_line: int = 1, block_bytes: int | None = None
) -> Iterator[TextBlock]:
    """Yield a file's lines in blocks, starting at a line that begins `skip_bytes` into its (unpacked) text.

    Empty lines at the very end are no rows and are left out.

    Raises:
        DataError: the file is truncated or altered gzip, or has an endless line.
    """
    line, rest, size = first_line, b"", block_bytes or BLOCK_BYTES
    seekable = source.kind == "text" and isinstance(source.path, Path)
    with _open(source) as file:
        try:
            file.seek(skip_bytes)
            while piece := _next_piece(file, size, to_line_end=seekable):
                rest = rest + piece if rest else piece
                cut = _whole_lines(rest)
                if cut == 0 and len(rest) > _LONGEST_LINE_BYTES:
                    cut = rest.rfind(b"\n") + 1
                    if cut == 0:
                        raise DataError("a line does not end", where=f"{source.path}, line {line}")
                if cut:
                    data, rest = rest[:cut], rest[cut:]
                    block = TextBlock(data, line, _num_lines(data))
                    line += block.num_lines
                    yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                "the gzip file is truncated or altered",
                where=f"{source.path}, after line {line - 1}",
                value=str(error),
                fix="fetch the file again",
            ) from error
    if rest.strip(b"\r\n"):
        data = rest.removesuffix(b"\r") + b"\n"
        yield TextBlock(data, line, data.count(b"\n"))


def _next_piece(file: IO[bytes], size: int, *, to_line_end: bool) -> bytes:
    """Read about `size` bytes, up to the end of a line where that can be found first: nothing is copied then."""
    if to_line_end:
        start = file.tell()
        file.seek(start + size - 1)
        file.readline(_LONGEST_LINE_BYTES)
        size = max(file.tell() - start, size)
        file.seek(start)
    return file.read(size)


def _num_lines(data: bytes) -> int:
    """Return how many newlines there are; `bytes.count` looks at one byte after the other.

    In pieces: a temporary array as large as the block would be new memory each time, which the kernel clears.
    """
    found = np.frombuffer(data, np.uint8)
    pieces = (found[start : start + _COUNTED_BYTES] for start in range(0, len(found), _COUNTED_BYTES))
    return sum(int(np.count_nonzero(piece == _NEWLINE)) for piece in pieces)


def _whole_lines(data: bytes) -> int:
    """Return where the last whole line ends that is surely no empty line at the end of the file; 0: nowhere."""
    end = data.rfind(b"\n") + 1
    if data[end:].strip(b"\r"):
        return end
    start = max(0, end - _TAIL_BYTES)  # mostly enough, so that the whole is not copied
    tail = data[start:end].rstrip(b"\r\n")
    full = start + len(tail) if tail else len(data[:start].rstrip(b"\r\n"))
    return data.find(b"\n", full) + 1 if full else 0


def _open(source: Source) -> IO[bytes]:
    if source.kind == "gzip":
        if isinstance(source.path, RemotePath):
            return cast(IO[bytes], gzip.GzipFile(fileobj=source.path.open("rb"), mode="rb"))
        return cast(IO[bytes], gzip.open(source.path, "rb"))
    return source.path.open("rb")
