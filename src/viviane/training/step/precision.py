"""The precision of dense layers, and the choice between fp32 and bf16 by measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding.module_parts import collections_of, dense_buffers
from viviane.training.checkpoint.random_state import random_state, restore_random_state

_log = get_logger("training.precision")
_NAMES: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 3
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Precision:
    """The precision in which dense layers compute. Weights, optimizer state, embedding rows and the loss stay float32.

    "tf32" rounds the inputs of float32 products to 10 mantissa bits, "bf16" and "fp16" are torch's autocast.

    Example:
        >>> with Precision("bf16").context(torch.device("cpu")):
        ...     torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    name: Literal["fp32", "tf32", "bf16", "fp16"]

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context for a forward pass."""
        if self.name in _AUTOCAST:
            return torch.autocast(device.type, dtype=_AUTOCAST[self.name])
        return _tf32() if self.name == "tf32" else _NOTHING

    def products(self) -> AbstractContextManager[object]:
        """Return the context of a complete step, which sets the precision of float32 matrix products."""
        return _tf32() if self.name == "tf32" else _NOTHING

    def check(self, device: torch.device) -> None:
        """Refuse a precision that the device does not support.

        Raises:
            ConfigError: "tf32" without a GPU of compute capability 8.0 or more.
        """
        if self.name != "tf32":
            return
        found = f"on {device}"
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability >= (8, 0):
                return
            found = f"on a GPU of compute capability {capability[0]}.{capability[1]}"
        raise ConfigError(
            "TF32 is a mode of GPUs of compute capability 8.0 and more", where="solver.precision", value=found,
            allowed="fp32, bf16, fp16, auto", fix="set precision='bf16', or 'fp32'",
        )  # fmt: skip


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def choose_precision(
    module: nn.Module,
    batches: Sequence[Batch],
    forward_backward: Callable[[Batch, Precision], None],
    device: torch.device,
) -> Precision:
    """Time forward and backward in fp32 and bf16 on a few batches and return the faster one.

    The state of the run is not changed: gradients are dropped, buffers (batch statistics) and random generators are
    restored, and the caller supplies the batches. Each precision warms up once; then the two alternate, and the best
    time of each is compared, since load on the machine affects the best time least.
    """
    arrays, values = random_state(device)
    buffers = dense_buffers(module, persistent_only=False)
    saved = {name: buffer.clone() for name, buffer in buffers.items()}
    best = dict.fromkeys(_NAMES, float("inf"))
    try:
        for turn in range(_REPEATS + 1):
            for name in _NAMES:
                seconds = _time(module, batches, forward_backward, Precision(name), device)
                if turn:
                    best[name] = min(best[name], seconds)
    finally:
        with torch.no_grad():
            for key, buffer in buffers.items():
                buffer.copy_(saved[key])
        restore_random_state(arrays, values, device)
    chosen = Precision("bf16" if best["bf16"] < best["fp32"] else "fp32")
    _log.info(
        "precision auto: %s (forward and backward: fp32 %.2f ms, bf16 %.2f ms per batch)",
        chosen.name,
        best["fp32"] * 1e3 / len(batches),
        best["bf16"] * 1e3 / len(batches),
    )
    return chosen


def _time(
    module: nn.Module,
    batches: Sequence[Batch],
    forward_backward: Callable[[Batch, Precision], None],
    precision: Precision,
    device: torch.device,
) -> float:
    _wait(device)
    start = perf_counter()
    for batch in batches:
        forward_backward(batch, precision)
    _wait(device)
    seconds = perf_counter() - start
    module.zero_grad(set_to_none=True)
    for collection in collections_of(module).values():
        collection.discard_gradients()
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
