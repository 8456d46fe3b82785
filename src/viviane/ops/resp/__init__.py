"""Redis' protocol for rows of one length: requests and replies of many keys as arrays, without an object a key.

request_rows    what follows "*<n>" of HMGET (keys) and HSET (keys and rows), each element "$<length>", data
RowReplies      "$<row_bytes + 4>" and the sealed row, or "$-1", one after another, as the bytes come in
sealed_rows     rows, each followed by the CRC-32C of its key and itself
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

PARSED: Final = 0
MORE: Final = 1
OTHER: Final = 2
"""What `RowReplies.parse` found: all rows, the beginning of some, or something else than rows of that length."""


KEY_ELEMENT_BYTES: Final = 14
"""Of each key in `key_elements`."""


def key_elements(keys: NDArray[np.int64]) -> bytes:
    """Return keys as elements of a request, 8 bytes little-endian each.

    Example:
        >>> key_elements(np.array([65]))
        b'$8\\r\\nA\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\r\\n'
    """
    elements = np.empty(len(keys), np.dtype([("head", "S4"), ("key", "<i8"), ("end", "S2")]))
    elements["head"], elements["key"], elements["end"] = b"$8\r\n", keys, b"\r\n"
    return elements.tobytes()


def pair_elements(keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> bytes:
    """Return keys and rows as elements of a request, key after row after key.

    Example:
        >>> pair_elements(np.array([65]), np.full((1, 8), 66, np.uint8))[-15:]
        b'\\n$8\\r\\nBBBBBBBB\\r\\n'
    """
    width = rows.shape[1]
    length = f"${width}\r\n".encode()
    form = [("head", "S4"), ("key", "<i8"), ("end", "S2"), ("length", f"S{len(length)}"), ("row", "u1", (width,)),
            ("last", "S2")]  # fmt: skip
    elements = np.empty(len(keys), np.dtype(form))
    elements["head"], elements["key"], elements["end"] = b"$8\r\n", keys, b"\r\n"
    elements["length"], elements["row"], elements["last"] = length, rows, b"\r\n"
    return elements.tobytes()


class RowReplies:
    """Where the rows of replies go, and how many were damaged so far.

    A stored row is `sealed_rows`; one whose checksum differs, since it was altered or is another key's, is not found.

    Args:
        keys: (n,), int64, in the order of the replies.
        targets: (n,), int64: row of `out`, and place in `found`, of each.
        out: (m, row_bytes), uint8; rows may lie apart.
        found: (m,).
    """

    def __init__(
        self, keys: NDArray[np.int64], targets: NDArray[np.int64], out: NDArray[np.uint8], found: NDArray[np.bool_]
    ) -> None:
        self.keys, self.row_bytes = keys, out.shape[1]
        self._held = (targets, out, found)  # whose addresses are below
        self._place = np.zeros(3, np.int64)
        self._keys, self._targets, self._at = keys.ctypes.data, targets.ctypes.data, self._place.ctypes.data
        self._out, self._stride, self._found = out.ctypes.data, out.strides[0], found.ctypes.data

    @property
    def damaged(self) -> int:
        """Rows with another checksum."""
        return int(self._place[2])

    def parse(self, address: int, start: int, end: int, first: int, item: int, count: int) -> tuple[int, int, int]:
        """Copy the rows of one reply to where they go, as far as they have come.

        Args:
            address: of the bytes that were received, up to `end`; those before `start` were parsed.
            first: the reply's first key.
            item: elements that were parsed before.
            count: elements of the reply.

        Returns:
            PARSED, MORE or OTHER; where parsing ended; the number of elements parsed.
        """
        from viviane.ops.resp.cpu import parse

        place = self._place
        place[0], place[1] = start, item
        state = parse(
            address, end, count, self._keys + 8 * first, self._targets + 8 * first, self._out, self._stride,
            self.row_bytes, self._found, self._at,
        )  # fmt: skip
        return int(state), int(place[0]), int(place[1])


CHECKSUM_BYTES: Final = 4


def sealed_rows(keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows with a checksum, (n, row_bytes + 4): CRC-32C of the key's 8 bytes and the row, little-endian.

    Example:
        >>> sealed_rows(np.array([1, 2]), np.zeros((2, 8), np.uint8)).shape
        (2, 12)
    """
    from viviane.ops.resp.cpu import seal

    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
    out = np.empty((len(rows), rows.shape[1] + CHECKSUM_BYTES), np.uint8)
    seal(keys.ctypes.data, rows.ctypes.data, len(rows), rows.shape[1], out.ctypes.data)
    return out
