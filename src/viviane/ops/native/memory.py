"""Raw memory inside kernels: typed pointers from addresses, prefetch, atomic counters, room on the stack.

A kernel gets addresses as int64. `float32_at` and its like turn one into a pointer that is indexed like an array,
without checks.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int32, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE_BYTES = 64


def primitive(function: Callable[..., Any]) -> Any:
    """Make an operation of kernels from a function that writes its LLVM code."""
    return intrinsic(function)


def _pointer_to(element: types.Type) -> Callable[..., Any]:
    def at(typing: Any, address: types.Type) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), build

    return at


# A pointer to numbers at an address.
float32_at: Any = intrinsic(_pointer_to(types.float32))
float64_at: Any = intrinsic(_pointer_to(types.float64))
uint8_at: Any = intrinsic(_pointer_to(types.uint8))
uint16_at: Any = intrinsic(_pointer_to(types.uint16))
int32_at: Any = intrinsic(_pointer_to(types.int32))
int64_at: Any = intrinsic(_pointer_to(types.int64))


@njit(forceinline=True)
def read_whole(address: int, i: int, size: int) -> int:
    """Return whole number i of an array of int32 or int64 (`size` bytes each)."""
    return int64(int32_at(address)[i]) if size == 4 else int64_at(address)[i]


@njit(forceinline=True)
def write_whole(address: int, i: int, value: int, size: int) -> None:
    """Put a whole number into an array of int32 or int64 (`size` bytes each)."""
    if size == 4:
        int32_at(address)[i] = int32(value)
    else:
        int64_at(address)[i] = value


def _prefetch(locality: int) -> Callable[..., Any]:
    def ask(typing: Any, address: types.Type) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = ir.IntType(8).as_pointer()
            word = ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0"
            )
            # Operands: for reading, how near, data.
            builder.call(function, [builder.inttoptr(args[0], byte), word(0), word(locality), word(1)])
            return context.get_dummy_value()

        return types.void(types.int64), build

    return ask


# Ask for the cache line at an address; any address is allowed. The second one leaves the first cache alone, which has
# room for fewer lines in progress: for rows of many lines.
prefetch: Any = intrinsic(_prefetch(3))
prefetch_second: Any = intrinsic(_prefetch(2))


def _move(num_bytes: int, streamed: bool = False) -> Callable[..., Any]:
    def move(typing: Any, target: types.Type, source: types.Type) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            piece = ir.VectorType(ir.IntType(8), num_bytes)
            to, start = (builder.inttoptr(one, piece.as_pointer()) for one in args)
            stored = builder.store(builder.load(start, align=1), to, align=num_bytes if streamed else 1)
            if streamed:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), build

    return move


_move_64 = intrinsic(_move(64))
_stream_64 = intrinsic(_move(64, streamed=True))
_move_32 = intrinsic(_move(32))
_move_16 = intrinsic(_move(16))
_move_8 = intrinsic(_move(8))
_move_4 = intrinsic(_move(4))
_move_2 = intrinsic(_move(2))


@njit(forceinline=True)
def copy_bytes(target: int, source: int, size: int) -> None:
    """Copy an even, constant number of bytes between two addresses by wide moves."""
    whole = size // 64 * 64
    for byte in range(0, whole, 64):
        _move_64(target + byte, source + byte)
    at = whole
    if size - at >= 32:
        _move_32(target + at, source + at)
        at += 32
    if size - at >= 16:
        _move_16(target + at, source + at)
        at += 16
    if size - at >= 8:
        _move_8(target + at, source + at)
        at += 8
    if size - at >= 4:
        _move_4(target + at, source + at)
        at += 4
    if size - at >= 2:
        _move_2(target + at, source + at)


@njit(forceinline=True)
def stream_lines(target: int, source: int, size: int) -> None:
    """Copy whole cache lines past the caches, into lines that nothing reads soon: `target` and `size` are x 64."""
    for byte in range(0, size, 64):
        _stream_64(target + byte, source + byte)


@primitive
def take_ticket(typing: Any, counter: types.Type) -> Any:
    """Return an int64 counter and move it on by one, in one piece for all threads."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), build


@primitive
def lower_to(typing: Any, place: types.Type, value: types.Type) -> Any:
    """Put the smaller of a value and an int64 in memory there, in one piece for all threads."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("min", args[0], args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), build


def _room_on_stack(element: types.Type, bits: ir.Type) -> Callable[..., Any]:
    def reserve(typing: Any, count: types.Type) -> Any:
        if not isinstance(count, types.IntegerLiteral):
            return None
        size = count.literal_value

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            room = cgutils.alloca_once(builder, bits, size=ir.IntType(64)(size))
            room.align = _LINE_BYTES
            return room

        return types.CPointer(element)(count), build

    return reserve


# Room for a constant number of float32 or int64 on a kernel's stack, with any content.
stack_floats: Any = intrinsic(prefer_literal=True)(_room_on_stack(types.float32, ir.FloatType()))
stack_integers: Any = intrinsic(prefer_literal=True)(_room_on_stack(types.int64, ir.IntType(64)))
