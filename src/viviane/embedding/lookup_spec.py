"""What a compiled lookup is, apart from its tensors.

A compiled graph must depend on nothing but its arguments, since torch keeps graphs on disk for other processes: all
that decides about shapes is spelled out here, and goes into the graph as text.

Shapes: B rows of the batch, L places of a "concat".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.embedding.jagged import Jagged


@dataclass(frozen=True)
class LookupSpec:
    """What a compiled lookup is, apart from its tensors.

    Args:
        one_hot: columns of a Batch's ids; None: the keys are no Batch.
        forms: what the tensors after them are, by feature: "ids", "bag", or "weighted" for a bag with weights.
        jagged: features of a KeyedJaggedTensor; None: the keys are none. Its form is `forms[""]`.
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

    def text(self) -> str:
        """Write it down.

        Example:
            >>> spec = LookupSpec(None, (("clicked", "bag"),), None, 8, "float32", (), True)
            >>> parse_spec(spec.text()) == spec
            True
        """
        return json.dumps(asdict(self))

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


def _take(form: str, rest: Iterator[Tensor]) -> Bag | Tensor:
    if form == "ids":
        ids: Tensor = next(rest)
        return ids
    # Copies: parts of them may be kept until the backward pass, when a compiled graph has used the memory again.
    values, offsets = next(rest), next(rest).clone()
    return Bag(values, offsets, next(rest).clone() if form == "weighted" else None)


@lru_cache(maxsize=256)
def parse_spec(text: str) -> LookupSpec:
    """Read what `LookupSpec.text` wrote."""
    fields = json.loads(text)
    for name in ("one_hot", "jagged"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    for name in ("forms", "masks"):
        fields[name] = tuple(tuple(pair) for pair in fields[name])
    return LookupSpec(**fields)
