"""Locks on outputs and run folders: one process writes a place at a time, and the lock says which.

The lock of `runs/mine` is the file `runs/.mine.viviane.lock`, held through the operating system: it ends with its
process, however that ends, and a file that a killed process left does not block. It holds for the processes of one
machine, and over machines where their shared file system keeps such locks.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError

_WAIT_SECONDS: Final = 0.3  # a lock that is just being given back, or was taken for a look
_LONGEST_NAME: Final = 200  # bytes of a name, which gets some 30 more; file systems take 255
_LONGEST_NOTE: Final = 2000
_guard = threading.Lock()


@dataclass
class _Held:
    lock: Any
    thread: int
    count: int = 1


_held: dict[Path, _Held] = {}


def hidden_name(path: Path, ending: str) -> Path:
    """Return a hidden name next to a path, such as of its lock.

    Example:
        >>> hidden_name(Path("runs/mine"), "lock").as_posix()
        'runs/.mine.viviane.lock'
    """
    name = path.name
    if not name:
        raise ConfigError("an output needs a name", value=str(path), fix="give the path of a file or a folder")
    if len(name.encode()) > _LONGEST_NAME:
        name = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return path.with_name(f".{name}.viviane.{ending}")


def real_place(path: Path) -> Path:
    """Return the absolute path that an output stands at: a symbolic link is followed, so that it stays."""
    return Path(os.path.realpath(path))


@contextmanager
def locked(path: Path, *, wait_s: float = _WAIT_SECONDS) -> Iterator[None]:
    """Hold the lock of an output or run folder; the same thread may hold it several times.

    Args:
        path: the output; the folder around it exists.
        wait_s: how long to wait for a holder.

    Raises:
        ConfigError: another process or thread holds it; says which.
        OSError: the folder around it is missing or not writable.

    Example:
        >>> import tempfile
        >>> with locked(Path(tempfile.mkdtemp()) / "out"):
        ...     pass
    """
    place = real_place(path)
    _acquire(place, wait_s)
    try:
        yield
    finally:
        _release(place)


def is_held(path: Path) -> bool:
    """Say whether this process holds the lock of an output."""
    with _guard:
        return real_place(path) in _held


def _acquire(place: Path, wait_s: float) -> None:
    from filelock import FileLock, Timeout

    with _guard:
        held = _held.get(place)
        if held is not None:
            if held.thread != threading.get_ident():
                raise _busy(place, f"another thread of this process, {_note()}")
            held.count += 1
            return
        file = hidden_name(place, "lock")
        lock = FileLock(file, timeout=wait_s, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout:
            if not file.exists():  # it could not be made, which looks like a holder; this says why
                file.touch()
            raise _busy(place, _holder(place)) from None
        _held[place] = _Held(lock, threading.get_ident())
        with suppress(OSError):  # the note is for people; the lock holds without it
            _note_file(place).write_text(_note(), encoding="utf-8")


def _release(place: Path) -> None:
    with _guard:
        held = _held[place]
        held.count -= 1
        if held.count:
            return
        del _held[place]
        file = hidden_name(place, "lock")
        if sys.platform != "win32":  # removed while it is held: who waits for the removed file tries again
            file.unlink(missing_ok=True)
        held.lock.release()
        if sys.platform == "win32":
            with suppress(OSError):
                file.unlink(missing_ok=True)
                _note_file(place).unlink(missing_ok=True)


def _forget() -> None:
    """In a forked process: the locks are the parent's."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _note_file(place: Path) -> Path:
    """Return where the holder is noted: in the lock's file, but on Windows, where other processes cannot read it."""
    return hidden_name(place, "holder" if sys.platform == "win32" else "lock")


def _note() -> str:
    words = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "python"
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}: {words}"[:_LONGEST_NOTE]


def _holder(place: Path) -> str:
    with suppress(OSError):
        return _note_file(place).read_text(encoding="utf-8", errors="replace")[:_LONGEST_NOTE] or "not known"
    return "not known"


def _busy(place: Path, holder: str) -> ConfigError:
    return ConfigError(
        "another process is writing here",
        where=str(place),
        value=holder,
        fix="wait until it has ended, or choose another place",
    )
