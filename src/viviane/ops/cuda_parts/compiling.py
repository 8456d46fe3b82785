"""CUDA C++ compiled when it is first needed, by NVRTC, the compiler library that torch's CUDA builds bring along."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

from viviane.core.errors import VivianeError
from viviane.ops.capture import refuse_capture

Argument: TypeAlias = ctypes.c_void_p | ctypes.c_int | ctypes.Structure

_SUCCESS = 0
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A compiled kernel on one device.

    Args:
        source: CUDA C++ that holds an `extern "C"` kernel.
        name: the kernel's.
        defines: macros, by name.
        device: where it runs.
        shared_bytes: the most dynamic shared memory of a block.
        only_here: whether it uses what no later generation of GPUs has, as the tensor cores' own instructions are.
    """

    def __init__(
        self,
        source: str,
        name: str,
        defines: dict[str, int],
        device: torch.device,
        shared_bytes: int = 0,
        *,
        only_here: bool = False,
    ) -> None:
        refuse_capture(device, "compiling a kernel", fix="run an iteration before the capture")
        major, minor = torch.cuda.get_device_capability(device)
        target = f"--gpu-architecture=sm_{major}{minor}{'a' if only_here else ''}"
        options = [target, *(f"-D{key}={value}" for key, value in defines.items())]
        binary = compile_cuda(source, options)
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current
            self._call("cuModuleLoadData", ctypes.byref(self._module), binary)
            self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
            self._call("cuFuncSetAttribute", self._function, _MOST_SHARED, shared_bytes)
        sizes: list[type[ctypes.c_void_p] | type[ctypes.c_uint]] = [ctypes.c_void_p, *[ctypes.c_uint] * 7]
        self._together, self._alone = self._driver.cuLaunchCooperativeKernel, self._driver.cuLaunchKernel
        self._together.argtypes = [*sizes, ctypes.c_void_p, ctypes.c_void_p]
        self._alone.argtypes = [*sizes, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]

    def launch_together(self, blocks: int, threads: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
        """Launch blocks that may wait for one another, on the current stream.

        Args:
            blocks: at most as many as fit on the device at a time.
            threads: of each block.
            arguments: the kernel's: `ctypes.c_void_p` of pointers, `ctypes.c_int` of numbers, structures.
            shared_bytes: dynamic shared memory of each block.
        """
        with torch.cuda.device(self._device):
            stream, places = torch.cuda.current_stream(self._device).cuda_stream, _places(arguments)
            status = self._together(self._function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, places)
        _check("cuLaunchCooperativeKernel", status)

    def launch(self, blocks: int, threads: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
        """Launch blocks that do not wait for one another; see `launch_together`."""
        with torch.cuda.device(self._device):
            stream, places = torch.cuda.current_stream(self._device).cuda_stream, _places(arguments)
            status = self._alone(self._function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, places, None)
        _check("cuLaunchKernel", status)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._driver, name)(*arguments))


def compile_cuda(source: str, options: Sequence[str]) -> bytes:
    """Compile CUDA C++ to a device's machine code.

    Raises:
        VivianeError: NVRTC is missing, or the source does not compile.
    """
    library = nvrtc()
    if library is None:
        raise VivianeError("CUDA's run-time compiler was not found", fix="pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    _check("nvrtcCreateProgram", library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), flags) != _SUCCESS:
        raise VivianeError("CUDA source does not compile", value=_text(library, program, "ProgramLog"))
    binary = _bytes(library, program, "CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Return the library, or None where there is none."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1]
    # On the loader's path, else in the package that torch's wheels depend on, else in torch's own.
    found = [name, *(str(path) for path in sorted(packages.glob(f"nvidia/*/lib/{name}")))]
    found += [
        str(path) for path in sorted((packages / "torch" / "lib").glob("libnvrtc*.so*")) if "builtins" not in path.name
    ]
    for candidate in found:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue  # not there, or of another version of CUDA: the next may load
    return None


def _places(arguments: Sequence[Argument]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(what, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(what, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(library, program, what).rstrip(b"\0").decode(errors="replace")


def _check(name: str, status: int) -> None:
    if status != _SUCCESS:
        raise VivianeError(f"{name} failed", value=status, fix="compare the number with CUDA's list of errors")
