"""Which implementation serves an operation: chosen by device, or by the user.

Every folder beside this file is an operation with up to three implementations of one contract:

    reference   plain torch, any device: the readable truth, slow
    cpu         Numba
    gpu         Triton
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from viviane.core.errors import ConfigError, MissingExtraError
from viviane.core.optional import triton_loads

CHOICES = ("auto", "reference", "cpu", "gpu")
VARIABLE = "VIVIANE_OPS"
_from_environment = os.environ.get(VARIABLE, "auto")  # once: a step asks several times
_LIBRARY = {"cpu": "numba", "gpu": "triton"}
_chosen: ContextVar[str | None] = ContextVar("viviane_ops", default=None)


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Serve operations by one implementation inside a `with` block, regardless of the device.

    Args:
        name: "auto", "reference", "cpu" or "gpu".

    Example:
        >>> with use_implementation("reference"):
        ...     choose(torch.device("cpu"))
        'reference'
    """
    token = _chosen.set(_known(name, "use_implementation"))
    try:
        yield
    finally:
        _chosen.reset(token)


def choose(device: torch.device) -> str:
    """Return the implementation for tensors on a device: the user's choice, else "cpu" or "gpu".

    The choice is that of `use_implementation`, else of the environment variable VIVIANE_OPS, read at import.

    Raises:
        ConfigError: the choice does not run on that device.
    """
    name = _chosen.get() or _from_environment
    own = "gpu" if device.type == "cuda" else "cpu"
    if name == "auto":
        return own
    _known(name, f"the variable {VARIABLE}")
    if name not in ("reference", own) and not (name == "gpu" and interpreted()):
        raise ConfigError(
            f"the implementation {name!r} does not run on {device.type}",
            value=name,
            allowed=f"auto, reference, {own}",
            fix=f"unset {VARIABLE}, or move the tables to another device",
        )
    return name


def reason(device: torch.device, operation: str | None = None) -> str:
    """Return the reason for the choice of `choose`.

    Args:
        device: of the tensors.
        operation: its folder's name; without a file for CPUs, plain torch is used there.
    """
    chosen = _chosen.get() or _from_environment
    if chosen == "auto":
        if device.type == "cuda":
            return "Triton, for GPUs"
        if operation is not None and not (Path(__file__).parent / operation / "cpu.py").exists():
            return "torch's own operations: no kernel of ours is faster on CPUs"
        return "Numba, for CPUs"
    return f"chosen by {VARIABLE}" if _chosen.get() is None else "chosen by use_implementation"


def kernels_serve(device: torch.device) -> bool:
    """Whether Triton's kernels serve a device; `torch.compile` asks once, while it traces.

    Example:
        >>> kernels_serve(torch.device("cpu"))
        False
    """
    if (_chosen.get() or _from_environment) == "auto":
        return device.type == "cuda"
    return choose(device) == "gpu"


# What torch.compiler.assume_constant_result does; to call it would load the compiler with this package.
kernels_serve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operations() -> list[str]:
    """Return the names of the operations."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/reference.py"))


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def implementation(operation: str, device: torch.device) -> ModuleType:
    """Return the module that serves an operation, such as "embedding_bag", on a device."""
    if (_chosen.get() or _from_environment) == "auto":
        return load(operation, "gpu" if device.type == "cuda" else "cpu")
    return load(operation, choose(device))


@cache
def load(operation: str, name: str) -> ModuleType:
    """Return the module of one implementation of an operation.

    Raises:
        MissingExtraError: its library is absent.
        ConfigError: it is Triton, which cannot be imported any more.
    """
    if name == "gpu" and not triton_loads():
        raise ConfigError(
            "TensorFlow was imported before Triton, which would end the process now", where=operation,
            fix="import viviane.keras or viviane.tensorflow before tensorflow and keras",
        )  # fmt: skip
    try:
        return importlib.import_module(f"viviane.ops.{operation}.{name}")
    except ImportError as error:
        library = _LIBRARY.get(name, "torch")
        raise MissingExtraError(
            f"{operation} on the {name.upper()} needs the library {library!r}, which could not be imported",
            value=str(error),
            fix=f"pip install {library}, or set {VARIABLE}=reference for the slow implementation in plain torch",
        ) from error


def _known(name: str, where: str) -> str:
    if name not in CHOICES:
        raise ConfigError("no such implementation", where=where, value=name, allowed=", ".join(CHOICES))
    return name
