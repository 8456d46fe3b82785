"""CRC-32C (Castagnoli), the checksum of deltas and of what stores keep in files."""

from __future__ import annotations

from typing import Any

import numpy as np


def crc32c(data: Any, value: int = 0) -> int:
    """Return the CRC-32C of bytes: polynomial 0x1EDC6F41, reflected, as in iSCSI, RFC 3720.

    Args:
        data: bytes, a memoryview, or a C-contiguous array.
        value: the checksum of the bytes before, so that parts can be summed one after another.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
        >>> crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
        True
    """
    from viviane.ops.crc32c.cpu import update

    part = memoryview(data).cast("B") if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    found = np.frombuffer(part, np.uint8)
    return int(update(found.ctypes.data, len(found), value)) if len(found) else value
