"""Redis' protocol for rows of one length: requests and replies of many keys as arrays, without an object a key.

request_rows    what follows "*<n>" of HMGET (keys) and HSET (keys and rows), each element "$<length>", data
parse_rows      "$<row_bytes>" and the row, or "$-1", one after another, as the bytes come in
sealed_rows     rows, each followed by the CRC-32C of its key and itself; clear_damaged compares them
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

PARSED: Final = 0
MORE: Final = 1
OTHER: Final = 2
"""What `parse_rows` found: all rows, the beginning of some, or something else than rows of that length."""


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


def parse_rows(
    data: NDArray[np.uint8], start: int, end: int, item: int, count: int, out: NDArray[np.uint8],
    found: NDArray[np.bool_],
) -> tuple[int, int, int]:  # fmt: skip
    """Copy the rows of a reply as far as they have come.

    Args:
        data: bytes that were received, up to `end`; those before `start` were parsed.
        item: elements that were parsed before.
        count: elements of the reply.
        out, found: rows (count, row_bytes), and which there are (count,).

    Returns:
        PARSED, MORE or OTHER; where parsing ended; the number of elements parsed.
    """
    from viviane.ops.resp.cpu import parse

    place = np.array([start, item], np.int64)
    state = parse(data.ctypes.data, end, count, out.ctypes.data, out.shape[1], found.ctypes.data, place.ctypes.data)
    return int(state), int(place[0]), int(place[1])


CHECKSUM_BYTES: Final = 4


def sealed_rows(keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows with a checksum, (n, row_bytes + 4): CRC-32C of the key's 8 bytes and the row, little-endian.

    Example:
        >>> sealed = sealed_rows(np.array([1, 2]), np.zeros((2, 8), np.uint8))
        >>> found = np.ones(2, np.bool_)
        >>> clear_damaged(np.array([1, 3]), sealed, found), found.tolist()
        (1, [True, False])
    """
    from viviane.ops.resp.cpu import seal

    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
    out = np.empty((len(rows), rows.shape[1] + CHECKSUM_BYTES), np.uint8)
    seal(keys.ctypes.data, rows.ctypes.data, len(rows), rows.shape[1], out.ctypes.data)
    return out


def clear_damaged(keys: NDArray[np.int64], rows: NDArray[np.uint8], found: NDArray[np.bool_]) -> int:
    """Clear `found` for rows of `sealed_rows` that were altered or belong to another key; returns how many."""
    from viviane.ops.resp.cpu import unseal

    width = rows.shape[1] - CHECKSUM_BYTES
    return int(unseal(keys.ctypes.data, rows.ctypes.data, len(keys), width, found.ctypes.data))
