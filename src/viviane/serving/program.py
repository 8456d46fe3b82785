"""A graph's forward pass on the CPU without Python between its layers, with the bits of the layers called one by one.

Lookups, fully connected layers, interactions, cross layers and concatenations become steps of one native call
(`viviane.ops.programs`). Other layers are called as they are, between two such calls.

Shapes: B rows of a batch, at most C; a tensor of W numbers a row is a buffer (C, W), or columns of a wider one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Batch, Layout
from viviane.embedding import EmbeddingCollection
from viviane.embedding.lookup import OneHotPlan
from viviane.model.module import GraphModule, Structure
from viviane.nn.basic import Add, ReduceSum
from viviane.nn.cross import FmOrder2, MultiCross, MultiCrossParameters, WeightMultiply
from viviane.nn.interaction import Interaction, InteractionParameters
from viviane.nn.linear import MLP, InnerProduct, has_hooks
from viviane.nn.registry import Layer
from viviane.nn.rows import BATCH, rows_of
from viviane.nn.shape import Concat, ConcatParameters, Reshape, ReshapeParameters
from viviane.ops.programs import reason
from viviane.serving.forward import Forward
from viviane.serving.program_steps import Packed, Steps


@dataclass(eq=False)  # one tensor, one place: their numbers are not compared
class Place:
    """Where a tensor of W numbers a row is: columns of a buffer, or the batch's own dense numbers (buffer None)."""

    buffer: Tensor | None
    column: int
    width: int
    stride: int

    def view(self, size: int, shape: tuple[int, ...]) -> Tensor:
        """Return the first B rows, (B, *shape)."""
        assert self.buffer is not None
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return self.buffer.as_strided((size, *shape), (self.stride, *strides), self.column)

    @property
    def address(self) -> int:
        """Where the first number is."""
        assert self.buffer is not None
        return self.buffer.data_ptr() + 4 * self.column


def prevented(module: object, layout: Layout) -> str | None:
    """Return the reason why a module cannot run as a program, or None."""
    if not isinstance(module, GraphModule):
        return "the model is a torch module of its own"
    if why := reason():
        return why
    structure = module.structure
    if structure.num_others or layout.bags:
        return "the model reads bags, masks or ids"
    for _, collection in structure.lookups:
        if not isinstance(collection, EmbeddingCollection) or collection.one_hot_plans(layout.one_hot) is None:
            return "a table is dynamic"
    if any(widths != layout.dense for _, widths in structure.dense):
        return "a layer reads some of the dense columns"
    return None


class Program:
    """Computes the predictions of batches of one layout; one thread at a time.

    Args:
        module: for which `prevented` gave None, in eval mode, on the CPU, in float32.
        forward: what makes predictions of logits, where that is not one sigmoid.
        packed: packed weights, which the programs of one model share.
        capacity: C to begin with; it grows with the batches.
        rounds_layers: whether large layers are computed in 8 bits.
    """

    def __init__(
        self, module: GraphModule, layout: Layout, id_dtype: torch.dtype, forward: Forward, packed: Packed,
        capacity: int = 64, *, rounds_layers: bool = False,
    ) -> None:  # fmt: skip
        self._rounds_layers = rounds_layers
        self._structure, self._layout, self._id_dtype = module.structure, layout, id_dtype
        self._forward, self._packed = forward, packed
        self._build(capacity)

    def _build(self, capacity: int) -> None:
        self._capacity = capacity
        shift = self._forward.sigmoid_shift
        steps = Steps(capacity, self._id_dtype, self._packed, rounds_layers=self._rounds_layers)
        plan = _Planner(self._structure, self._layout, steps, capacity, shift)
        self._segments, self._places, self._steps = plan.segments, plan.places, plan.steps
        places = [plan.places[slot] for slot in self._structure.outputs]
        self._outputs = [place.view(capacity, (place.width,)) for place in places]
        self._scores = None if plan.scores is None else plan.scores.numpy()
        # Autograd has to be off for layers of the module; steps it never sees.
        self.calls_torch = plan.scores is None or any(step is not None for _, _, step in plan.segments)

    def __call__(self, batch: Batch) -> NDArray[np.float32] | None:
        """Return the predictions, (B, L); None where a key is out of its table's range."""
        size = batch.size
        if size > self._capacity:
            self._build(1 << (size - 1).bit_length())
        dense, _kept = self._steps.begin(size, batch.dense, batch.one_hot)
        for first, count, step in self._segments:
            if step is None:
                self._steps.run(first, count)
            else:
                layer, reads, writes = step
                results = layer.forward(*[self._view(slot, shape, size, dense) for slot, shape in reads])
                for (slot, shape), result in zip(writes, results if len(writes) > 1 else [results], strict=True):
                    self._view(slot, shape, size, dense).copy_(result)
        if self._steps.found_bad_key():
            return None
        if self._scores is not None:
            return self._scores[:size].copy()
        logits = [one[:size] for one in self._outputs]
        scores: NDArray[np.float32] = self._forward.predictions(
            logits[0] if len(logits) == 1 else torch.cat(logits, 1)
        ).numpy()
        return scores

    def _view(self, slot: int, shape: tuple[int, ...], size: int, dense: Tensor) -> Tensor:
        place = self._places[slot]
        return dense if place.buffer is None else place.view(size, shape)


