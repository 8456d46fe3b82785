"""RocksDB folders that several versions of models share: each is opened once in a process."""

from __future__ import annotations

import os
import threading
from typing import Final

from viviane.core.locations import local_path
from viviane.store.rocks_database import RocksDatabase

_lock: Final = threading.Lock()
_open: dict[str, tuple[RocksDatabase, int]] = {}


def take_database(folder: str, cache_bytes: int) -> RocksDatabase:
    """Open a folder, or return the database that is open there; `leave_database` closes it after its last user.

    Raises:
        ConfigError: the folder is a URL.
        StoreError: another process has it open, or it is damaged.
    """
    place = _place(folder)
    with _lock:
        database, users = _open.get(place, (None, 0))
        if database is None:
            database = RocksDatabase(place, cache_bytes=cache_bytes)
        _open[place] = (database, users + 1)
        return database


def leave_database(folder: str) -> None:
    """Close a folder if it has no other user."""
    place = _place(folder)
    with _lock:
        database, users = _open.pop(place)
        if users > 1:
            _open[place] = (database, users - 1)
        else:
            database.close()


def _place(folder: str) -> str:
    return os.path.realpath(local_path(folder))
