"""What a recorded training step depends on, besides the values of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from viviane.batch import Batch
from viviane.core.ranges import are_recorded
from viviane.embedding import EmbeddingCollection
from viviane.nn.linear import HOOKS, has_hooks
from viviane.ops.dispatch import choose
from viviane.training.step.program import TrainStep

_TRUSTED_PACKAGES = ("torch.nn.", "viviane.")
_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS_OF = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))  # of a parameter's gradient
_PHASES = (TrainStep.forward, TrainStep.backward)
_NO_VALUES = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
"""Attributes of every module that are hooks: dicts, which stay the same objects."""


class RecordedState:
    """What a program depends on besides the batch: `holds` returns whether it is as it was.

    The attributes of all dense modules are compared by identity: a new value of any kind is a change. A step has little
    time for it, so values are fetched and compared by functions of C.
    """

    def __init__(self, step: TrainStep) -> None:
        modules = [*_dense_modules(step), step.objective]
        self._step = step
        self._collections = collections_of(step)
        self._spaces = [vars(one) for one in modules]
        self._getters = [itemgetter(*(name for name in space if name not in _NO_VALUES)) for space in self._spaces]
        self._values = list(self._of_spaces())
        inside = [part for space in self._spaces for part in space.values() if isinstance(part, dict)]
        inside += [vars(one)[name] for one in self._collections for name in HOOKS]
        self._empty = [part for part in inside if not part]
        self._views = [part.values() for part in inside if part]  # live: they give the present values
        self._lists = [one for one in self._values if isinstance(one, list)]
        self._items = [*chain.from_iterable(self._views), *chain.from_iterable(self._lists)]
        self._sized: list[Any] = [*self._spaces, *self._views, *self._lists]
        self._counts = [*map(len, self._sized)]
        self._parameters = list(step.parameters.values())
        self._tensors = self._of_tensors()
        self._types: list[Any] = list({type(one) for one in (*modules[:-1], *self._collections)})
        self._rest = self._of_rest()

    def holds(self) -> bool:
        """Whether nothing has changed."""
        try:
            return (
                all(map(is_, self._of_spaces(), self._values))
                and not any(self._empty)
                and [*map(len, self._sized)] == self._counts
                and all(
                    map(is_, chain(chain.from_iterable(self._views), chain.from_iterable(self._lists)), self._items)
                )
                and self._of_tensors() == self._tensors
                and self._of_rest() == self._rest
            )
        except KeyError:  # an attribute was deleted
            return False

    def _of_spaces(self) -> Iterator[Any]:
        return chain.from_iterable(map(call, self._getters, self._spaces))

    def _of_tensors(self) -> list[Any]:
        hooks = chain(*(map(of, self._parameters) for of in _HOOKS_OF))
        return [*map(Tensor.data_ptr, self._parameters), *map(_REQUIRES_GRAD, self._parameters), any(hooks)]

    def _of_rest(self) -> list[Any]:
        own = self._step
        found: list[Any] = [one.forward for one in self._types]
        found += [TrainStep.forward, TrainStep.backward, len(vars(own)), len(own.hooks), own.loss_scale, own.exchange]
        found += [choose(own.device), torch.are_deterministic_algorithms_enabled()]
        for one in self._collections:
            margins = one.margins
            found += [one.frozen, one.training, one.gradient_watch, None if margins is None else len(margins.refused)]
        return found


def ineligible_reasons(step: TrainStep) -> Iterator[str]:
    """Yield every reason why steps cannot be recorded."""
    if step.device.type != "cpu":
        yield f"steps are recorded on a CPU; training runs on {step.device}"
    if step.solver.cuda_graph is False:
        yield "solver.cuda_graph is False"
    if step.group.size > 1:
        yield "several processes train together"
    if step.hooks:
        yield f"a step hook ({type(step.hooks[0]).__name__}) runs Python around every step"
    if step.loss_scale is not None:
        yield "the loss scale of fp16 changes from step to step"
    if step.objective.own_loss is not None:
        yield "a custom loss runs Python in every step"
    for name, one in step.collections.items():
        if type(one) is not EmbeddingCollection or one.gradient_watch is not None:
            yield f"the embedding collection {name!r} is sharded, or its gradients are watched"
    yield from _module_reasons(step)
    if (TrainStep.forward, TrainStep.backward) != _PHASES or vars(step).keys() & {"forward", "backward"}:
        yield "forward or backward of the step was replaced"
    if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in step.parameters.values()):
        yield "a weight has hooks on its gradient, which a replay does not run"


def is_trusted(code: object) -> bool:
    """Whether a class or function is torch.nn's or Viviane's, whose Python code depends on nothing but its arguments.

    Example:
        >>> is_trusted(nn.ReLU), is_trusted(print)
        (True, False)
    """
    return f"{getattr(code, '__module__', '')}.".startswith(_TRUSTED_PACKAGES)


def _module_reasons(step: TrainStep) -> Iterator[str]:
    for part in _dense_modules(step):
        kind = type(part)
        if not is_trusted(kind):
            yield f"a custom module ({kind.__name__}) runs Python in every step"
        if has_hooks([part]):
            yield f"a module ({kind.__name__}) has hooks, which a replay does not run"
        if not is_trusted(part.forward):
            yield f"the forward of a module ({kind.__name__}) was replaced"
        if part._compiled_call_impl is not None:
            yield f"a module ({kind.__name__}) is compiled by torch.compile"


def is_observed() -> bool:
    """Whether something wants to see modules, autograd or operators of this step."""
    return (
        are_recorded()
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
        or torch.is_anomaly_enabled()
        or torch.is_autocast_enabled("cpu")
        or not torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    )


def inputs_of(step: TrainStep, batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that a program reads, by name; the last one is where backward begins."""
    found = {"labels": batch.labels, "dense": batch.dense, "one_hot": batch.one_hot, "one": step.one}
    if batch.weight is not None:
        found["weight"] = batch.weight
    return found


def constants_of(step: TrainStep) -> dict[str, Tensor]:
    """Return the tensors that are the same objects in all steps, by name."""
    tensors = [*step.parameters.values(), *buffers_of(step)]
    return {f"c{i}": one for i, one in enumerate(tensors)}


def buffers_of(step: TrainStep) -> list[Tensor]:
    """Return the buffers of all modules outside of embedding collections."""
    return [one for part in _dense_modules(step) for one in part._buffers.values() if one is not None]


def collections_of(step: TrainStep) -> list[EmbeddingCollection]:
    """Return the embedding collections that are completely in this process."""
    return [one for one in step.collections.values() if isinstance(one, EmbeddingCollection)]


def _dense_modules(step: TrainStep) -> list[nn.Module]:
    """Return all modules outside of embedding collections, and those of the losses."""
    inside = {id(part) for one in step.collections.values() for part in one.modules()}
    losses = [part for term in step.objective.terms for part in term.loss.modules()]
    return [part for part in (*step.module.modules(), *losses) if id(part) not in inside]


def layout_of(tensor: Tensor | None) -> Hashable:
    """Return shape, strides and type of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
