"""The NaN guard: stops a step before NaN or infinite values reach a weight, and names their source.

Cost on the CPU: one sum over the batch, one over the dense gradients and one over the gradients of rows, which are in
cache or needed anyway. On a GPU the flags are read once per step, just before the update, where the sparse update waits
for the number of distinct rows in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import NumericsError
from viviane.core.ranges import timed_as
from viviane.embedding import TableCollection
from viviane.embedding.module_parts import dense_buffers, dense_parameters
from viviane.optim.dense import DenseGradients

_MAX_NAMES = 5
FIX = "weights are unchanged since the previous step; lower lr or set clip_grad_norm if the data is right"


class NanGuard:
    """Checks the input, loss and gradients of a step.

    Buffers (batch statistics) are saved before forward, which changes them, and restored if the step fails: weights and
    buffers are then those after the last successful step.

    Args:
        module: the trained module.
        collections: its embedding collections.
        gradients: gradients of its dense parameters.
    """

    def __init__(
        self, module: nn.Module, collections: Mapping[str, TableCollection], gradients: DenseGradients
    ) -> None:
        self.module = module
        self.collections = collections
        self.gradients = gradients
        self._buffers = list(dense_buffers(module, persistent_only=False).values())
        self._saved = [b.clone() for b in self._buffers]
        self.num_looked_at = 0
        """Number of module outputs checked in the last search, up to the first that is not finite."""

    def before(self, batch: Batch, step: int) -> None:
        """Save the buffers; on the CPU, check the input before forward."""
        if self._buffers:
            self.save_buffers()
        if batch.device.type == "cpu" and not all_finite(numbers_of(batch)):
            raise _refuse("the batch contains NaN or infinite values", step, batch, "; ".join(bad_input(batch)))

    def save_buffers(self) -> None:
        """Save the buffers that a forward pass may change."""
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            saved.copy_(buffer)

    @timed_as("check values")
    def check_loss(self, loss: Tensor, batch: Batch, step: int) -> None:
        """On the CPU, check the loss before backward."""
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):
            self._refuse_loss(loss, batch, step)

    @timed_as("check values")
    def check_gradients(self, loss: Tensor, batch: Batch, step: int) -> None:
        """Check all gradients (on a GPU also the loss) before the update."""
        gradients = list(self.gradients.named().values())
        flag = _finite_flag(gradients) if gradients else torch.zeros((), device=loss.device)
        if loss.device.type != "cpu":
            flag = flag + loss.detach()
        features = [name for one in self.collections.values() for name in one.nonfinite_gradients()]
        if math.isfinite(flag.item()) and not features:
            return
        if not math.isfinite(loss.item()):
            self._refuse_loss(loss, batch, step)
        # The sum of finite values may overflow, so the values themselves decide.
        parameters = [name for name, one in self.gradients.named().items() if not bool(torch.isfinite(one).all())]
        if parameters or features:
            named = [*(f"feature {name!r}" for name in features), *(f"parameter {name!r}" for name in parameters)]
            raise _refuse("gradients are NaN or infinite", step, batch, f"those of {some(named)}")

    def _refuse_loss(self, loss: Tensor, batch: Batch, step: int) -> None:
        self.restore_buffers()
        found = bad_input(batch) or self.bad_weights() or self.bad_output(batch)
        cause = "; ".join(found) or "input, weights and all layers' outputs are finite; the source is the loss function"
        raise _refuse(f"the loss is {float(loss.detach())}", step, batch, cause)

    def restore_buffers(self) -> None:
        """Restore the buffers after a failed step."""
        with torch.no_grad():
            for saved, buffer in zip(self._saved, self._buffers, strict=True):
                buffer.copy_(saved)

    def restore_buffers_unless(self, gate: Tensor) -> None:
        """Restore the buffers on the device if the gate is 0."""
        with torch.no_grad():
            for saved, buffer in zip(self._saved, self._buffers, strict=True):
                buffer.copy_(torch.where(gate != 0, buffer, saved))

    def bad_weights(self) -> list[str]:
        """Return which weights are not finite, in words."""
        found = [f"parameter {n!r}" for n, p in dense_parameters(self.module).items() if not torch.isfinite(p).all()]
        for collection in self.collections.values():
            for table in collection.tables:
                if not all(torch.isfinite(rows).all() for rows in collection.local_rows(table)):
                    found.append(f"table {table!r}")
        return [f"weights that were already NaN or infinite: {some(found)}"] if found else []

    def bad_output(self, batch: Batch) -> list[str]:
        """Run forward again and name the first submodule whose output is not finite."""
        found: list[str] = []
        self.num_looked_at = 0

        def watch(name: str) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if found or not isinstance(output, Tensor):
                    return
                self.num_looked_at += 1
                if not torch.isfinite(output).all():
                    found.append(f"the output of module {name!r} ({type(_module).__name__})")

            return hook

        hooks = [part.register_forward_hook(watch(name)) for name, part in self.module.named_modules() if name]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.module(batch)
        finally:
            for hook in hooks:
                hook.remove()
            self.restore_buffers()
        return found


def _finite_flag(gradients: list[Tensor]) -> Tensor:
    """Return a number that is finite only if all gradients are; on a GPU one norm of all takes fewer launches."""
    if gradients[0].device.type == "cpu":
        return torch.stack([one.sum() for one in gradients]).sum()
    kind = torch.float64 if any(one.dtype == torch.float64 for one in gradients) else torch.float32
    return torch.stack(torch._foreach_norm(gradients, 1, dtype=kind)).sum()


def bad_input(batch: Batch) -> list[str]:
    """Describe the columns of a batch that contain NaN or infinite values, with the first row of each."""
    columns: list[tuple[str, Tensor]] = []
    if batch.labels.shape[1]:
        columns += [(f"label {name!r}", batch.label(name)) for name in batch.layout.labels]
    columns += [(f"dense column {name!r}", batch.dense_feature(name)) for name, _ in batch.layout.dense]
    if batch.weight is not None:
        columns.append(("the sample weight", batch.weight))
    found = []
    for name, values in columns:
        bad = ~torch.isfinite(values).reshape(batch.size, -1).all(1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            found.append(f"{name}, row {row} of the batch: {values[row].tolist()} ({int(bad.sum())} row(s) in total)")
    for name, bag in batch.bags.items():
        if bag.weights is not None and not bool(torch.isfinite(bag.weights).all()):
            first = int((~torch.isfinite(bag.weights)).nonzero()[0, 0])
            row = int(torch.searchsorted(bag.offsets, first, right=True)) - 1
            found.append(f"weights of feature {name!r}, row {row} of the batch: {float(bag.weights[first])}")
    return found


def numbers_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that contain floating-point values."""
    weights = [bag.weights for bag in batch.bags.values() if bag.weights is not None]
    return [batch.labels, batch.dense, *([] if batch.weight is None else [batch.weight]), *weights]


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether all values are finite: check the sum first, and the values only if the sum is not finite."""
    return all(not t.numel() or math.isfinite(t.sum().item()) or bool(torch.isfinite(t).all()) for t in tensors)


def some(names: list[str]) -> str:
    """List the first few names."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _refuse(what: str, step: int, batch: Batch, cause: str) -> NumericsError:
    return NumericsError(
        f"{what}: {cause}",
        where=f"step {step}, {batch.origin}",
        fix=FIX,
    )
