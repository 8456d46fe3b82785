"""CRC-32C bit by bit."""

from __future__ import annotations

from typing import Final

POLYNOMIAL: Final = 0x82F63B78
"""0x1EDC6F41 with its bits in reverse order."""


def crc32c(data: bytes, value: int = 0) -> int:
    """Return the checksum of bytes that follow those of `value`."""
    state = value ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (POLYNOMIAL if state & 1 else 0)
    return state ^ 0xFFFFFFFF
