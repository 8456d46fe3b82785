"""What the kernels' tests launch in Triton's interpreter, written down so that a compiler can be given the same.

A launch is noted as JSON: the kernel, its arguments by name, the options of the launch. Of a tensor the type of number
and its alignment count; of a number given at run time, what Triton specialises on.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from triton import language as tl
from triton.runtime.jit import KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNED_BYTES = 16  # what Triton's compiler asks of addresses, and of numbers that may be distances
_NAMES = {"float16": "bfloat16", "fp16": "bf16"}
_seen: set[str] = set()


def describe(value: Any) -> Any:
    """Return a constant or a tensor as JSON has it."""
    if isinstance(value, torch.Tensor):
        return {"pointer": _name(value.dtype), "aligned": value.data_ptr() % ALIGNED_BYTES == 0}
    if isinstance(value, TensorDescriptor):
        return {"tiles": _name(value.base.dtype), "block": list(value.block_shape)}
    if isinstance(value, tuple):
        return {"tuple": [describe(one) for one in value]}
    if isinstance(value, tl.dtype):
        return {"kind": value.name}
    if isinstance(value, KernelInterface):
        return {"function": f"{value.fn.__module__}.{value.fn.__name__}"}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a kernel takes a {type(value).__name__}: tests/ops/gpu/launches.py must learn to note that")


def at_run_time(value: Any) -> Any:
    """Replace what a program reads when it runs by one value for each way in which it is compiled."""
    if isinstance(value, dict) and "tuple" in value:
        return {"tuple": [at_run_time(one) for one in value["tuple"]]}
    if isinstance(value, bool):
        return True
    if isinstance(value, float):
        return 0.5
    if not isinstance(value, int) or value == 1:
        return value
    wide = 0 if -(2**31) <= value < 2**31 else 2**40
    return wide + (ALIGNED_BYTES if value % ALIGNED_BYTES == 0 else ALIGNED_BYTES + 1)


def stand_in(value: Any) -> Any:
    """Return an argument for which Triton compiles what it would for the one described."""
    if not isinstance(value, dict):
        return value
    if "pointer" in value:
        whole = torch.empty(64, dtype=getattr(torch, value["pointer"]))
        return whole if value["aligned"] else whole[1:]
    if "tiles" in value:
        matrix = torch.empty(256, 256, dtype=getattr(torch, value["tiles"]))
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), value["block"])
    if "tuple" in value:
        return tuple(stand_in(one) for one in value["tuple"])
    if "function" in value:
        module, _, name = value["function"].rpartition(".")
        return getattr(importlib.import_module(module), name)
    return tl.dtype(value["kind"])


def with_bfloat16(value: Any) -> Any:
    """Return a launch with bfloat16 for float16: GPUs train with that, NumPy and so the interpreter lack it."""
    if isinstance(value, dict):
        return {key: with_bfloat16(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_bfloat16(one) for one in value]
    return _NAMES.get(value, value) if isinstance(value, str) else value


def note_launches(interpreted: type) -> None:
    """Have Triton's interpreted functions note the package's kernels that are launched.

    Args:
        interpreted: the class of functions that the interpreter runs.
    """
    run = interpreted.run

    def noting(self, *given, grid, warmup, **named):
        if self.fn.__module__.startswith("viviane."):
            arguments = {**dict(zip(self.arg_names, given, strict=False)), **named}
            fixed = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
            launch: dict[str, Any] = {"kernel": f"{self.fn.__module__}.{self.fn.__name__}", "given": {}, "options": {}}
            for name, value in arguments.items():
                found = describe(value)
                if name not in self.arg_names:
                    launch["options"][name] = found
                else:
                    launch["given"][name] = found if name in fixed else at_run_time(found)
            _seen.add(json.dumps(launch, sort_keys=True))
        return run(self, *given, grid=grid, warmup=warmup, **named)

    interpreted.run = noting


def write_launches(path: Path) -> None:
    """Write the distinct launches of this process."""
    path.write_text("".join(f"{line}\n" for line in sorted(_seen)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
