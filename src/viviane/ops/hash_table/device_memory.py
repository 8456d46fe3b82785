"""Addresses on a GPU of which only the used pages take memory, in the GPU or in the host: the driver's virtual memory.

The calls go to CUDA's driver by its C interface, which every machine with a GPU has: cuMemAddressReserve, cuMemCreate,
cuMemMap, cuMemSetAccess (CUDA driver API, virtual memory management). Pages have 2 MiB, and come in runs: growth maps
new ones behind the old, so that no row moves and none is copied.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from viviane.core.errors import VivianeError

_ON_DEVICE: Final = 1
_ON_HOST: Final = 3  # a NUMA node of the host
_PINNED: Final = 1
_READ_WRITE: Final = 3
_OUT_OF_MEMORY: Final = 2
_WHOLE: Final = "the GPU's memory is used up"


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _call(name: str, *arguments: Any) -> int:
    return int(getattr(_driver(), name)(*arguments))


def _must(name: str, *arguments: Any) -> None:
    status = _call(name, *arguments)
    if status:
        raise VivianeError(f"the GPU's driver refuses {name}", value=f"error {status}")


class DeviceRange:
    """A range of addresses that kernels on one GPU use; it holds its pages until the last tensor over it is gone.

    Args:
        num_bytes: its size; rounded up to whole pages.
        device: the GPU.
        on_device: how many of the first bytes lie in the GPU's memory, the others in the host's; None: all.
    """

    def __init__(self, num_bytes: int, device: torch.device, on_device: int | None = None) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.zeros(1, device=self._device)  # makes the GPU's context, which the driver's calls need
        with torch.cuda.device(self._device):
            self._page = self._page_size()
            # The first page is never allocated: it tells torch that the whole range is the GPU's.
            self._pages = 1 + -(-num_bytes // self._page)
            self._on_device = self._pages if on_device is None else 1 + -(-on_device // self._page)
            start = ctypes.c_uint64()
            _must("cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(self._pages * self._page),
                  ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))  # fmt: skip
        self._start = start.value
        self._runs: list[tuple[int, int, int]] = []
        self._mapped: set[int] = set()
        self._map(0, 1)
        self.__cuda_array_interface__ = {
            "shape": (self._pages * self._page,), "typestr": "|u1", "data": (self._start, False), "version": 3,
            "strides": None,
        }  # fmt: skip

    def tensor(self) -> Tensor:
        """Return the range as bytes, (B,); it keeps this object alive."""
        return torch.as_tensor(self, device=self._device)[self._page :]

    def commit(self, first: int, last: int) -> None:
        """Give the bytes first <= i < last memory."""
        page, end = 1 + first // self._page, 1 + -(-last // self._page)
        while page < end:
            if page in self._mapped:
                page += 1
                continue
            stop = page + 1
            edge = end if page >= self._on_device else min(end, self._on_device)
            while stop < edge and stop not in self._mapped:
                stop += 1
            self._map(page, stop)
            page = stop

    def _properties(self, kind: int) -> _Properties:
        return _Properties(_PINNED, 0, _Location(kind, self._device.index if kind == _ON_DEVICE else 0))

    def _page_size(self) -> int:
        size = ctypes.c_size_t()
        _must("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties(_ON_DEVICE)), 0)
        return size.value

    def _map(self, first: int, last: int) -> None:
        """Map pages first <= i < last, all of one kind."""
        kind = _ON_DEVICE if first < self._on_device else _ON_HOST
        size, address = ctypes.c_size_t((last - first) * self._page), ctypes.c_uint64(self._start + first * self._page)
        with torch.cuda.device(self._device):
            handle = self._create(size, kind)
            access = _Access(_Location(_ON_DEVICE, self._device.index), _READ_WRITE)
            _must("cuMemMap", address, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0))
            self._runs.append((first, last, handle))
            self._mapped.update(range(first, last))
            _must("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _create(self, size: ctypes.c_size_t, kind: int) -> int:
        handle = ctypes.c_uint64()
        arguments = ctypes.byref(handle), size, ctypes.byref(self._properties(kind)), ctypes.c_uint64(0)
        status = _call("cuMemCreate", *arguments)
        if status == _OUT_OF_MEMORY and kind == _ON_DEVICE:
            torch.cuda.empty_cache()  # torch holds on to memory that it does not use
            status = _call("cuMemCreate", *arguments)
        if status == _OUT_OF_MEMORY and kind == _ON_DEVICE:
            raise VivianeError(
                _WHOLE, value=f"{size.value:,} bytes more", fix="set a smaller max_capacity, or memory='split'"
            )
        if status:
            raise VivianeError(
                "the GPU's driver gives no memory"
                if kind == _ON_DEVICE
                else "this GPU cannot use the host's memory so",
                value=f"error {status}",
                fix="use memory='device'",
            )
        return handle.value

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_runs"):
            return  # the process gives everything back
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for first, last, handle in self._runs:
                address = ctypes.c_uint64(self._start + first * self._page)
                _call("cuMemUnmap", address, ctypes.c_size_t((last - first) * self._page))
                _call("cuMemRelease", ctypes.c_uint64(handle))
            _call("cuMemAddressFree", ctypes.c_uint64(self._start), ctypes.c_size_t(self._pages * self._page))
