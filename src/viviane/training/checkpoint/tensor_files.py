"""Files of named tensors in the safetensors format, without pickle, written chunk by chunk from the tensors' memory."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import CheckpointError
from viviane.ops.hash_table.reserve import NO_RESERVE
from viviane.training.checkpoint.manifest import FileEntry

PIECE_BYTES: Final = 4 << 20
_HEADER_BLOCK: Final = 8  # alignment of the data, in bytes
_TYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TYPES_BY_NAME: Final = {name: dtype for dtype, name in _TYPES.items()}


class Source(Protocol):
    """A tensor to write: shape and type now, bytes on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order; each piece is valid until the next is requested."""


class UnchangedTensor:
    """A tensor that does not change until it is written; a contiguous CPU tensor is not copied.

    Example:
        >>> sum(len(piece) for piece in UnchangedTensor(torch.zeros(3, 2)).pieces())
        24
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order."""
        flat = self._tensor.contiguous().view(-1)
        step = PIECE_BYTES // flat.element_size()
        for start in range(0, len(flat), step):
            yield flat[start : start + step].cpu().view(torch.uint8).numpy()


def unchanged_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """Return sources of tensors that do not change until they are written."""
    return {name: UnchangedTensor(tensor) for name, tensor in tensors.items()}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, memory-mapped, so that they are read when used.

    The file may be larger than memory. Changes of a tensor stay in memory.

    Raises:
        CheckpointError: the file cannot be read, or is not one of tensors of types that are written here.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as handle:  # it checks that sizes and places are those of the file
            slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
            described = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
        memory = _map_privately(file)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise CheckpointError("not a readable safetensors file", where=str(file), value=str(error)) from error
    start, found = _HEADER_BLOCK + int.from_bytes(memory[:_HEADER_BLOCK], "little"), {}
    for name, (kind, shape) in described.items():
        if kind not in _TYPES_BY_NAME:
            raise CheckpointError("a tensor has a type that is not supported", where=f"{file}, {name}", value=kind,
                                  allowed=", ".join(sorted(_TYPES_BY_NAME)))  # fmt: skip
        try:
            found[name] = _tensor_at(memory, start, _TYPES_BY_NAME[kind], shape)
        except RuntimeError as error:  # no numbers, in a shape whose strides overflow
            raise CheckpointError("a tensor has an impossible shape", where=f"{file}, {name}", value=shape) from error
        start += found[name].nbytes
    return found


def _map_privately(file: Path) -> mmap.mmap:
    """Return the bytes of a file, mapped so that a changed page is copied.

    Linux reserves memory for a writable private mapping, and refuses one that is larger than memory. NO_RESERVE turns
    the reservation off: only pages that are changed take memory.
    """
    with file.open("rb") as handle:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        return mmap.mmap(handle.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _tensor_at(memory: mmap.mmap, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor over mapped bytes, with a storage of its own: torch's generators ignore a storage's offset."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize == 0:
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
    return data.clone().view(dtype).view(shape)


def tensors_of_bytes(data: bytes, where: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file in memory.

    Raises:
        CheckpointError: the data are not a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError("not a readable safetensors file", where=where, value=str(error)[:200]) from error
    return found


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write tensors to a safetensors file, flush it to disk, and return its size and checksum."""
    return write_sources(file, unchanged_tensors(tensors))


def write_sources(file: Path, sources: Mapping[str, Source]) -> FileEntry:
    """Write tensors to a safetensors file directly from their memory, and flush it to disk.

    The format: the length of the header in 8 bytes, little-endian; the header, JSON with type, shape and offsets of
    each tensor; the tensors' bytes, widest types first.
    """
    file.parent.mkdir(exist_ok=True)  # no parents: if the folder of the checkpoint was removed, fail
    order = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))
    header, stop = {}, 0
    for name in order:
        one, start = sources[name], stop
        stop += math.prod(one.shape) * one.dtype.itemsize
        if one.dtype not in _TYPES:
            raise CheckpointError("the file format does not support this type", where=f"{file}, {name}",
                                  value=one.dtype, fix="keep it in float32 or int64")  # fmt: skip
        header[name] = {"dtype": _TYPES[one.dtype], "shape": list(one.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_BLOCK)
    seal, size = hashlib.sha256(), 0
    with file.open("wb") as handle:
        for part in (len(text).to_bytes(8, "little"), text):
            handle.write(part)
            seal.update(part)
            size += len(part)
        for name in order:
            for piece in sources[name].pieces():
                data = memoryview(piece.reshape(-1))  # type: ignore[arg-type]
                handle.write(data)
                seal.update(data)
                size += len(data)
        handle.flush()
        os.fsync(handle.fileno())
    return FileEntry(bytes=size, sha256=seal.hexdigest())
