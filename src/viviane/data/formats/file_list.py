"""HugeCTR's file lists: a text file whose first line is a count, then one path per line.

A path is relative to the folder of the list or, if no file exists there, to the working directory, as in HugeCTR. A
list that the user names may refer to any file, like a command line; a list found in a folder, only to files in that
folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from viviane.core.digits import number_in
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
    count, names = lines_of_list(path)
    if count != len(names):
        raise _wrong_count(path, str(count), len(names))
    files = [_find(path, number, name) for number, name in enumerate(names, 2)]
    for number, file in enumerate(files, 2):
        if inside is not None and not file.resolve().is_relative_to(inside.resolve()):
            raise DataError(
                "a file list that was found in a folder names a file outside it", where=f"{path}, line {number}",
                value=str(file), allowed=f"files in {inside}", fix="pass the list itself if you trust it",
            )  # fmt: skip
    return files


def lines_of_list(path: Path) -> tuple[int, list[str]]:
    """Return the count of a file list, and the paths of its lines.

    Raises:
        DataError: the list cannot be read, its first line is no count, or it names no file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("not a file list", where=str(path), value=str(error)) from error
    names = [line.strip() for line in lines[1:] if line.strip()]
    count = lines[0].strip() if lines else ""
    number = number_in(count)
    if number is None:
        raise _wrong_count(path, count[:_LONGEST_COUNT], len(names))
    if not names:
        raise DataError("the file list names no files", where=str(path))
    return number, names


def _wrong_count(path: Path, count: str, lines: int) -> DataError:
    return DataError(
        "the first line of a file list must be the number of files", where=f"{path}, line 1", value=count,
        allowed=str(lines), fix="write the list again; it may be truncated",
    )  # fmt: skip


def listed_file(path: Path, name: str) -> Path | None:
    """Return the file of a name in a list, in the list's folder or the working directory; None if there is none."""
    return next((file for file in (path.parent / name, Path(name)) if file.is_file()), None)


def _find(path: Path, line: int, name: str) -> Path:
    file = listed_file(path, name)
    if file is None:
        raise DataError("a file of the list is missing", where=f"{path}, line {line}", value=name,
                        fix="correct the path")  # fmt: skip
    return file


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
