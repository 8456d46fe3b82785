"""Move all dense parameters of one rule at once, by numbers that lie on the device, or not at all.

A CUDA graph repeats its launches with the arguments they had, so what changes from step to step is read from memory:

    numbers  (NUM_DENSE_NUMBERS,), float64: see `viviane.ops.rules.DenseNumbers`
    scale    what gradients are multiplied by first, 0-dim
    gate     1: move; 0: leave parameters and state as they are; 0-dim, int32

The rules are those of `viviane.ops.rules`, in float32; gradients of 16 bits are widened as they are read, and results
are those of gradients that were cast before. On a GPU one launch moves all tensors, on the CPU one kernel; a rule that
needs a reduction over a whole tensor (LAMB) takes a few torch operations for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from viviane.core.errors import ConfigError, VivianeError
from viviane.ops.dispatch import choose, implementation
from viviane.ops.rules import DenseNumbers, DenseRule, dense_rules

__all__ = ["Workspace", "check_finite", "mark", "move_tensors", "reason", "update_scaled_status", "update_status"]

PIECE = 1024
"""Numbers of a tensor that one program moves."""
GRADIENT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DTYPE: Final = attrgetter("dtype")
_RENAMED: Final = {"Room": "Workspace", "judge": "update_status", "judge_scaled": "update_scaled_status"}


def __getattr__(name: str) -> Any:
    """Return a renamed function or class under its old, deprecated name."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


class Workspace:
    """What calls with the same tensors keep: where pieces of work begin, and addresses on the device.

    A call that a CUDA graph records takes memory that was reserved before, since every replay writes over what it
    allocates itself, and leaves the addresses to be written once the capture is over, by `write`.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.known: tuple[object, ...] = ()
        self.unwritten: list[tuple[Tensor, Tensor]] = []
        self._reserved = torch.empty(0, dtype=torch.int64)

    def reserve(self, tensors: Sequence[Tensor]) -> Tensor:
        """Reserve memory for one recorded call with some of these tensors; it is to be kept as long as the graph."""
        pieces = sum(-(-one.numel() // PIECE) for one in tensors)
        self._reserved = torch.empty(3 * pieces + 4 * len(tensors), dtype=torch.int64, device=tensors[0].device)
        return self._reserved

    def take(self, values: Tensor) -> Tensor:
        """Return reserved memory for a table of these values, which `write` puts there."""
        if len(self._reserved) < values.numel():
            raise ConfigError("a recorded call needs reserved memory", fix="call Workspace.reserve before the capture")
        table, self._reserved = self._reserved[: values.numel()], self._reserved[values.numel() :]
        self.unwritten.append((table.view(values.shape), values))
        return table.view(values.shape)

    def write(self) -> None:
        """Write the addresses that recorded calls will read, before the first replay."""
        for table, addresses in self.unwritten:
            table.copy_(addresses)
        self.unwritten.clear()


def move_tensors(
    rule: str,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor | Sequence[float],
    *,
    inside: bool = False,
    decays: bool = False,
    scale: Tensor | None = None,
    gate: Tensor | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Move parameters and state in place.

    Args:
        rule: the name of one of `viviane.ops.rules.dense_rules`.
        params: float32, contiguous.
        gradients: of the shapes of `params`; float32, bfloat16 or float16, all of one type.
        states: lists beside `params`, as many as the rule has.
        numbers, scale, gate: on the device; see above. For parameters on the CPU the numbers may be a list.
        inside: whether epsilon is inside the root.
        decays: whether the weight decay is to be read.
        workspace: kept from call to call.

    Example:
        >>> w, g = torch.ones(2), torch.tensor([1.0, 2.0])
        >>> numbers = torch.tensor([0.5, 0, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)
        >>> move_tensors("sgd", [w], [g], [], numbers)
        >>> w.tolist()
        [0.5, 0.0]
    """
    known = dense_rules().get(rule)
    if known is None or len(states) != len(known.states):
        raise VivianeError("no such rule, or not its state", value=f"{rule}, {len(states)} states")
    if not params:
        return
    if known.gpu_dense is None:
        _move_whole_tensors(known, params, gradients, states, numbers, inside, decays, scale, gate)
        return
    implementation("dense_update", params[0].device).move_tensors(
        rule, params, gradients, states, numbers, inside=inside, decays=decays, scale=scale, gate=gate,
        workspace=workspace or Workspace(),
    )  # fmt: skip


def _move_whole_tensors(
    rule: type[DenseRule],
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor | Sequence[float],
    inside: bool,
    decays: bool,
    scale: Tensor | None,
    gate: Tensor | None,
) -> None:
    """Move by torch operations that read the numbers on the device; a CUDA graph can capture them."""
    check_moved(params, gradients, states)
    numbers = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.float64)
    taken = DenseNumbers.of(numbers.to(torch.float32).unbind())
    shaped = [one.to(torch.float32) if scale is None else one.to(torch.float32) * scale for one in gradients]
    if decays:
        shaped = [g + taken.decay * w for g, w in zip(shaped, params, strict=True)]
    columns = [list(params), *map(list, states)]
    before = None if gate is None else [[one.clone() for one in column] for column in columns]
    rule.update_dense(columns[0], shaped, columns[1:], taken, inside)
    if before is not None and gate is not None:
        for column, kept in zip(columns, before, strict=True):
            for one, old in zip(column, kept, strict=True):
                torch.where(gate != 0, one, old, out=one)


