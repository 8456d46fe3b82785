"""Locks on outputs and run folders: only one process at a time writes to a path, and the lock names it.

The lock of `runs/mine` is an operating system lock on the file `runs/.mine.viviane.lock`: it ends with its process,
however that ends, and a leftover file of a killed process does not block. It works between the processes of one
machine, and across machines if their shared file system supports such locks.
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

_WAIT_SECONDS: Final = 0.3  # a lock that is being released, or is held only for a check
_LONGEST_NAME: Final = 200  # bytes of a name, to which about 30 are added; file systems allow 255
_LONGEST_NOTE: Final = 2000
_guard = threading.Lock()


@dataclass
class _Held:
    lock: Any
    thread: int
    count: int = 1


_held: dict[Path, _Held] = {}


def hidden_name(path: Path, ending: str) -> Path:
    """Return a hidden name next to a path, such as that of its lock.

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
    """Return the absolute path of an output: a symbolic link is resolved, so that it is kept."""
    return Path(os.path.realpath(path))


@contextmanager
def locked(path: Path, *, wait_s: float = _WAIT_SECONDS, once: bool = False) -> Iterator[None]:
    """Hold the lock of an output or run folder; the same thread may hold it several times, unless `once`.

    Args:
        path: the output; its parent folder exists.
        wait_s: seconds to wait for another holder.
        once: refuse it also where this thread holds it.

    Raises:
        ConfigError: another process or thread holds it; names it.
        OSError: its parent folder is missing or not writable.

    Example:
        >>> import tempfile
        >>> with locked(Path(tempfile.mkdtemp()) / "out"):
        ...     pass
    """
    place = real_place(path)
    _acquire(place, wait_s, once)
    try:
        yield
    finally:
        _release(place)


def is_held(path: Path) -> bool:
    """Return whether this process holds the lock of an output."""
    with _guard:
        return real_place(path) in _held


def _acquire(place: Path, wait_s: float, once: bool) -> None:
    from filelock import FileLock, Timeout

    with _guard:
        held = _held.get(place)
        if held is not None:
            if once or held.thread != threading.get_ident():
                who = "this thread" if held.thread == threading.get_ident() else "another thread of this process"
                raise _busy(place, f"{who}, {_note()}")
            held.count += 1
            return
        file = hidden_name(place, "lock")
        lock = FileLock(file, timeout=wait_s, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout:
            if not file.exists():  # it could not be created, which looks like a held lock; this raises the cause
                file.touch()
            raise _busy(place, _holder(place)) from None
        _held[place] = _Held(lock, threading.get_ident())
        with suppress(OSError):  # the note is informative only; the lock works without it
            _note_file(place).write_text(_note(), encoding="utf-8")


def _release(place: Path) -> None:
    with _guard:
        held = _held[place]
        held.count -= 1
        if held.count:
            return
        del _held[place]
        file = hidden_name(place, "lock")
        if sys.platform != "win32":  # removed while held: a process that waits for the removed file retries
            file.unlink(missing_ok=True)
        held.lock.release()
        if sys.platform == "win32":
            with suppress(OSError):
                file.unlink(missing_ok=True)
                _note_file(place).unlink(missing_ok=True)


def _forget() -> None:
    """Called in a forked process: the locks belong to the parent."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _note_file(place: Path) -> Path:
    """Return the file that names the holder: the lock file, except on Windows, where others cannot read it."""
    return hidden_name(place, "holder" if sys.platform == "win32" else "lock")


def _note() -> str:
    words = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "python"
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}: {words}"[:_LONGEST_NOTE]


def _holder(place: Path) -> str:
    with suppress(OSError):
        return _note_file(place).read_text(encoding="utf-8", errors="replace")[:_LONGEST_NOTE] or "unknown"
    return "unknown"


def _busy(place: Path, holder: str) -> ConfigError:
    return ConfigError(
        "another process is writing here",
        where=str(place),
        value=holder,
        fix="wait until it has ended, or choose another path",
    )


class ThreadLock:
    """A lock of threads that can be pickled: a copy of its owner has a lock of its own.

    Example:
        >>> with ThreadLock():
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return ThreadLock, ()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ModelLock:
    """Lets one thread at a time train or evaluate a model: others wait for an evaluation, and are refused in training.

    Compiled kernels and graphs work on weights, optimizer state and scratch memory without Python's lock, and an
    evaluation changes modes and weights for a while. The thread that holds the lock may take it again. A copy of the
    model has a lock of its own.

    Example:
        >>> lock = ModelLock()
        >>> with lock, lock.evaluation():
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_trainings = 0

    def __reduce__(self) -> Any:
        return ModelLock, ()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):  # in each step
            self._take("train a model from one thread at a time, or a copy of it in each: copy.deepcopy(model)")
        self._num_trainings += 1

    def __exit__(self, *_: object) -> None:
        self._num_trainings -= 1
        self._lock.release()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Keep other threads out for a block.

        Raises:
            ConfigError: another thread trains the model.
        """
        self._take("ask a copy, copy.deepcopy(model), or a saved model, by viviane.InferenceSession")
        try:
            yield
        finally:
            self._lock.release()

    def _take(self, fix: str) -> None:
        while not self._lock.acquire(timeout=0.05):
            if self._num_trainings:
                value = threading.current_thread().name
                raise ConfigError("another thread trains this model", value=value, fix=fix)
