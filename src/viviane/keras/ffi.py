"""The handler that XLA calls from compiled code: Numba reads the call, Python serves it. No compiler is needed.

XLA's C interface for foreign functions is described in `xla/ffi/api/c_api.h` of the OpenXLA project; what stands where
in its structures is checked by version when the handler is registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.core.optional import require
from viviane.embedding.external import ExternalLookups, checked_rate
from viviane.embedding.whole_keys import keys_of_32_bits, whole_keys
from viviane.keras.ffi_memory import DeviceMemory, HostMemory, Memory

READ: Final = 0
BEGIN: Final = 1
END: Final = 2
REFUSE: Final = 3
CHECK: Final = 4
"""What a call asks for: a lookup, one in training, the gradient of one, the error of one without gradient, or keys."""

WIDE: Final = (
    "call jax.config.update('jax_enable_x64', True) first, or make the keys an input of the model and train with "
    "viviane.keras.fit(model, data), which reads them before JAX does"
)
"""What helps against keys of 64 bits in JAX's 32."""

_KINDS: Final = 5
_ARGUMENT_BYTES: Final = 40  # of XLA_FFI_Args and XLA_FFI_Rets
_WORDS: Final = 64
_BUFFER: Final = 5  # words of a buffer in the list: address, type, rank, the first two dimensions
_EXTENSION_METADATA: Final = 1
_Words = ctypes.c_int64 * _WORDS
_FAILED: Final = 13  # XLA_FFI_Error_Code_INTERNAL

_served: WeakValueDictionary[int, ExternalLookups] = WeakValueDictionary()
_places: dict[tuple[str, tuple[int, ...]], int] = {}


def call_number(kind: int, number: int) -> int:
    """Return the one attribute of a call: which tables, and what for.

    Example:
        >>> divmod(call_number(END, 5), _KINDS)
        (5, 2)
    """
    return number * _KINDS + kind


def register(lookups: ExternalLookups) -> int:
    """Return the number under which compiled code finds the tables, as long as they live."""
    _register_handler()
    _served[lookups.number] = lookups
    return lookups.number


def lookups_of(number: int) -> ExternalLookups:
    """Return the tables of a number."""
    return _served[number]


def place_number(where: str, shape: Sequence[int]) -> int:
    """Return the number under which `CHECK` finds what keys are called in errors, and their shape."""
    _register_handler()
    return _places.setdefault((where, tuple(shape)), len(_places))


def _check(tensors: Sequence[Tensor], number: int) -> None:
    keys, out = tensors
    where, shape = list(_places)[number]
    found = whole_keys(keys, where, shape)
    out.copy_(found if out.dtype == torch.int64 else keys_of_32_bits(found, where, WIDE, shape))


# The call in Python ------------------------------------------------------------------------------------------


def _serve(memory: Memory, frame: int, address: int) -> int:
    """Serve a call; returns 0, or XLA's error."""
    try:
        with memory.work(frame):
            _answer(memory, address)
        return 0
    except BaseException as error:
        return _error(frame, f"{type(error).__name__}: {error}")


def _answer(memory: Memory, address: int) -> None:
    words = _Words.from_address(address)
    num_inputs = words[1]
    if num_inputs < 0:
        raise ConfigError("XLA lays calls out in another way", fix="install the jax that viviane[jax] allows")
    number, kind = divmod(words[0], _KINDS)
    listed = words[3 : 3 + (num_inputs + words[2]) * _BUFFER]
    if kind == END:
        _end(memory, lookups_of(number), listed)
        return
    tensors = [memory.tensor(*listed[i : i + _BUFFER]) for i in range(0, len(listed), _BUFFER)]
    if kind == CHECK:
        _check(tensors, number)
        return
    lookups = lookups_of(number)
    assert lookups.columns is not None
    inputs = tensors[1:num_inputs]  # the first is the anchor
    if kind == BEGIN:
        inputs = [one.clone() for one in inputs]  # the update reads them, when XLA has used the memory again
    if kind == REFUSE:
        raise lookups.undifferentiated()
    batch = lookups.columns.batch(*inputs)
    out = tensors[num_inputs]
    if kind == READ:
        out.copy_(lookups.read(batch))
        return
    found, flat = lookups.begin(batch)
    out.copy_(flat)
    memory.put_integer(listed[(num_inputs + 1) * _BUFFER], found)


def _end(memory: Memory, lookups: ExternalLookups, listed: Sequence[int]) -> None:
    """Bring the gradient of a lookup: given its number, the gradient, the rate and the loss scale, return a zero."""
    waiting, rate, token, zero = listed[0], *listed[2 * _BUFFER :: _BUFFER]
    scale = memory.real(token)
    own = checked_rate(memory.real(rate), lookups.where)
    gradient = memory.tensor(*listed[_BUFFER : 2 * _BUFFER])
    lookups.end(memory.integer(waiting), gradient, own, 1.0 / scale if scale else 1.0)
    memory.put_real(zero, 0.0)


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