Shaped = tuple[int, tuple[int, ...]]
Segment = tuple[int, int, tuple[Layer, list[Shaped], list[Shaped]] | None]


class _Planner:
    """Settles where every tensor is, and writes the steps."""

    def __init__(self, structure: Structure, layout: Layout, steps: Steps, capacity: int, shift: float | None) -> None:
        self.structure, self.layout, self.steps, self.capacity = structure, layout, steps, capacity
        self.places: dict[int, Place] = {}
        self.segments: list[Segment] = []
        self._first = 0
        self._readers = Counter(slot for _, bottoms, _ in structure.steps for slot in bottoms)
        self._readers.update(structure.outputs)
        num_dense = sum(dim for _, dim in layout.dense)
        for slot, _ in structure.dense:
            self.places[slot] = Place(None, 0, num_dense, num_dense)
        for slot, collection in structure.lookups:
            self._lookup(slot, cast(EmbeddingCollection, collection))
        for layer, bottoms, tops in structure.steps:
            self._step(cast(Layer, layer), bottoms, tops)
        self.scores = None if shift is None else self._probabilities(shift)
        self._close()
        steps.settle()

    def _probabilities(self, shift: float) -> Tensor:
        outputs = [self._whole(self.places[slot]) for slot in self.structure.outputs]
        width = sum(place.width for place in outputs)
        scores, column = self._new(width), 0
        for place in outputs:
            to = scores.address + 4 * column
            self.steps.probabilities(place.address, place.stride, to, width, place.width, shift)
            column += place.width
        return scores.view(self.capacity, (width,))

    def _new(self, width: int) -> Place:
        buffer = torch.empty(self.capacity * max(width, 1))
        self.steps.keep(buffer)
        return Place(buffer, 0, width, width)

    def _lookup(self, slot: int, collection: EmbeddingCollection) -> None:
        joined = self._concat_of(slot)
        place = self._new(collection.width)
        if joined is not None:  # written where the concatenation wants it
            concat, position = joined
            widths = [math.prod(shape) for shape in concat.in_shapes]
            whole = self._new(sum(widths))
            place = Place(whole.buffer, sum(widths[:position]), collection.width, whole.width)
        self.places[slot] = place
        for plan in cast(tuple[OneHotPlan, ...], collection.one_hot_plans(self.layout.one_hot)):
            self.steps.lookup(plan, place.address, place.stride)

    def _concat_of(self, slot: int) -> tuple[Concat, int] | None:
        """Return the concatenation that alone reads a lookup's vectors, maybe flattened, and their place in it."""
        while self._readers[slot] == 1:
            found = next(((a, b, c) for a, b, c in self.structure.steps if slot in b), None)
            if found is None:
                return None
            layer, bottoms, tops = found
            if type(layer) is Concat and self._is_flat(layer):
                return layer, bottoms.index(slot)
            if not self._is_alias(layer):
                return None
            [slot] = tops
        return None

    @staticmethod
    def _is_flat(layer: Concat) -> bool:
        return cast(ConcatParameters, layer.settings).axis == 1 and all(rows_of(s) == BATCH for s in layer.in_shapes)

    @staticmethod
    def _is_alias(layer: object) -> bool:
        """Whether a layer only looks at a row's numbers in another shape."""
        return (
            type(layer) is Reshape
            and cast(ReshapeParameters, layer.settings).slots is None
            and all(rows_of(shape) == BATCH for shape in (*layer.in_shapes, *layer.out_shapes))
        )

    def _step(self, layer: Layer, bottoms: tuple[int, ...], tops: tuple[int, ...]) -> None:
        places = [self.places[slot] for slot in bottoms]
        if self._is_alias(layer):
            self.places[tops[0]] = places[0]
        elif has_hooks([layer]):
            self._call(layer, bottoms, tops)
        elif type(layer) is Concat and self._is_flat(layer):
            self._concat(places, tops[0])
        elif type(layer) is MLP and layer.weights_to_pack():
            weights, biases, relu = layer.chain()
            place = places[0]
            for weight, bias, positive in zip(weights, biases, relu, strict=True):
                assert bias is not None
                place = self._linear(place, weight, bias, positive)
            self.places[tops[0]] = place
        elif type(layer) is InnerProduct and len(layer.in_shapes[0]) == 1:
            self.places[tops[0]] = self._linear(places[0], layer.weight, layer.bias, relu=False)
        elif type(layer) in (Add, ReduceSum, WeightMultiply, FmOrder2):
            self._small_step(layer, places, bottoms, tops)
        elif type(layer) is Interaction and self._interacts(places):
            self._interaction(layer, places, tops[0])
        elif type(layer) is MultiCross and layer.weights_to_pack():
            self._cross(layer, places[0], tops[0])
        else:
            self._call(layer, bottoms, tops)

    def _small_step(self, layer: Layer, places: list[Place], bottoms: tuple[int, ...], tops: tuple[int, ...]) -> None:
        x = places[0]
        if isinstance(layer, Add):
            self._add(places, tops[0])
        elif isinstance(layer, ReduceSum) and layer.sums_rows:
            self.places[tops[0]] = self._linear(x, torch.ones(1, x.width), torch.zeros(1), relu=False)
        elif isinstance(layer, WeightMultiply):
            self.places[tops[0]] = out = self._new(math.prod(layer.out_shapes[0]))
            self.steps.scaled_vectors(self._address(x), x.stride, layer.weight, out.address, out.stride)
        elif isinstance(layer, FmOrder2):
            [dim] = layer.out_shapes[0]
            x, self.places[tops[0]] = self._whole(x), self._new(dim)
            shape, out = (x.width // dim, dim), self.places[tops[0]]
            self.steps.pair_sums(x.address, self._new(dim).address, out.address, shape)
        else:
            self._call(layer, bottoms, tops)

    def _call(self, layer: Layer, bottoms: tuple[int, ...], tops: tuple[int, ...]) -> None:
        self._close()
        reads = list(zip(bottoms, layer.in_shapes, strict=True))
        for slot, shape in zip(tops, layer.out_shapes, strict=True):
            self.places[slot] = self._new(math.prod(shape))
        self.segments.append((0, 0, (layer, reads, list(zip(tops, layer.out_shapes, strict=True)))))

    def _close(self) -> None:
        if self.steps.count > self._first:
            self.segments.append((self._first, self.steps.count - self._first, None))
            self._first = self.steps.count

    def _address(self, place: Place) -> int | None:
        return None if place.buffer is None else place.address

    def _concat(self, places: list[Place], top: int) -> None:
        there = next((p for p in places if p.buffer is not None and p.stride == sum(q.width for q in places)), None)
        own = there is not None and there.column == sum(p.width for p in places[: places.index(there)])
        width = sum(place.width for place in places)
        whole = Place(there.buffer, 0, width, width) if there is not None and own else self._new(width)
        column = 0
        for place in places:
            if not (own and place is there):
                self.steps.copy(self._address(place), place.stride, whole.address + 4 * column, width, place.width)
            column += place.width
        self.places[top] = whole

    def _linear(
        self, x: Place, weight: Tensor, bias: Tensor, relu: bool, cross: tuple[Place, Place] | None = None
    ) -> Place:
        out = self._new(len(weight))
        crossed = None if cross is None else (cross[0].address, cross[1].address)
        self.steps.linear(self._address(x), x.stride, weight, bias, out.address, relu=relu, crossed=crossed)
        return out

    @staticmethod
    def _interacts(places: list[Place]) -> bool:
        return all(place.buffer is not None and place.stride == place.width for place in places)

    def _interaction(self, layer: Interaction, places: list[Place], top: int) -> None:
        settings = cast(InteractionParameters, layer.settings)
        count, dim = layer.in_shapes[-1]
        out = self._new(math.prod(layer.out_shapes[0]))
        dense = places[0].address if len(places) == 2 else 0
        self.steps.interaction(
            dense, places[-1].address, out.address, (count, dim), pad=settings.pad, itself=settings.self_interaction
        )
        self.places[top] = out

    def _whole(self, x: Place) -> Place:
        """Return a place whose rows lie side by side."""
        if x.buffer is not None and x.stride == x.width:
            return x
        whole = self._new(x.width)
        self.steps.copy(self._address(x), x.stride, whole.address, x.width, x.width)
        return whole

    def _add(self, places: list[Place], top: int) -> None:
        total, out = places[0], self._new(places[0].width)
        for one in places[1:]:
            self.steps.add(
                self._address(total), total.stride, self._address(one), one.stride, out.address, out.width
            )  # fmt: skip
            total = out
        self.places[top] = out

    def _cross(self, layer: MultiCross, x: Place, top: int) -> None:
        settings = cast(MultiCrossParameters, layer.settings)
        first = x = self._whole(x)
        for index, (weight, bias) in enumerate(zip(layer.weights, layer.biases, strict=True)):
            u = x
            if settings.projection_dim:
                projection = layer.projections[index]
                u = self._linear(x, projection, torch.zeros(len(projection)), relu=False)
            x = self._linear(u, weight, bias, relu=False, cross=(first, x))
        self.places[top] = x
