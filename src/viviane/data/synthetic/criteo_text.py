"""Chunks as text in the layout of the Criteo logs.

A line is  label \\t 13 integers \\t 26 categories of 8 hexadecimal digits,  missing values empty.
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from viviane.core.seeds import derive_seed
from viviane.data.synthetic.planted import Chunk
from viviane.schema import RESERVED

_DIGITS: Final = np.array([f"{byte:02x}".encode() for byte in range(256)], "S2").view(np.uint16)
_OPTIONS: Final = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none", batch_size=4096)


def chunk_text(chunk: Chunk, seed: int, compress: bool) -> bytes:
    """Return a chunk as lines of text; compressed, as one gzip member (members may follow each other)."""
    columns: list[Any] = [pa.array(chunk.labels)]
    for count in chunk.counts:
        columns.append(pa.Array.from_buffers(pa.int32(), len(count), [_valid(count >= 0), _buffer(count)]))
    offsets = _buffer(np.arange(len(chunk.labels) + 1, dtype=np.int32) * 8)
    for number, ids in enumerate(chunk.ids):
        digits = _buffer(_hex(ids, derive_seed(seed, "hex", number)))
        valid = _valid(ids != RESERVED.missing)
        columns.append(pa.Array.from_buffers(pa.string(), len(ids), [valid, offsets, digits]))
    table = pa.table(columns, names=[str(i) for i in range(len(columns))])
    text = io.BytesIO()
    pyarrow.csv.write_csv(table, text, _OPTIONS)
    return gzip.compress(text.getbuffer(), zlib.Z_BEST_SPEED, mtime=0) if compress else text.getvalue()


def _valid(mask: NDArray[np.bool_]) -> Any:
    return _buffer(np.packbits(mask, bitorder="little"))


def _buffer(array: Any) -> Any:
    return pa.py_buffer(array)


def _hex(ids: NDArray[np.int32], salt: int) -> NDArray[np.uint16]:
    """Return 8 hexadecimal digits per id: a bijection of 32 bits, so distinct ids stay distinct."""
    mixed = ids.astype(np.uint32)
    mixed += np.uint32(salt & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return np.take(_DIGITS, mixed.byteswap().view(np.uint8))
