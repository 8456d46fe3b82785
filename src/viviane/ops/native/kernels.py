"""Compile kernels to machine code that is kept on disk, and run them on torch's own threads.

A kernel is a function of one argument, `call`: a pointer to int64. call[0] counts the tickets taken, call[1] is their
number, the rest are the kernel's operands: addresses and whole numbers. Each thread takes tickets until none is left,
so that a kernel is right for any number of threads.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import numba
import torch
from llvmlite import ir
from numba import types

from viviane.ops.native.memory import primitive

OPERANDS: Final = 2
"""Index in `call` of the first operand."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SIGNATURE = types.void(types.CPointer(types.int64))  # type: ignore[no-untyped-call]
_config: Any = numba.config
_WORK_PER_THREAD = 16_384
_one_at_a_time = threading.Lock()
_one_compiler = threading.RLock()


@lru_cache(maxsize=1)
def sources() -> str:
    """Return a digest of the kernels' source files.

    Numba looks at the file of a kernel alone when it decides whether machine code on disk is stale; a kernel that has
    this text in its closure is recompiled when any of these files changes.
    """
    here = Path(__file__).resolve().parent
    files = sorted([*here.glob("*.py"), *here.parent.glob("*/cpu*.py"), *here.parent.glob("rules/*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kernel(function: Callable[..., None]) -> Kernel:
    """Compile a kernel, or load it from the disk."""
    with _one_compiler, _cache_lock(Path(function.__code__.co_filename).parent / "__pycache__"):
        # Short loops of constant length are unrolled first; this pass then puts their steps side by side again.
        before, _config.SLP_VECTORIZE = _config.SLP_VECTORIZE, 1
        try:
            # Contraction alone: a product and a sum may become one instruction, but no sum changes its order.
            compiled = numba.cfunc(_SIGNATURE, cache=True, error_model="numpy", fastmath={"contract"})(function)
        finally:
            _config.SLP_VECTORIZE = before
    return Kernel(compiled)


@contextmanager
def _cache_lock(folder: Path) -> Iterator[None]:
    """Let one process at a time read and write a folder of machine code.

    Numba numbers the files of a function's variants without a lock: of two processes that compile different variants
    at once, both may write file 1, and later processes would then run one variant's code as the other's.
    """
    from filelock import FileLock

    try:
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / ".viviane-kernels.lock", mode=0o666)
        lock.acquire()
    except OSError:  # a read-only installation: Numba keeps the files elsewhere
        folder = Path(tempfile.gettempdir()) / f"viviane-kernels-{getpass.getuser()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(folder / ".viviane-kernels.lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


_listeners: dict[int, KernelListener] = {}


class KernelListener(Protocol):
    """Is told which kernels and native operators a thread runs."""

    def before_kernel(self) -> None:
        """Take note of a kernel that this thread is about to run."""
        ...

    def run_operator(self, operator: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a native operator in the place of its caller, and return its result."""
        ...


@contextmanager
def listening_to_kernels(listener: KernelListener) -> Iterator[None]:
    """Tell a listener about each kernel and native operator that this thread runs, until the block ends."""
    _listeners[threading.get_ident()] = listener
    try:
        yield
    finally:
        del _listeners[threading.get_ident()]


def native_operator(function: _Function) -> _Function:
    """Mark a function of tensors as an operator: a listener may run it again, later and with other tensors.

    It depends on its arguments alone, writes none of them, and returns every new tensor that is read later. Its
    arguments are positional.

    Example:
        >>> @native_operator
        ... def double(x):
        ...     return x * 2
        >>> double(torch.tensor([1.0, 2.0])).tolist()
        [2.0, 4.0]
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        listener = _listeners.get(threading.get_ident()) if _listeners else None
        return function(*args) if listener is None else listener.run_operator(function, args)

    return cast(_Function, call)


class Kernel:
    """A compiled kernel.

    Args:
        compiled: by Numba, from a function of `call`.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self._address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    @property
    def address(self) -> int:
        """The address of its machine code, for `invoke`."""
        return self._address

    def call_at(self, call: int) -> None:
        """Run in this thread on operands that are in memory already: the address of `call`."""
        if _listeners:
            _tell_listener()
        self._call(call)

    def __call__(self, operands: Sequence[int], *, tickets: int, threads: int) -> None:
        """Run until all tickets are taken, without the interpreter's lock."""
        if _listeners:
            _tell_listener()
        call = (ctypes.c_int64 * (OPERANDS + len(operands)))(0, tickets, *operands)
        threads = min(threads, tickets)
        if threads <= 1:
            self._call(ctypes.addressof(call))
        elif (parallel := _torch_threads()) is not None:
            parallel(self._address, ctypes.addressof(call), threads, 0)
        else:
            run_on_numba_threads(self._address, ctypes.addressof(call), threads)


class PreparedKernel:
    """A kernel with its operands in memory: a call in one thread costs Python nothing for those that stay.

    Args:
        kernel: what to run.
        operands: as of its other calls.
        tickets: their number.
    """

    def __init__(self, kernel: Kernel, operands: Sequence[int], tickets: int = 1) -> None:
        self._kernel = kernel
        self._call = (ctypes.c_int64 * (OPERANDS + len(operands)))(0, tickets, *operands)
        self._address = ctypes.addressof(self._call)

    def set(self, place: int, operand: int) -> None:
        """Replace an operand."""
        self._call[OPERANDS + place] = operand

    def run(self) -> None:
        """Run until all tickets are taken."""
        self._call[0] = 0
        self._kernel.call_at(self._address)


def _tell_listener() -> None:
    listener = _listeners.get(threading.get_ident())
    if listener is not None:
        listener.before_kernel()


def num_threads(work: int) -> int:
    """Return how many threads some work is worth: of torch's threads, one for each 16,384 numbers."""
    return max(1, min(torch.get_num_threads(), work // _WORK_PER_THREAD))


@lru_cache(maxsize=1)
def _torch_threads() -> Any:
    """Return GOMP_parallel of the OpenMP library that torch runs on, or None where there is none.

    With threads of its own, Numba would compete for the cores with those of torch, which stay awake for a while after
    each operation.
    """
    try:
        # A library handle finds the functions of the libraries that it was linked with.
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = torch_library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def run_on_numba_threads(address: int, call: int, threads: int) -> None:
    """Run a kernel on Numba's threads, where torch's are out of reach."""
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, _config.NUMBA_NUM_THREADS))
    try:
        run = _numba_driver()
        # Numba's own thread pool ends the process when two threads enter it.
        with _one_at_a_time:
            run(address, call, threads)
    finally:
        numba.set_num_threads(before)


@primitive
def invoke(typing: Any, address: types.Type, call: types.Type) -> Any:
    """Call the kernel at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [byte]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@lru_cache(maxsize=1)
def _numba_driver() -> Any:
    @numba.njit(parallel=True, nogil=True, cache=True)
    def run(address: int, call: int, threads: int) -> None:
        for _ in numba.prange(threads):
            invoke(address, call)

    return run
