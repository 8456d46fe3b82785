"""Atomic writes: a reader sees the old file or the new one, never a partial one."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from viviane.core.errors import VivianeError
from viviane.core.exchange import is_stream, put_in_place, reserved, sync_folder, sync_tree
from viviane.core.locations import RemotePath, location
from viviane.core.locks import hidden_name, real_place

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def write_bytes_atomic(path: str | Path | RemotePath, data: bytes) -> None:
    """Write `data` to a temporary name next to `path`, flush it, and rename it into place; to a URL, in one request.

    A character device or a pipe, such as /dev/null or /dev/stdout, is written to.
    """
    path = location(path)
    if isinstance(path, RemotePath) or is_stream(path):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    name, descriptor = _open_temporary(path)
    with os.fdopen(descriptor, "wb") as file:
        try:
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform != "win32":  # renamed while locked: a waiting process then detects the rename
                name.replace(path)
        except BaseException:
            with suppress(PermissionError):  # on Windows an open file cannot be removed
                name.unlink(missing_ok=True)
            raise
    if sys.platform == "win32":
        name.replace(path)
    sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove what a killed process has left of `write_bytes_atomic`; the caller keeps other writers out."""
    hidden_name(path, "tmp").unlink(missing_ok=True)


def _open_temporary(path: Path) -> tuple[Path, int]:
    """Open the temporary file of a path, which one process at a time holds; a killed process's leftover is reused."""
    name = hidden_name(path, "tmp")
    if sys.platform == "win32":
        name = name.with_name(f"{name.name}.{secrets.token_hex(4)}")
        return name, os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    import fcntl

    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            own = os.fstat(descriptor)
            if os.path.samestat(name.stat(follow_symlinks=False), own):
                if stat.S_ISREG(own.st_mode) and own.st_nlink == 1:
                    os.fchmod(descriptor, 0o644)
                    return name, descriptor
                name.unlink()  # the name refers to something else
        except FileNotFoundError:
            pass  # the previous process has renamed it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_json_atomic(path: str | Path | RemotePath, value: Any) -> None:
    """Write `value` as indented JSON, atomically; keys keep their order, so that diffs stay small."""
    write_bytes_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


@contextmanager
def replace_folder(path: str | Path | RemotePath, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield an empty temporary folder next to `path` that replaces it when the block succeeds.

    An existing `path` is not changed until the new folder is complete, and not at all if the block fails. For a URL
    the folder is a local one that is uploaded at the end.

    Args:
        path: the folder to create.
        overwrite: False raises an error if it exists.

    Raises:
        ConfigError: another process is writing this folder, or it exists.
    """
    path = location(path)
    if isinstance(path, RemotePath):
        from viviane.core.remote.published import publish_folder

        with publish_folder(path, overwrite=overwrite) as work:
            yield work
        return
    with reserved(path, overwrite=overwrite) as spare:
        work = spare / (real_place(path).name or "new")
        work.mkdir()
        yield work
        sync_tree(work)
        put_in_place(work, path)


@contextmanager
def replace_file(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path` that replaces it when the block succeeds.

    A character device or a pipe is written to when the block succeeds.

    Args:
        path: the file to create.
        overwrite: False raises an error if it exists.

    Raises:
        ConfigError: another process is writing this file, or it exists.
    """
    if is_stream(path):
        with TemporaryDirectory(prefix="viviane-") as folder:
            work = Path(folder) / path.name
            yield work
            with work.open("rb") as source, path.open("wb") as stream:
                shutil.copyfileobj(source, stream)
        return
    with reserved(path, overwrite=overwrite) as spare:
        work = spare / real_place(path).name
        yield work
        sync_tree(work)
        put_in_place(work, path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_array(path: Path, dtype: DTypeLike, ndim: int, error: type[VivianeError]) -> NDArray[Any]:
    """Return the array of an untrusted .npy file, if it has the expected type and number of dimensions.

    Args:
        path: the file; it is mapped first, so that no memory is allocated for a size that the file does not have.
        dtype: the only type that is accepted.
        ndim: the number of dimensions.
        error: class of the error.

    Raises:
        VivianeError: of class `error`: the file cannot be read, is truncated, or holds something else.
    """
    import numpy as np  # here, so that the help of commands, which write files, does not wait for it

    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, TypeError, OSError, EOFError, OverflowError, SyntaxError, TokenError, RecursionError,
            MemoryError) as problem:  # fmt: skip
        said = f"{type(problem).__name__}: {problem}"[:200]
        raise error("not a readable .npy file", where=str(path), value=said) from problem
    if mapped.dtype != np.dtype(dtype) or mapped.ndim != ndim:
        raise error("a .npy file holds another kind of array", where=str(path), value=f"{mapped.dtype} {mapped.shape}",
                    allowed=f"{np.dtype(dtype)} of {ndim} dimensions")  # fmt: skip
    return np.array(mapped, order="C", subok=False)
