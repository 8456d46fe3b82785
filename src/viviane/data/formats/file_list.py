"""HugeCTR's file lists: a text file whose first line is a count, then one path per line.

A path is relative to the folder of the list or, if no file exists there, to the working directory, as in HugeCTR. A
list that the user names may refer to any file, like a command line; a list found in a folder, only to files in that
folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from viviane.core.errors import DataError
from viviane.core.files import write_bytes_atomic

FILE_LIST: Final = "file_list.txt"
METADATA_FILE: Final = "_metadata.json"
_LONGEST_COUNT: Final = 32


def is_file_list(path: Path) -> bool:
    """Return whether a file begins like a file list: with a line that contains only an integer."""
    with path.open("rb") as file:
        return file.readline(_LONGEST_COUNT).strip().isdigit()


def read_file_list(path: Path, *, inside: Path | None = None) -> list[Path]:
    """Return the paths of a file list.

    Args:
        path: the list.
        inside: refuse files that are not in this folder.

    Raises:
        DataError: the list is malformed, the count differs from the number of lines, a file is missing or not in the
            folder.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("not a file list", where=str(path), value=str(error)) from error
    names = [line.strip() for line in lines[1:] if line.strip()]
    count = lines[0].strip() if lines else ""
    if not count.isdigit() or int(count) != len(names):
        raise DataError(
            "the first line of a file list must be the number of files",
            where=f"{path}, line 1",
            value=count,
            allowed=str(len(names)),
            fix="write the list again; it may be truncated",
        )
    if not names:
        raise DataError("the file list names no files", where=str(path))
    files = [_find(path, number, name) for number, name in enumerate(names, 2)]
    for number, file in enumerate(files, 2):
        if inside is not None and not file.resolve().is_relative_to(inside.resolve()):
            raise DataError(
                "a file list that was found in a folder names a file outside it", where=f"{path}, line {number}",
                value=str(file), allowed=f"files in {inside}", fix="pass the list itself if you trust it",
            )  # fmt: skip
    return files


def _find(path: Path, line: int, name: str) -> Path:
    beside = path.parent / name
    for file in (beside, Path(name)):
        if file.is_file():
            return file
    raise DataError("a file of the list is missing", where=f"{path}, line {line}", value=name, fix="correct the path")


def write_file_list(path: Path, files: Sequence[Path]) -> None:
    """Write a file list, atomically.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_file_list(folder / "list.txt", [Path("/data/0.norm"), Path("/data/1.norm")])
        >>> (folder / "list.txt").read_text()
        '2\\n/data/0.norm\\n/data/1.norm\\n'
    """
    write_bytes_atomic(path, "".join(f"{line}\n" for line in (len(files), *files)).encode())
