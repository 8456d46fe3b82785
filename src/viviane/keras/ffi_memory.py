"""Memory that XLA hands to the handler of its calls: on the CPU, or on a GPU, where the tables are on the same one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.embedding.external import tensor_at

_TYPES: Final = {
    4: torch.int32, 5: torch.int64, 8: torch.uint32, 9: torch.uint64, 10: torch.float16, 11: torch.float32,
    12: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""The types of buffers, by XLA's numbers."""
_MOST_TENSORS: Final = 256
_AT_ONCE: Final = nullcontext()
_INTERFACE, _CONTEXT, _STREAM_GET = 16, 24, 80  # bytes into the frame, and into the interface
_INT32, _FLOAT32 = 4, 11  # XLA's numbers


class Memory(Protocol):
    """Where the buffers of calls are: on the CPU, or on a GPU."""

    def tensor(self, address: int, kind: int, rank: int, rows: int, columns: int) -> Tensor:
        """Return a buffer as a tensor, to be used during calls alone; XLA uses the same memory over and over.

        Args:
            address: of the buffer.
            kind: XLA's number of its type.
            rank: 0 to 2.
            rows, columns: its dimensions, as many as the rank says.
        """

    def integer(self, address: int) -> int:
        """Read an int32."""

    def real(self, address: int) -> float:
        """Read a float32."""

    def put_integer(self, address: int, value: int) -> None:
        """Write an int32."""

    def put_real(self, address: int, value: float) -> None:
        """Write a float32."""

    def work(self, frame: int) -> AbstractContextManager[Any]:
        """Return a context for the work of a call, given its frame, which orders it with XLA's."""


class HostMemory:
    """Buffers on the CPU."""

    @staticmethod
    @lru_cache(_MOST_TENSORS)
    def tensor(address: int, kind: int, rank: int, rows: int, columns: int) -> Tensor:
        """Return a buffer as a tensor."""
        return tensor_at(address, _TYPES[kind], (rows, columns)[:rank])

    def integer(self, address: int) -> int:
        """Read an int32."""
        return ctypes.c_int32.from_address(address).value

    def real(self, address: int) -> float:
        """Read a float32."""
        return ctypes.c_float.from_address(address).value

    def put_integer(self, address: int, value: int) -> None:
        """Write an int32."""
        ctypes.c_int32.from_address(address).value = value

    def put_real(self, address: int, value: float) -> None:
        """Write a float32."""
        ctypes.c_float.from_address(address).value = value

    def work(self, frame: int) -> AbstractContextManager[Any]:
        """Return a context that does nothing: work on a CPU is done when it is asked for."""
        return _AT_ONCE


class DeviceMemory:
    """Buffers on a GPU.

    XLA calls the handler when it enqueues work on its stream. Torch's kernels of the call go to the same stream, and
    run after those that compute the buffers. Tables are also read in torch's default stream, as when they are saved;
    the two streams wait for each other.

    Args:
        device: on which JAX computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = lru_cache(_MOST_TENSORS)(
            lambda address: torch.cuda.ExternalStream(address, device)  # type: ignore[no-untyped-call]
        )

    @staticmethod
    @lru_cache(_MOST_TENSORS)
    def tensor(address: int, kind: int, rank: int, rows: int, columns: int) -> Tensor:
        """Return a buffer as a tensor."""
        shape, dtype = (rows, columns)[:rank], _TYPES[kind]
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cuda")
        return torch.as_tensor(_Bytes(address, count), device="cuda").view(dtype).view(shape)

    def integer(self, address: int) -> int:
        """Read an int32; waits for the device."""
        return int(self.tensor(address, _INT32, 0, 0, 0).item())

    def real(self, address: int) -> float:
        """Read a float32; waits for the device."""
        return float(self.tensor(address, _FLOAT32, 0, 0, 0).item())

    def put_integer(self, address: int, value: int) -> None:
        """Write an int32."""
        self.tensor(address, _INT32, 0, 0, 0).fill_(value)

    def put_real(self, address: int, value: float) -> None:
        """Write a float32."""
        self.tensor(address, _FLOAT32, 0, 0, 0).fill_(value)

    @contextmanager
    def work(self, frame: int) -> Iterator[None]:
        """Return a context for the work of a call in XLA's stream.

        Work given to torch's default stream before comes first; what is given to it later waits for the call.
        """
        with torch.cuda.device(self._device):
            own, stream = torch.cuda.default_stream(), self._stream(_stream_address(frame))
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                yield
            own.wait_stream(stream)


class _Bytes:
    """Memory of a GPU that torch takes as it is."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


class _StreamArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


_GetStream: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def _stream_address(frame: int) -> int:
    """Ask XLA for the stream of a call: the function for it is the eleventh word of the interface."""
    interface = ctypes.c_void_p.from_address(frame + _INTERFACE).value
    assert interface is not None
    get = _GetStream(ctypes.c_int64.from_address(interface + _STREAM_GET).value)
    context = ctypes.c_void_p.from_address(frame + _CONTEXT).value
    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, context, None)
    if get(ctypes.addressof(arguments)):
        raise ConfigError("XLA gives no stream of the GPU", fix="install the jax that viviane[jax] allows")
    return arguments.stream or 0
