"""The lookup and the update as custom operators, which torch.compile leaves whole.

What a collection does reaches far outside a graph of tensors: rows live in storages, gradients wait there for a
step. torch.compile therefore sees three operators, each named by the collection's number:

    viviane::lookup          keys in; the output, masks, and in training a ticket out
    viviane::keep_gradients  its backward: hands the output's gradient to the storages
    viviane::step            the update

They are registered as effects in order, so that none of them is dropped, merged with an equal one or moved past
another. What backward has to know of a lookup stays in Python under the ticket, and as long as the ticket lives: its
memory is a NumPy array's, so that the end of the tensor, wherever torch keeps it, is the end of the array.

A compiled graph must depend on nothing but its arguments, since torch keeps graphs on disk for other processes: all
that decides about shapes is spelled out in `spec`. Whoever changes what an operator does gives it another name.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._library.effects import EffectType

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError, VivianeError
from viviane.embedding.jagged import Jagged, is_keyed_jagged, read_keyed_jagged
from viviane.embedding.lookup import Part, hand_over, prepare

if TYPE_CHECKING:
    from viviane.embedding.collection import EmbeddingCollection

_COLLECTIONS: weakref.WeakValueDictionary[int, EmbeddingCollection] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_TICKETS: dict[int, _Open] = {}
# Without an input that requires grad, autograd would not call backward. Of one element: torch.compile computes
# nothing for the sake of an empty tensor. On the CPU wherever the tables are: its gradient is a zero for the host.
_ANCHOR = torch.zeros(1, device="cpu", requires_grad=True)


@dataclass(frozen=True)
class Spec:
    """What a compiled lookup is, apart from its tensors.

    Args:
        one_hot: columns of a Batch's ids; None: the keys are no Batch.
        forms: what the tensors after them are, by feature: "ids", "bag", or "weighted" for a bag with weights.
        jagged: features of a KeyedJaggedTensor; None: the keys are none. Its form stands in `forms` under "".
        width: of the output.
        dtype: of the output.
        masks: (name, L) of each "concat" feature.
        training: whether gradients are kept.
    """

    one_hot: tuple[str, ...] | None
    forms: tuple[tuple[str, str], ...]
    jagged: tuple[str, ...] | None
    width: int
    dtype: str
    masks: tuple[tuple[str, int], ...]
    training: bool

    def batch(self, tensors: Sequence[Tensor]) -> Batch | Mapping[str, Bag | Tensor] | Jagged:
        """Put together what the collection was called with."""
        rest = iter(tensors)
        one_hot = None if self.one_hot is None else next(rest)
        given = {name: _take(form, rest) for name, form in self.forms}
        if self.jagged is not None:
            whole = given[""]
            assert isinstance(whole, Bag)
            return Jagged(self.jagged, whole.values, whole.offsets, whole.weights)
        if one_hot is None:
            return given
        assert self.one_hot is not None
        bags = {name: bag for name, bag in given.items() if isinstance(bag, Bag)}
        nothing = one_hot.new_empty(len(one_hot), 0, dtype=torch.float32)
        return Batch(Layout((), (), self.one_hot, tuple(bags)), nothing, nothing, one_hot, bags)

    def num_rows(self, tensors: Sequence[Tensor]) -> Any:
        """Rows of the batch, B; symbolic while a graph is made."""
        if self.jagged is not None:
            return (tensors[1].shape[0] - 1) // len(self.jagged)
        is_bag = self.one_hot is None and self.forms[0][1] != "ids"
        return tensors[1].shape[0] - 1 if is_bag else tensors[0].shape[0]


def _take(form: str, rest: Any) -> Bag | Tensor:
    if form == "ids":
        ids: Tensor = next(rest)
        return ids
    # Copies: parts of them may be kept until the backward pass, when a compiled graph has used the memory again.
    values, offsets = next(rest), next(rest).clone()
    return Bag(values, offsets, next(rest).clone() if form == "weighted" else None)


@lru_cache(maxsize=256)
def _parse(text: str) -> Spec:
    fields = json.loads(text)
    for name in ("one_hot", "jagged"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    for name in ("forms", "masks"):
        fields[name] = tuple(tuple(pair) for pair in fields[name])
    return Spec(**fields)


@dataclass(frozen=True)
class _Open:
    """A lookup that may still be differentiated."""

    parts: Sequence[Part]


def number(collection: EmbeddingCollection) -> int:
    """Return the number under which operators find a collection as long as it lives."""
    own = next(_NUMBERS)
    _COLLECTIONS[own] = collection
    return own


def _ticket(opened: _Open) -> Tensor:
    own = next(_NUMBERS)
    array = np.array([own])
    _TICKETS[own] = opened
    weakref.finalize(array, _TICKETS.pop, own).atexit = False
    return torch.from_numpy(array)


# Operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "viviane::lookup",
    mutates_args=(),
    schema="(Tensor? anchor, Tensor[] tensors, int collection, str spec) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _lookup(anchor: Tensor | None, tensors: list[Tensor], collection: int, spec: str) -> list[Tensor]:
    own, known = _COLLECTIONS[collection], _parse(spec)
    size, parts, masks = own.resolve(known.batch(tensors), known.training)
    out = [own.gather(parts, size)]
    out += [masks[name] for name, _ in known.masks]
    if known.training:
        prepare(parts)
        out.append(_ticket(_Open(parts)))
    return out


@_lookup.register_fake
def _(anchor: Tensor | None, tensors: list[Tensor], collection: int, spec: str) -> list[Tensor]:
    known = _parse(spec)
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
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _keep_gradients(gradient: Tensor, ticket: Tensor) -> Tensor:
    try:
        opened = _TICKETS[int(ticket)]
    except KeyError:
        raise VivianeError(
            "the lookup to differentiate is gone: its saved tensors were copied and freed",
            fix="leave out saved_tensors_hooks, such as save_on_cpu, around a compiled embedding collection",
        ) from None
    # A copy: it waits for `step`, and by then a compiled graph has used the memory again.
    hand_over(opened.parts, gradient.clone(memory_format=torch.contiguous_format))
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
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _step(collection: int, lr: float, factor: float, number: float, scale: Tensor | None) -> None:
    _COLLECTIONS[collection].step(lr, number if scale is None else scale, factor)


@_step.register_fake
def _(collection: int, lr: float, factor: float, number: float, scale: Tensor | None) -> None:
    pass


for _operator in (_lookup, _keep_gradients, _step):
    _operator.register_effect(EffectType.ORDERED)


# What torch.compile traces ----------------------------------------------------------------------------------


def compiled_lookup(
    collection: int, batch: Any, features: Sequence[str], training: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Look a batch up from inside torch.compile; return the flat output and the masks.

    Args:
        collection: its number.
        batch: as `EmbeddingCollection.forward` takes it.
        features: names, in the collection's order.
        training: whether gradients are kept.
    """
    tensors: list[Tensor] = []
    forms: list[tuple[str, str]] = []
    one_hot = jagged = None
    if isinstance(batch, Batch):
        one_hot = batch.layout.one_hot
        tensors.append(batch.one_hot)
        given: Mapping[str, Bag | Tensor] = batch.bags
    elif is_keyed_jagged(batch):
        whole = read_keyed_jagged(batch, starts=False)
        jagged, given, features = whole.names, {"": Bag(whole.values, whole.offsets, whole.weights)}, ("",)
    else:
        given = batch
    for name in features:
        if name in given:
            keys = given[name]
            if isinstance(keys, Bag):
                tensors += (
                    [keys.values, keys.offsets] if keys.weights is None else [keys.values, keys.offsets, keys.weights]
                )
                forms.append((name, "bag" if keys.weights is None else "weighted"))
            else:
                tensors.append(keys)
                forms.append((name, "ids"))
    spec, masks = _describe(collection, one_hot, tuple(forms), jagged, training)
    out = torch.ops.viviane.lookup(_ANCHOR if training else None, tensors, collection, spec)
    return out[0], {name: out[1 + i] for i, name in enumerate(masks)}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _describe(
    collection: int,
    one_hot: tuple[str, ...] | None,
    forms: tuple[tuple[str, str], ...],
    jagged: tuple[str, ...] | None,
    training: bool,
) -> tuple[str, tuple[str, ...]]:
    own = _COLLECTIONS[collection]
    if not forms and one_hot is None:
        raise DataError("the batch lacks every feature", value=", ".join(own.features))
    masks = tuple((f.name, f.num_places) for f in own.features.values() if f.combiner == "concat")
    dtype = str(own.output_dtype).removeprefix("torch.")
    spec = Spec(one_hot, forms, jagged, own.width, dtype, masks, training)
    return json.dumps(asdict(spec)), tuple(name for name, _ in masks)


def compiled_step(collection: int, lr: float, scale: float | Tensor, factor: float) -> None:
    """Update from inside torch.compile."""
    number, tensor = (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
    torch.ops.viviane.step(collection, lr, factor, number, tensor)
