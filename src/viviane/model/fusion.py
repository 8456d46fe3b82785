"""Layers of a graph that one operator computes together: the layers before and after an MLP.

A logit behind an MLP is one more layer of it. Pairs before it get a column of zeros where that makes their rows a
multiple of 16 bytes, which saves a copy of them forward and another backward. Results differ by rounding alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from viviane.nn.interaction import Interaction, InteractionParameters
from viviane.nn.linear import MLP, InnerProduct, has_hooks
from viviane.ops.dot_interaction import TableRows, dot_interaction
from viviane.ops.mlp import mlp, zeros_behind

Step: TypeAlias = tuple[nn.Module, tuple[int, ...], tuple[int, ...]]


class FusedMLP(nn.Module):
    """An MLP with the interaction before it and the fully connected layer behind it, where there are such.

    Where the fused operators do not serve, or one of the layers has hooks, they are called one by one.

    Args:
        pairs: whose output only the MLP reads, or None.
        deep: the MLP.
        last: that alone reads its output, or None.
    """

    def __init__(self, pairs: Interaction | None, deep: MLP, last: InnerProduct | None) -> None:
        super().__init__()
        # In a tuple nn.Module takes no notice of them: they are submodules of the graph already.
        self._parts = (pairs, deep, last)

    @property
    def pairs(self) -> Interaction | None:
        """The interaction before the MLP."""
        return self._parts[0]

    def forward(self, *inputs: Tensor | TableRows) -> Tensor:
        """Return what the last of the layers returns; for the interaction, embeddings may be given by their rows."""
        pairs, deep, last = self._parts
        outer = [one for one in self._parts if one is not None]
        like = inputs[-1].table if isinstance(inputs[-1], TableRows) else inputs[-1]
        if torch.compiler.is_compiling() or deep.unfused(like) is not None or has_hooks(outer):
            return self._one_by_one(*inputs)
        weights, biases, relu = deep.chain()
        if last is not None:
            weights, biases, relu = [*weights, last.weight], [*biases, last.bias], [*relu, False]
        if pairs is None:
            return mlp(cast(Tensor, inputs[0]), weights, biases, relu)
        settings = cast(InteractionParameters, pairs.settings)
        dense = cast(Tensor, inputs[0]) if len(inputs) == 2 else None
        pad = settings.pad or zeros_behind(weights[0].shape[1], like if dense is None else dense) == 1
        x = dot_interaction(dense, inputs[-1], pad=pad, itself=settings.self_interaction)
        return mlp(x, weights, biases, relu)

    def weights_to_pack(self) -> list[Tensor]:
        """Return the weights of all layers, then their biases; see `Layer.weights_to_pack`."""
        _, deep, last = self._parts
        own = deep.weights_to_pack()
        if last is None or not own:
            return own
        count = len(own) // 2
        return [*own[:count], last.weight, *own[count:], last.bias]

    def _one_by_one(self, *inputs: Tensor | TableRows) -> Tensor:
        pairs, deep, last = self._parts
        x: Tensor = cast(Tensor, inputs[0]) if pairs is None else pairs(*inputs)
        x = deep(x)
        return x if last is None else cast(Tensor, last(x))


def fuse(steps: Sequence[Step], outputs: Sequence[int]) -> list[Step]:
    """Return steps that give the same outputs, with MLPs and their neighbours put together.

    Args:
        steps: layer, slots it reads, slots it writes; in order.
        outputs: slots that are read in the end.
    """
    readers = Counter(slot for _, bottoms, _ in steps for slot in bottoms) + Counter(outputs)
    makers = {slot: i for i, (_, _, tops) in enumerate(steps) for slot in tops}
    by_reader = {slot: i for i, (_, bottoms, _) in enumerate(steps) for slot in bottoms if readers[slot] == 1}
    found: list[Step | None] = list(steps)
    for i, (deep, bottoms, tops) in enumerate(steps):
        if type(deep) is not MLP:
            continue
        before, behind = makers.get(bottoms[0]), by_reader.get(tops[0])
        pairs = steps[before][0] if before is not None and readers[bottoms[0]] == 1 else None
        last = steps[behind][0] if behind is not None and tops[0] not in outputs else None
        pairs = pairs if type(pairs) is Interaction else None
        last = last if type(last) is InnerProduct else None
        if pairs is None and last is None:
            continue
        place, reads, writes = i, bottoms, tops
        if pairs is not None and before is not None:
            reads, found[before] = steps[before][1], None
        if last is not None and behind is not None:
            found[i], place, writes = None, behind, steps[behind][2]
        found[place] = (FusedMLP(pairs, deep, last), reads, writes)
    return [one for one in found if one is not None]
