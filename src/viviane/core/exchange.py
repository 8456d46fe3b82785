"""Atomic exchange of a file or folder: if the process is killed at any moment, the old or the new one is complete.

Linux and macOS exchange two names atomically. On other systems, and on file systems without this call, the old output
is briefly renamed to `.<name>.viviane.old`; `recover` restores it if the process was killed in between.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError
from viviane.core.locks import hidden_name, is_held, locked, real_place
from viviane.core.threads import map_at_once

_EXCHANGE: Final = 2  # RENAME_EXCHANGE of Linux's renameat2 and RENAME_SWAP of macOS's renameatx_np
_HERE: Final = {"linux": -100, "darwin": -2}  # AT_FDCWD
_SYNCED_AT_ONCE: Final = 8
_CANNOT: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries, so that a rename survives a power failure."""
    if sys.platform == "win32":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Flush a file, or all files and folders of a folder, several at once: the file system writes them together."""
    map_at_once(_sync, [path, *(path.rglob("*") if path.is_dir() else ())], _SYNCED_AT_ONCE)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
    elif path.is_file():
        with path.open("rb" if sys.platform != "win32" else "r+b") as handle:
            os.fsync(handle.fileno())


@lru_cache(maxsize=1)
def _exchanging_call() -> Any:
    """Return the system's call that exchanges two names, or None if there is none."""
    name = {"linux": "renameat2", "darwin": "renameatx_np"}.get(sys.platform)
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system or the file system does not support it.

    Raises:
        OSError: one of them is missing, or the folder is not writable.
    """
    call = _exchanging_call()
    if call is None:
        return False
    here = _HERE[sys.platform]
    if call(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(other))


def is_stream(path: Path) -> bool:
    """Return whether an output is a character device or a pipe: it is written to, and never replaced.

    Raises:
        ConfigError: it is a block device or a socket.

    Example:
        >>> is_stream(Path(os.devnull)), is_stream(Path.cwd())
        (True, False)
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    for wrong, what in ((stat.S_ISBLK, "a block device"), (stat.S_ISSOCK, "a socket")):
        if wrong(mode):
            raise ConfigError("an output cannot be written there", where=str(path), value=what, fix="name a file")
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def put_in_place(new: Path, path: Path) -> None:
    """Move a finished file or folder to `path`; the previous one is moved to `new`.

    The caller holds `reserved(path)` and has flushed the new output.
    """
    path = real_place(path)
    if not path.exists():
        new.rename(path)
    elif not path.is_dir() and not new.is_dir():
        new.replace(path)
    elif not exchange(new, path):
        old = hidden_name(path, "old")
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
        sync_folder(path.parent)
        old.rename(new)
    sync_folder(path.parent)


def recover(path: Path) -> None:
    """Restore an old output that a killed process left under its hidden name, if there is one."""
    place = real_place(path)
    with suppress(ConfigError, OSError):  # the lock holder is between its two renames
        if not place.exists() and any(True for _ in _kept(place)) and not is_held(place):
            with locked(place, wait_s=0):
                _recover_locked(place)
                _remove_work(place)


def tidy(path: Path) -> None:
    """Recover an output before it is checked or written, and remove leftovers of killed processes next to it."""
    place = real_place(path)
    recover(place)
    with suppress(ConfigError, OSError):  # the lock holder is active
        # A killed process leaves its lock; one that was interrupted twice may leave its work without it.
        left = hidden_name(place, "lock").exists() or bool(_work_left(place))
        if left and not is_held(place):
            with locked(place, wait_s=0):
                _recover_locked(place)
                _remove_work(place)


def _recover_locked(place: Path) -> None:
    kept = sorted(_kept(place), key=lambda one: one.stat().st_mtime_ns)
    if kept and not place.exists():
        kept.pop().rename(place)
        sync_folder(place.parent)
    for old in kept:
        _remove(old)


def _kept(place: Path) -> Iterator[Path]:
    """Yield outputs that were renamed before they were replaced; names from before 0.2 contain a process id."""
    earlier = re.compile(rf"\.{re.escape(place.name)}\.\d+\.old")
    if not place.parent.is_dir():
        return
    if (one := hidden_name(place, "old")).exists():
        yield one
    with os.scandir(place.parent) as entries:
        yield from (Path(entry.path) for entry in entries if earlier.fullmatch(entry.name))


@contextmanager
def reserved(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Hold the lock of an output, and yield an empty folder next to it for unfinished files.

    Leftovers of killed processes are first removed or restored; the folder is removed at the end.

    Args:
        path: the output, a file or a folder; its parent folder is created.
        overwrite: False raises an error if the output exists; no other process can create it meanwhile.

    Raises:
        ConfigError: another process is writing this output, it exists, or it is a device or a pipe.
    """
    place = real_place(path)
    if is_held(place):  # also by this thread: the inner call would remove the files of the outer one
        raise ConfigError("this process is already writing this output", where=str(path), fix="choose another path")
    if is_stream(place):
        raise ConfigError(
            "this output cannot be written to a device or a pipe", where=str(path), fix="name a file or a folder"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place):
        _recover_locked(place)
        _remove_work(place)
        if place.exists() and not overwrite:
            raise ConfigError("the output exists", where=str(path), fix="choose another, or overwrite it")
        work = hidden_name(place, f"{secrets.token_hex(4)}.tmp")
        work.mkdir()
        try:
            yield work
        finally:
            try:
                _remove(work)
            except KeyboardInterrupt:  # a second Ctrl-C: the removal is completed first
                _remove(work)
                raise


def _work_left(place: Path) -> list[Path]:
    """Return the folders of unfinished files next to an output."""
    pattern = re.compile(re.escape(hidden_name(place, "").name) + r"[0-9a-f]{8}\.tmp")
    with os.scandir(place.parent) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]


def _remove_work(place: Path) -> None:
    for one in _work_left(place):
        _remove(one)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
