"""A RocksDB table that takes changes and notes about them in one write: after a crash both are there, or neither."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from viviane.core.errors import StoreError
from viviane.store.rocks import RocksTier, key_bytes
from viviane.store.row_layout import Keys, Rows

_PREFIX = "note "


class AppliedRocksTier(RocksTier):
    """Rows in RocksDB, and notes such as the number of the last delta that was applied; see `RocksTier`.

    Example:
        >>> import tempfile
        >>> from viviane.store import Column, RowLayout
        >>> from viviane.store.rocks import RocksDatabase
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
        self._check_writable()
        order = np.argsort(keys, kind="stable")  # RocksDB's sorted memory takes neighbours faster
        keys, rows, erased = keys[order], rows[order], np.ascontiguousarray(erased)
        self.layout.check_rows(keys, rows)
        batch, handle = self.database.batch(), self.database.handle(self.table)
        data, size = rows.tobytes(), self.layout.row_bytes
        for i, key in enumerate(key_bytes(keys)):
            batch.put(key, data[i * size : (i + 1) * size], handle)
        for key in key_bytes(erased):
            batch.delete(key, handle)
        for name, value in notes.items():
            batch.put(self._note_key(name), value)
        try:
            self.database.db.write(batch)
        except Exception as error:
            where = f"tier {self.name!r}, {self.database.folder}, table {self.table!r}"
            raise StoreError("RocksDB cannot write", where=where, value=str(error)[:300],
                             fix="make room on the disk; the changes are asked for again") from error  # fmt: skip

    def note(self, name: str) -> bytes | None:
        """Return a note, or None."""
        found: bytes | None = self.database.db.get(self._note_key(name))
        return found

    def _note_key(self, name: str) -> bytes:
        return f"{_PREFIX}{self.table}\0{name}".encode()
