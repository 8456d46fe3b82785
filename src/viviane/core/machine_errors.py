"""Errors of the machine (memory, disk, permissions, limits of the process) as VivianeError."""

from __future__ import annotations

import errno
from concurrent.futures import BrokenExecutor
from typing import Final

from viviane.core.errors import DataError, MachineError, VivianeError

_FULL: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "a file would exceed the limit of the process (ulimit -f)",
}
_FIXES: Final = {
    errno.ENOSPC: "free disk space, or choose another folder",
    errno.EDQUOT: "free disk space, or choose another folder",
    errno.EFBIG: "raise the limit: ulimit -f unlimited",
    errno.EACCES: "correct the permissions, or choose another path",
    errno.EPERM: "correct the permissions, or choose another path",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
    errno.ENFILE: "the machine has too many open files: close other programs",
    errno.ENOENT: "correct the path",
    errno.ENOTDIR: "correct the path: a part of it is a file",
    errno.EISDIR: "correct the path: it is a folder",
    errno.EEXIST: "choose another path: this name is in use",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "correct the path: its links form a cycle",
}
_NO_FILES: Final = "the process cannot open more files"
_NO_THREADS: Final = "no more threads can be started"
_EXHAUSTED: Final = frozenset({*_FULL.values(), _NO_FILES, _NO_THREADS, "out of memory"})
_NO_MEMORY: Final = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "bad_alloc",
    "unable to allocate",
    "failed to map segment",
)
_NO_CACHE: Final = "no locator available"
"""Numba's text where neither the package's folder nor the user's cache takes a file."""
_NO_THREAD: Final = ("can't start new thread", "resource temporarily unavailable", "thread creation failed")


def as_own_error(error: BaseException) -> VivianeError | None:
    """Return the VivianeError for an error of the operating system or of an allocator.

    Args:
        error: the raised error.

    Returns:
        None for any other error, which is a defect of the program.

    Example:
        >>> print(as_own_error(OSError(28, "No space left on device", "/data/part-00000.parquet")))
        the disk is full
          where:   /data/part-00000.parquet
          value:   'No space left on device'
          do:      free disk space, or choose another folder
    """
    if isinstance(error, VivianeError):
        return _exhausted_cause(error) or error
    text = str(error)
    low = text.lower()
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError) and any(one in low for one in _NO_MEMORY)
    ):
        return MachineError(
            "out of memory", value=_first_line(text) or type(error).__name__,
            fix="use smaller batches, tables or fewer threads, or raise the limit of the process (ulimit -v)",
        )  # fmt: skip
    of_arrow = type(error).__module__.startswith("pyarrow")
    if (of_arrow or isinstance(error, RuntimeError)) and any(one in low for one in _NO_THREAD):
        fix = "raise the limits of the process (ulimit -u, ulimit -v)"
        return MachineError(_NO_THREADS, value=_first_line(text), fix=fix)
    if isinstance(error, OSError):
        return _of_system(error, text)
    return _of_text(error, text)


def _exhausted_cause(error: VivianeError) -> MachineError | None:
    """Return the error of the machine that another one wraps: files that cannot be opened are not damaged files."""
    cause = error.__cause__
    while cause is not None and not isinstance(error, MachineError):
        if not isinstance(cause, VivianeError):
            own = as_own_error(cause)
            if isinstance(own, MachineError) and own.fix is not None and own.what in _EXHAUSTED:
                return MachineError(own.what, where=error.where or own.where, value=own.value, fix=own.fix)
        cause = cause.__cause__
    return None


def _of_text(error: BaseException, text: str) -> VivianeError | None:
    """Return the error for a lack of files, a killed process or an impossible path."""
    low = text.lower()
    if isinstance(error, RuntimeError) and _NO_CACHE in low:
        return MachineError(
            "machine code of kernels cannot be written", value=_first_line(text),
            fix="set NUMBA_CACHE_DIR to a folder that can be written, or raise the limit: ulimit -n 65536",
        )  # fmt: skip
    if "too many open files" in low:  # safetensors and others raise their own classes with this text
        return MachineError(_NO_FILES, value=_first_line(text), fix=_FIXES[errno.EMFILE])
    if isinstance(error, BrokenExecutor):
        fix = "free memory: the system ends processes where it has none left"
        return MachineError("a process of this command was killed", value=_first_line(text), fix=fix)
    if isinstance(error, UnicodeEncodeError):
        return DataError("text that UTF-8 cannot encode", value=_first_line(text))
    if isinstance(error, ValueError) and "embedded null" in text:
        return DataError("a path must not contain a NUL character", value=_first_line(text))
    return None


def _of_system(error: OSError, text: str) -> VivianeError:
    number = error.errno if error.errno is not None else _errno_in(text)
    where = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None) or None
    fix = _FIXES.get(number) if number is not None else None
    said = error.strerror or _first_line(text) or type(error).__name__
    if number == errno.ENOMEM:
        return MachineError("out of memory", where=where, value=said, fix="raise the limit of the process (ulimit -v)")
    if number in (errno.EMFILE, errno.ENFILE):
        return MachineError(_NO_FILES, where=where, value=said, fix=fix)
    what = _FULL.get(number or 0, "a file could not be read or written" if where else "the operating system refused")
    return MachineError(what, where=where, value=said, fix=fix)


def _errno_in(text: str) -> int | None:
    """Return the errno in the messages of Arrow and others, which contain it only as text."""
    for number in (*_FULL, *_FIXES):
        if f"errno {number}]" in text.lower() or f"errno={number}" in text.lower():
            return number
    return None


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:300]
