"""A bounded map from 64-bit keys to rows of bytes that readers search without a lock, beside one writer.

contract    `find` returns a row that was whole in the map at some moment of the call, and never an older one than
            an earlier call returned; keys may repeat. `insert`, `erase` and `evict` take turns.
reference   `reference.py`, a dict
cpu         `cpu.py`, Numba: a row is written into a spare place and becomes visible by one store to the index
gpu         `device_cache.py`, Triton: the same, of several tables, in the GPU's memory and in the host's behind it
"""

from viviane.ops.row_cache.cache import RowCache
from viviane.ops.row_cache.device_cache import DeviceRowCache

__all__ = ["DeviceRowCache", "RowCache"]
