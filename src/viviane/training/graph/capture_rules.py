"""Reasons why a training step cannot be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from viviane.batch import Batch
from viviane.nn.linear import has_hooks
from viviane.ops.dense_update import reason as dense_reason
from viviane.ops.dispatch import kernels_serve
from viviane.training.step.program import TrainStep
from viviane.training.step.recorded_state import is_trusted


def ineligible_reason(step: TrainStep) -> str | None:
    """Return why a step cannot be captured, or None if it can. Batches are not considered.

    Args:
        step: the training step.
    """
    return next(ineligible_reasons(step), None)


def shape_mismatch_reason(step: TrainStep, batch: Batch) -> str | None:
    """Return why the shapes of a batch may differ between ranks, so that some ranks could not replay; None if not.

    All ranks return the same result: the function reads only the static shapes and the names of columns.

    Args:
        step: the training step.
        batch: the next batch.
    """
    sync = step.sync
    if sync is None or sync.has_static_shape(batch):
        return None
    if sync.is_static:
        names = [name for name in batch.bags if name not in sync.hotness]
        return f"several processes train together, and bags of {names[0]!r} have no fixed hotness"
    why = "this batch is shorter than others" if is_short(step) else step.dynamic_shape_reason
    return f"several processes train together, and batch shapes are not static: {why}"


def is_short(step: TrainStep) -> bool:
    """Return whether the mismatch is only that this batch is shorter: the next one may have the static shape again."""
    return step.sync is not None and not step.sync.is_static and step.dynamic_shape_reason is None


def ineligible_reasons(step: TrainStep) -> Iterator[str]:
    """Yield every reason why a step cannot be captured."""
    solver = step.solver
    if solver.cuda_graph is False:
        yield "solver.cuda_graph is False"
    if step.device.type != "cuda":
        yield f"no GPU: training runs on {step.device}"
    if step.hooks:
        yield f"a step hook ({type(step.hooks[0]).__name__}) runs Python around every step"
    if step.loss_scale is not None and step.guard is None:
        yield "fp16 without nan_guard checks for overflows on the host"
    if not kernels_serve(step.device):
        yield "VIVIANE_OPS selects the torch reference for embedding tables"
    # Frozen parameters count too: they may be trained later, and one kernel updates all or none (see `TrainStep`).
    unfit = dense_reason(list(step.parameters.values()))
    if step.parameters and unfit is not None:
        yield f"dense parameters: {unfit}"
    for collection in step.collections.values():
        for storage in collection.all_storages():
            reason = storage.capture_ineligible_reason
            if reason is not None:
                yield reason
    yield from _module_ineligible_reasons(step.module, trusts=solver.cuda_graph is True)
    if solver.cuda_graph == "auto" and step.objective.own_loss is not None:
        yield f"a custom loss runs Python in every step; {_TRUST}"


_TRUST = "with cuda_graph=True it is captured, and may depend on the batch and on tensors only"


def _module_ineligible_reasons(module: nn.Module, *, trusts: bool) -> Iterator[str]:
    for name, part in module.named_modules():
        kind = type(part)
        place = f"module {name!r}" if name else "the module"
        if kind.__module__.startswith("torch._dynamo"):
            yield f"{place} is compiled by torch.compile"
        if has_hooks([part]):
            yield f"{place} has hooks, which a replay does not run"
        if not trusts and not is_trusted(kind):
            yield f"{place} ({kind.__name__}) is a custom module, whose Python code runs in every step; {_TRUST}"
