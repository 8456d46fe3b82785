"""A RocksDB table that takes changes and notes about them in one write: after a crash both are there, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from viviane.store.rocks import RocksTier
from viviane.store.row_layout import Keys, Rows

_PREFIX = "note "


class AppliedRocksTier(RocksTier):
    """Rows in RocksDB, and notes such as the number of the last delta that was applied; see `RocksTier`.

    Example:
        >>> import tempfile
        >>> from viviane.store import Column, RowLayout
        >>> from viviane.store.rocks_database import RocksDatabase
        >>> database = RocksDatabase(tempfile.mkdtemp() + "/db")
        >>> tier = AppliedRocksTier(database, "user", RowLayout([Column("weight", "float32", 2)]))
        >>> tier.apply(np.array([3]), np.ones((1, 8), np.uint8), np.array([4]), {"applied": b"17"})
        >>> tier.note("applied"), tier.num_rows()
        (b'17', 1)
        >>> tier.close(); database.close()
    """

    def apply(self, keys: Keys, rows: Rows, erased: Keys, notes: Mapping[str, bytes]) -> None:
        """Insert or replace rows, remove keys and write notes, all or none.

        Raises:
            StoreError: the disk is full or not writable; nothing was changed then.
        """
        self._check_open()
        order = np.argsort(keys, kind="stable")  # RocksDB's sorted memory takes neighbours faster
        keys, rows, erased = keys[order], rows[order], np.ascontiguousarray(erased)
        self.layout.check_rows(keys, rows)

        def fill(batch: Any, handle: Any) -> None:
            self._fill(batch, handle, keys, rows)
            self._remove(batch, handle, erased)
            for name, value in notes.items():
                batch.put(self._note_key(name), value)

        self.database.write(self._where, self.table, fill)

    def note(self, name: str) -> bytes | None:
        """Return a note, or None."""
        return self.database.get(self._note_key(name))

    def _note_key(self, name: str) -> bytes:
        return f"{_PREFIX}{self.table}\0{name}".encode()
