"""Descriptions of matrices for Hopper's tensor copies (TMA), as kernels in CUDA C++ take them."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from viviane.core.errors import VivianeError

_KINDS = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_BYTES, _ALIGNED_BYTES = 128, 64
_SWIZZLE_128_BYTES, _FETCH_256_BYTES = 3, 3
_NO_INTERLEAVE, _ZEROS_OUTSIDE = 0, 0


class TensorMap(ctypes.Structure):
    """What the driver makes of a matrix: only it and the device know what the bytes mean."""

    _fields_ = (("bytes", ctypes.c_byte * _BYTES),)


def tensor_map(matrix: Tensor, rows: int, columns: int) -> TensorMap:
    """Describe a contiguous matrix of 16-bit numbers for copies of (rows, columns) tiles, swizzled by 128 bytes.

    Args:
        matrix: (M, N); N and its address in multiples of 16 bytes.
        rows: at most 256.
        columns: at most 64.

    Raises:
        VivianeError: the driver refuses the matrix.

    Example:
        >>> tensor_map(torch.ones(3, 8, device="cuda").half(), 64, 64)  # doctest: +SKIP
        <viviane.ops.cuda_parts.tensor_maps.TensorMap object at 0x7f5c8a1d5ac0>
    """
    size, width = matrix.shape
    buffer = bytearray(_BYTES + _ALIGNED_BYTES)
    start = -ctypes.addressof(ctypes.c_byte.from_buffer(buffer)) % _ALIGNED_BYTES
    found = TensorMap.from_buffer(buffer, start)
    status = _encode()(
        ctypes.addressof(found), _KINDS[matrix.dtype], 2, matrix.data_ptr(),
        (ctypes.c_uint64 * 2)(width, size), (ctypes.c_uint64 * 1)(width * matrix.element_size()),
        (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE, _SWIZZLE_128_BYTES, _FETCH_256_BYTES, _ZEROS_OUTSIDE,
    )  # fmt: skip
    if status:
        raise VivianeError(
            "cuTensorMapEncodeTiled failed", value=status, fix="compare the number with CUDA's list of errors"
        )
    return found


@cache
def _encode() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
    ]  # fmt: skip
    return function
