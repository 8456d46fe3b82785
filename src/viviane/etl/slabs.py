"""Staged columns in a few large pieces of memory.

Every page of new memory is cleared by the kernel when it is first touched: 100 MB of small columns are 25,000 faults.
NumPy asks for huge pages where an array is large, and the same takes a third of the time.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_SLAB_BYTES: Final = 16 << 20
_LEAST_BYTES: Final = 1 << 18  # less than this is left where it is


class Slabs(threading.local):
    """Moves tables into slabs; each thread fills one of its own. A slab is freed with the last table in it.

    Example:
        >>> table = pa.table({"x": np.arange(100_000)})
        >>> Slabs().store(table).equals(table)
        True
    """

    def __init__(self) -> None:
        self._slab: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def store(self, table: pa.Table) -> pa.Table:
        """Return a table whose plain columns are in a slab; lists, and what is small, stay where they are."""
        if table.nbytes < _LEAST_BYTES:
            return table
        columns = [self._column(column.chunk(0)) if column.num_chunks == 1 else column for column in table.columns]
        return pa.table(columns, schema=table.schema)

    def _column(self, array: Any) -> Any:
        if array.type.num_fields or pa.types.is_dictionary(array.type):
            return array
        buffers = [None if one is None else self._buffer(one) for one in array.buffers()]
        return pa.Array.from_buffers(array.type, len(array), buffers, array.null_count, array.offset)

    def _buffer(self, buffer: pa.Buffer) -> pa.Buffer:
        start = -(-self._used // 64) * 64
        if buffer.size > len(self._slab) - start:
            if buffer.size > _SLAB_BYTES // 8:
                return buffer
            self._slab, start = np.empty(_SLAB_BYTES, np.uint8), 0
        self._used = start + buffer.size
        room = self._slab[start : self._used]
        room[:] = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]
        return pa.py_buffer(room)  # type: ignore[arg-type]
