"""Concatenation in place: a lookup leaves margins beside its vectors, and the other inputs are copied there.

This applies to a `Concat` that is the only reader of a lookup's vectors, as they are or flattened to rows. Without
margins at run time `torch.cat` is used; the result is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from viviane.embedding.wide_rows import Margins, WideRows
from viviane.model.fusion import Step
from viviane.nn.linear import has_hooks
from viviane.nn.registry import Layer
from viviane.nn.rows import BATCH, rows_of
from viviane.nn.shape import Concat, ConcatParameters, Reshape, ReshapeParameters


class ConcatInPlace(nn.Module):
    """A `Concat` whose other inputs go beside a lookup's vectors; if it has hooks, it is called itself.

    Args:
        concat: the layer.
        place: of the input that the lookup wrote.
    """

    def __init__(self, concat: Concat, place: int) -> None:
        super().__init__()
        self._concat = (concat,)  # in a tuple nn.Module takes no notice of it: it is a submodule of the graph already
        self._place = place

    def begin(self, wide: WideRows, *inputs: Any) -> None:
        """Put the other inputs beside the lookup's vectors, which are in progress, where all of them are there.

        Args:
            wide: the lookup's rows.
            inputs: of the layer; None: not there yet, as the vectors.
        """
        front, behind = inputs[: self._place], inputs[self._place + 1 :]
        if all(isinstance(one, Tensor) for one in (*front, *behind)):
            wide.put(front, behind)

    def forward(self, *inputs: Any) -> Tensor:
        """Return the joined tensor.

        Args:
            inputs: of the layer, and the lookup's rows, or None if the lookup has no margins.
        """
        parts: tuple[Tensor, ...] = inputs[:-1]
        wide: WideRows | None = inputs[-1]
        [concat] = self._concat
        joined = None if wide is None or has_hooks([concat]) else wide.join(parts, self._place)
        return cast(Tensor, concat(*parts)) if joined is None else joined


@dataclass(frozen=True)
class WidenedLookup:
    """A lookup that leaves margins.

    Args:
        slot: of its rows, a new one.
        margins: the columns that it leaves free.
    """

    slot: int
    margins: Margins


def plan_in_place_concats(
    steps: Sequence[Step], outputs: Sequence[int], lookups: Sequence[int], num_slots: int
) -> tuple[list[Step], dict[int, WidenedLookup]]:
    """Return steps that join beside lookups where that gives the same; and those lookups, by the slot of their vectors.

    Args:
        steps: layer, slots it reads, slots it writes; in order.
        outputs: slots that are read in the end.
        lookups: slots of vectors.
        num_slots: the first slot that is free.
    """
    readers = Counter(slot for _, bottoms, _ in steps for slot in bottoms) + Counter(outputs)
    by_reader = {slot: i for i, (_, bottoms, _) in enumerate(steps) for slot in bottoms if readers[slot] == 1}
    found = list(steps)
    widest: dict[int, tuple[int, int, int]] = {}  # by Concat: a lookup has room for the others, not each for each
    for lookup in lookups:
        end = _concat_of(steps, by_reader, lookup)
        if end is not None:
            at, place = end
            width = math.prod(cast(Layer, steps[at][0]).in_shapes[place])
            widest[at] = max(widest.get(at, (0, 0, 0)), (width, place, lookup))
    joined: dict[int, WidenedLookup] = {}
    for number, (at, (_, place, lookup)) in enumerate(widest.items(), num_slots):
        concat, bottoms, tops = steps[at]
        assert isinstance(concat, Concat)
        widths = [math.prod(shape) for shape in concat.in_shapes]
        joined[lookup] = WidenedLookup(number, Margins(sum(widths[:place]), sum(widths[place + 1 :])))
        found[at] = (ConcatInPlace(concat, place), (*bottoms, number), tops)
    return found, joined


def _concat_of(steps: Sequence[Step], by_reader: Mapping[int, int], slot: int) -> tuple[int, int] | None:
    """Return the step that joins a lookup's vectors, and their place there; None where others read them too."""
    while slot in by_reader:
        layer, bottoms, tops = steps[by_reader[slot]]
        if type(layer) is Concat:
            is_flat = cast(ConcatParameters, layer.settings).axis == 1
            of_batch = all(rows_of(shape) == BATCH for shape in layer.in_shapes)
            return (by_reader[slot], bottoms.index(slot)) if is_flat and of_batch else None
        if type(layer) is not Reshape or cast(ReshapeParameters, layer.settings).slots is not None:
            return None
        if rows_of(layer.out_shapes[0]) != BATCH:
            return None
        [slot] = tops
    return None
