"""The lookup and the update as custom operators, which torch.compile leaves whole.

What a collection does reaches far outside a graph of tensors: rows live in storages, gradients wait there for a
step. torch.compile therefore sees operators, and a collection by its number:

    viviane::lookup          keys in; the output, masks, and in training a ticket out
    viviane::keep_gradients  its backward: hands the output's gradient to the storages
    viviane::step            the update
    viviane::limit_norms     looked-up rows are scaled to a largest norm
    viviane::norm_squared    the norm of what waits for it
    viviane::call            a method without arguments

They are registered as effects in order, so that none of them is dropped, merged with an equal one or moved past
another. What backward has to know of a lookup stays in Python under the ticket, and as long as the ticket lives: its
memory is a NumPy array's, so that the end of the tensor, wherever torch keeps it, is the end of the array.

torch keeps compiled graphs on disk for other processes. Whoever changes what an operator does gives it another name.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._library.effects import EffectType

from viviane.core.errors import VivianeError
from viviane.embedding.base import LocalCollection
from viviane.embedding.buffers import Buffers
from viviane.embedding.lookup import gather, hand_over, prepare
from viviane.embedding.lookup_spec import parse_spec
from viviane.embedding.table_storage import StorageLookup

_COLLECTIONS: weakref.WeakValueDictionary[int, LocalCollection] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_TICKETS: dict[int, _Open] = {}
_TAGS = (torch.Tag.cudagraph_unsafe,)  # a replayed CUDA graph would leave out what happens in Python


@dataclass(frozen=True)
class _Open:
    """A lookup that may still be differentiated."""

    parts: Sequence[StorageLookup]
    memory: Buffers


def new_number(collection: LocalCollection) -> int:
    """Return the number under which operators find a collection as long as it lives."""
    own = next(_NUMBERS)
    _COLLECTIONS[own] = collection
    return own


def collection_of(number: int) -> LocalCollection:
    """Return the collection of a number."""
    return _COLLECTIONS[number]


def _runs_for_a_graph() -> bool:
    """Return whether torch captures a CUDA graph, or runs a program once in the memory of the graph to come."""
    if not torch.cuda.is_available():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees and trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return manager is not None and torch.cuda.current_stream() == manager.stream


def _check_not_captured() -> None:
    # torch looks for the tag at the operator, and effects hide it there: a graph would be captured silently.
    if _runs_for_a_graph():
        raise VivianeError(
            "a compiled embedding collection cannot be captured in a CUDA graph: a replay would keep no gradients",
            fix="leave out mode='reduce-overhead' and 'max-autotune' ('max-autotune-no-cudagraphs' is fine)",
        )


def _ticket(opened: _Open) -> Tensor:
    own = next(_NUMBERS)
    array = np.array([own])
    _TICKETS[own] = opened
    weakref.finalize(array, _TICKETS.pop, own).atexit = False
    return torch.from_numpy(array)


@torch.library.custom_op(
    "viviane::lookup",
    mutates_args=(),
    schema="(Tensor? anchor, Tensor[] tensors, int collection, str spec) -> Tensor[]",
    tags=_TAGS,
)
def _lookup(anchor: Tensor | None, tensors: list[Tensor], collection: int, spec: str) -> list[Tensor]:
    _check_not_captured()
    own, known = _COLLECTIONS[collection], parse_spec(spec)
    size, parts, masks = own.resolve(known.batch(tensors), known.training)
    out = [gather(parts, size, own.width, own.output_buffers)]  # of the type that was traced
    out += [masks[name] for name, _ in known.masks]
    if known.training:
        prepare(parts, size, own.width)
        out.append(_ticket(_Open(parts, own.output_buffers)))
    return out


@_lookup.register_fake
def _(anchor: Tensor | None, tensors: list[Tensor], collection: int, spec: str) -> list[Tensor]:
    known = parse_spec(spec)
    size = known.num_rows(tensors)
    out = [tensors[0].new_empty(size, known.width, dtype=getattr(torch, known.dtype))]
    out += [tensors[0].new_empty(size, length, dtype=torch.bool) for _, length in known.masks]
    if known.training:
        out.append(torch.empty(1, dtype=torch.int64, device="cpu"))
    return out


@torch.library.custom_op(
    "viviane::keep_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor ticket) -> Tensor",
    tags=_TAGS,
)
def _keep_gradients(gradient: Tensor, ticket: Tensor) -> Tensor:
    _check_not_captured()
    try:
        opened = _TICKETS[int(ticket)]
    except KeyError:
        raise VivianeError(
            "the lookup to differentiate is gone: its saved tensors were copied and freed",
            fix="leave out saved_tensors_hooks, such as save_on_cpu, around a compiled embedding collection",
        ) from None
    # A copy: it waits for `step`, and by then a compiled graph has used the memory again.
    size, width = gradient.shape
    copy = opened.memory.take(size, width, gradient.device)
    hand_over(opened.parts, copy.copy_(gradient))
    return torch.zeros(1)


@_keep_gradients.register_fake
def _(gradient: Tensor, ticket: Tensor) -> Tensor:
    return torch.empty(1, device="cpu")


def _save(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.num_tensors = len(inputs[1])
    ctx.save_for_backward(output[-1])


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    (ticket,) = ctx.saved_tensors
    anchor = None if gradients[0] is None else torch.ops.viviane.keep_gradients(gradients[0], ticket)
    return anchor, [None] * ctx.num_tensors, None, None


_lookup.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    "viviane::step",
    mutates_args=(),
    schema="(int collection, float lr, float factor, float number, Tensor? scale) -> ()",
    tags=_TAGS,
)
def _step(collection: int, lr: float, factor: float, number: float, scale: Tensor | None) -> None:
    _check_not_captured()
    _COLLECTIONS[collection].step(lr, number if scale is None else scale, factor)


@_step.register_fake
def _(collection: int, lr: float, factor: float, number: float, scale: Tensor | None) -> None:
    pass


@torch.library.custom_op(
    "viviane::norm_squared", mutates_args=(), schema="(int collection, Device device) -> Tensor", tags=_TAGS
)
def _norm_squared(collection: int, device: torch.device) -> Tensor:
    return _COLLECTIONS[collection].grad_norm_squared()


@_norm_squared.register_fake
def _(collection: int, device: torch.device) -> Tensor:
    return torch.empty((), device=device)


@torch.library.custom_op("viviane::call", mutates_args=(), schema="(int collection, str method) -> ()", tags=_TAGS)
def _call(collection: int, method: str) -> None:
    getattr(_COLLECTIONS[collection], method)()


@_call.register_fake
def _(collection: int, method: str) -> None:
    pass


@torch.library.custom_op(
    "viviane::limit_norms",
    mutates_args=(),
    schema="(int collection, str table, Tensor ids, float max_norm, float norm_type) -> ()",
    tags=_TAGS,
)
def _limit_norms(collection: int, table: str, ids: Tensor, max_norm: float, norm_type: float) -> None:
    _check_not_captured()
    own: Any = _COLLECTIONS[collection]
    own.limit_norms(table, ids, max_norm, norm_type)


@_limit_norms.register_fake
def _(collection: int, table: str, ids: Tensor, max_norm: float, norm_type: float) -> None:
    pass


for _operator in (_lookup, _keep_gradients, _step, _norm_squared, _call, _limit_norms):
    _operator.register_effect(EffectType.ORDERED)
