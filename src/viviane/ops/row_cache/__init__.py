"""A bounded map from 64-bit keys to rows of bytes that readers search without a lock, beside one writer.

contract    `find` returns a row that was whole in the map at some moment of the call, and never an older one than
            an earlier call returned; keys may repeat. `insert`, `erase` and `evict` take turns.
reference   `reference.py`, a dict
cpu         `cpu.py`, Numba: a row is written into a spare place and becomes visible by one store to the index
"""

from viviane.ops.row_cache.cache import RowCache

__all__ = ["RowCache"]