def _error(frame: int, message: str) -> int:
    """Make XLA's error: the function for it is the seventh word of the interface that the frame points to."""
    interface = ctypes.c_void_p.from_address(frame + 16).value
    assert interface is not None
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.c_int64.from_address(interface + 48).value)
    arguments = _ErrorArguments(32, None, message.encode(), _FAILED)
    return int(create(ctypes.addressof(arguments)) or 0)


# The handler -------------------------------------------------------------------------------------------------


def table_device() -> str:
    """Return the device on which JAX computes, as torch names it: the tables are there.

    Raises:
        ConfigError: JAX computes on something else than a CPU or an NVIDIA GPU, or on a GPU that torch does not see.
    """
    jax = require("jax", extra="jax", purpose="Keras on JAX")
    with jax.ensure_compile_time_eval():  # the default may be one of several
        [device] = jax.numpy.zeros(()).devices()
    if device.platform == "cpu":
        return "cpu"
    cpu = "set JAX_PLATFORMS=cpu before JAX is imported"
    if device.platform != "gpu" or "rocm" in str(device.client.platform_version).lower():
        raise ConfigError("no tables on this platform of JAX", value=device.platform, allowed="cpu, cuda", fix=cpu)
    if not torch.cuda.is_available():
        raise ConfigError(
            "JAX computes on a GPU, and torch, which holds the tables, sees none", value=f"torch {torch.__version__}",
            fix=f"install torch's build for CUDA, or {cpu}",
        )  # fmt: skip
    return f"cuda:{device.local_hardware_id}"


@cache
def _register_handler() -> Any:
    """Compile the handler and make it known to JAX, once."""
    jax = require("jax", extra="jax", purpose="Keras on JAX")
    device = torch.device(table_device())
    memory: Memory = HostMemory() if device.type == "cpu" else DeviceMemory(device)
    platform = "cpu" if device.type == "cpu" else "CUDA"
    serve = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(partial(_serve, memory))
    handler = _compile(serve)
    jax.ffi.register_ffi_target(
        "viviane_tables", jax.ffi.pycapsule(ctypes.c_void_p(handler.address)), platform=platform
    )
    return serve, handler  # kept for the life of the process


def _compile(serve: Callable[[int, int], int]) -> Any:
    """Compile the handler: XLA_FFI_Error* handler(XLA_FFI_CallFrame*), pointers as whole numbers.

    In the frame, words of 8 bytes: 0 its size, 1 extensions, 2 the interface, 3 the context, 4 the stage, 5-9 the
    arguments, 10-14 the results, 15-20 the attributes. Arguments are: size, extensions, count, types, pointers.
    """
    import numpy as np
    from numba import carray, cfunc, int64, types
    from numba.extending import intrinsic

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        """Return the memory at an address as a pointer to whole numbers."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(types.CPointer(int64)))

        return types.CPointer(int64)(int64), generate

    metadata, words, width, argument_bytes = _EXTENSION_METADATA, _WORDS, _BUFFER, _ARGUMENT_BYTES

    @cfunc(int64(int64))
    def handler(frame):  # type: ignore[no-untyped-def]
        call = carray(at(frame), 21)
        if call[1] != 0:
            extension = carray(at(call[1]), 4)
            if (extension[1] & 0xFFFFFFFF) == metadata:  # asked for its version: that of the caller
                about, interface = carray(at(extension[3]), 5), carray(at(call[2]), 5)
                about[3] = interface[4]
                about[4] = 0
                return 0
        listed = np.zeros(words, np.int64)
        if call[5] != argument_bytes or call[10] != argument_bytes:
            listed[1] = -1
            return serve(frame, listed.ctypes.data)
        attributes = carray(at(call[20]), 1)
        scalar = carray(at(attributes[0]), 2)
        listed[0] = carray(at(scalar[1]), 1)[0]
        listed[1], listed[2] = call[7], call[12]
        place = 3
        for part in range(2):
            count, pointers = call[7 + 5 * part], carray(at(call[9 + 5 * part]), 32)
            for i in range(count):
                if place + width > words:
                    break
                buffer = carray(at(pointers[i]), 6)
                listed[place] = buffer[3]
                listed[place + 1] = buffer[2] & 0xFFFFFFFF
                rank = buffer[4]
                listed[place + 2] = rank
                dims = carray(at(buffer[5]), 2)
                for d in range(min(rank, 2)):
                    listed[place + 3 + d] = dims[d]
                place += width
        return serve(frame, listed.ctypes.data)

    return handler