def check_finite(tensors: Sequence[Tensor], status: Tensor, workspace: Workspace | None = None) -> None:
    """Set status[0] to 1 where any number is NaN or infinite; nothing waits for the device.

    Args:
        tensors: floating-point, contiguous, of one type; a single one may be columns of a wider matrix.
        status: see `update_status`.
        workspace: kept from call to call.

    Example:
        >>> status = torch.tensor([0, -1, 0])
        >>> check_finite([torch.ones(3), torch.tensor([float("inf")])], status)
        >>> status.tolist()
        [1, -1, 0]
    """
    there = [one for one in tensors if one.numel()]
    if there:
        _serving(there[0].device).check_finite(there, status, workspace or Workspace())


def mark(records: Sequence[Tensor], status: Tensor) -> None:
    """Set status[0] to 1 where the first number of one of the records, int64, is not 0.

    Example:
        >>> status = torch.tensor([0, -1, 0])
        >>> mark([torch.tensor([0, 0, 0]), torch.tensor([1, 5, 7])], status)
        >>> status.tolist()
        [1, -1, 0]
    """
    if records:
        _serving(status.device).mark(records, status)


def update_status(loss: Tensor | None, status: Tensor, gate: Tensor) -> None:
    """Decide on the device whether a step may move weights, and count it.

    Args:
        loss: 0-dim; NaN and infinite are bad; None is not looked at.
        status: (3,), int64: whether anything was bad, which stays until it is cleared; the number of the first bad
            step, or -1; how many steps were judged.
        gate: becomes 1 where nothing was bad, 0-dim, int32.

    Example:
        >>> status, gate = torch.tensor([0, -1, 6]), torch.tensor(1, dtype=torch.int32)
        >>> update_status(torch.tensor(float("nan")), status, gate)
        >>> status.tolist(), gate.item()
        ([1, 6, 7], 0)
    """
    _serving(status.device).update_status(loss, status, gate)


def update_scaled_status(
    loss: Tensor, status: Tensor, overflow: Tensor, scaling: Tensor, gate: Tensor, *, interval: int, largest: float
) -> None:
    """Do what `update_status` does under a dynamic loss scale: a step that overflows is skipped.

    The scale is halved where gradients were not finite, and doubled after `interval` steps without. What is bad
    besides, or an overflow at a scale of 1 or less, closes the gate for good and leaves the scale.

    Args:
        loss: 0-dim, not scaled.
        status, gate: see `update_status`.
        overflow: (1,), int64: not 0 where gradients were not finite; becomes 0.
        scaling: (3,), float64: the scale, the good steps since it changed, the steps that overflowed.
        interval, largest: of `viviane.training.step.loss_scale`.

    Example:
        >>> status, gate = torch.tensor([0, -1, 0]), torch.tensor(1, dtype=torch.int32)
        >>> overflow, scaling = torch.tensor([1]), torch.tensor([8.0, 5.0, 0.0], dtype=torch.float64)
        >>> update_scaled_status(torch.tensor(0.5), status, overflow, scaling, gate, interval=2, largest=16.0)
        >>> scaling.tolist(), overflow.tolist(), status.tolist(), gate.item()
        ([4.0, 0.0, 1.0], [0], [0, -1, 1], 0)
    """
    serving = _serving(status.device)
    serving.update_scaled_status(loss, status, overflow, scaling, gate, interval=interval, largest=largest)


def reason(params: Sequence[Tensor]) -> str | None:
    """Return the reason why one kernel cannot move these parameters, or None if it can.

    Example:
        >>> reason([torch.ones(1, dtype=torch.float64)])
        'only float32 parameters have a kernel'
    """
    if any(choose(one.device) == "reference" for one in params):
        return "VIVIANE_OPS: plain torch"
    if len({one.device for one in params}) > 1:
        return "the parameters are on several devices"
    if any(one.dtype != torch.float32 for one in params):
        return "only float32 parameters have a kernel"
    if not all(one.is_contiguous() for one in params):
        return "a parameter is not contiguous"
    return None


def check_moved(params: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the parameters' sizes, and refuse what a kernel cannot move: it reads and writes as many numbers of each.

    Raises:
        VivianeError: a parameter or state is not contiguous, float32; gradients or state differ from it in size.
    """
    sizes = [*map(Tensor.numel, params)]
    for what, column in (("gradients", gradients), *(("state", one) for one in states)):
        if (found := [*map(Tensor.numel, column)]) != sizes:
            raise VivianeError(f"{what} must have the parameters' sizes", value=found[:16], allowed=str(sizes[:16]),
                               fix="load state of the same model")  # fmt: skip
    tensors = [*chain(params, *states)]
    types = set(map(_DTYPE, tensors))
    if types - {torch.float32} or not all(map(Tensor.is_contiguous, tensors)):
        value = ", ".join(sorted(map(str, types)))
        raise VivianeError("parameters and state must be contiguous, float32", value=value)
    return sizes


def gradient_type(gradients: Sequence[Tensor]) -> torch.dtype:
    """Return the one type that all gradients of a call have.

    Example:
        >>> gradient_type([torch.ones(2, dtype=torch.bfloat16)])
        torch.bfloat16

    Raises:
        VivianeError: they have several, or one that no kernel reads.
    """
    found = {one.dtype for one in gradients}
    if len(found) > 1 or not found <= GRADIENT_DTYPES:
        raise VivianeError(
            "gradients must all be of one type that kernels read", value=", ".join(sorted(map(str, found))),
            allowed=", ".join(sorted(map(str, GRADIENT_DTYPES))),
        )  # fmt: skip
    return gradients[0].dtype


def _serving(device: torch.device) -> ModuleType:
    return implementation("dense_update", device)
