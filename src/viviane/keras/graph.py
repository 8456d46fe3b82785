"""A functional model around its table layers: what their keys are read from, and what follows their vectors.

Shapes: B rows of the batch, C columns of an input, W columns of a layer's lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import keras
import numpy as np
import torch

from viviane.batch import Batch
from viviane.core.errors import DataError
from viviane.keras.keys import refuse_cut
from viviane.keras.layer import TableLayer

_KEY_TYPES: Final = (np.dtype(np.int32), np.dtype(np.int64), torch.int32, torch.int64)
FunctionOf: TypeAlias = Callable[[Any], Callable[[list[Any]], list[Any]]]
"""Makes a function of tensors of a model without weights."""


@dataclass(frozen=True)
class Source:
    """Where keys come from: an input of the model, or a slice of one.

    Args:
        place: of the input.
        key: as in `input[key]`; None: the whole input.
    """

    place: int
    key: Any = None

    @property
    def columns(self) -> range | None:
        """The columns of a matrix that the slice takes, where it is `[:, i]` or `[:, i:j]`.

        Example:
            >>> Source(0, (slice(None), 2)).columns, Source(0, (slice(None), slice(1, 3))).columns
            (range(2, 3), range(1, 3))
        """
        if not isinstance(self.key, tuple) or len(self.key) != 2 or self.key[0] != slice(None):
            return None
        own = self.key[1]
        if isinstance(own, int):
            return range(own, own + 1) if own >= 0 else None
        if isinstance(own, slice) and own.step in (None, 1) and own.stop is not None:
            start = own.start or 0
            return range(start, own.stop) if 0 <= start < own.stop else None
        return None


class KeyReader:
    """Reads the keys of a model's table layers out of its inputs.

    Inputs and slices of them are taken from the arrays as they are given, before a backend can change a key; what else
    layers compute is computed by the backend.

    Args:
        model: functional or Sequential.
        layers: its table layers.
        function_of: how the backend computes.
    """

    def __init__(self, model: Any, layers: Sequence[TableLayer], function_of: FunctionOf) -> None:
        self._layers, self._tensors = layers, list(keras.tree.flatten(model.inputs))
        places = {id(tensor): i for i, tensor in enumerate(self._tensors)}
        slices = _slices_of(model, places)
        given = {key: Source(place) for key, place in places.items()} | slices
        sources = [keras.tree.flatten(layer.input) for layer in layers]
        computed = list({id(one): one for own in sources for one in own if id(one) not in given}.values())
        self._compute = function_of(keras.Model(self._tensors, computed)) if computed else None
        order = {id(one): i for i, one in enumerate(computed)}
        self._sources = [[given[id(one)] if id(one) in given else order[id(one)] for one in own] for own in sources]
        """By layer and input of it: a source, or the number of what is computed."""
        self._blocks = [_block(layer, own) for layer, own in zip(layers, self._sources, strict=True)]

    @property
    def num_inputs(self) -> int:
        """Inputs of the model."""
        return len(self._tensors)

    def batches(self, inputs: Sequence[Any]) -> list[tuple[Batch, tuple[int, ...]]]:
        """Return what each layer looks up, and the shape of its first input.

        Raises:
            DataError: an input that keys are sliced from has another shape than the model's.
        """
        computed = [] if self._compute is None else self._computed(inputs)
        sliced: dict[int, Any] = {}
        found: list[tuple[Batch, tuple[int, ...]]] = []
        for layer, sources, block in zip(self._layers, self._sources, self._blocks, strict=True):
            if block is not None:
                whole = self._array(inputs, sliced, block.place)
                if whole.dtype in _KEY_TYPES:
                    found.append((layer.matrix_batch(whole[block.key]), (len(whole),)))
                    continue
            keys = [
                computed[one] if isinstance(one, int) else _part(self._array(inputs, sliced, one.place), one.key)
                for one in sources
            ]
            found.append((layer.key_batch(keys), tuple(np.shape(keys[0]))))
        return found

    def _array(self, inputs: Sequence[Any], sliced: dict[int, Any], place: int) -> Any:
        """Return an input as an array of the shape that the model's has."""
        if place not in sliced:
            given = inputs[place]
            array = given if isinstance(given, np.ndarray | torch.Tensor) else np.asarray(given)
            sliced[place] = _fitted(array, self._tensors[place])
        return sliced[place]

    def _computed(self, inputs: Sequence[Any]) -> list[Any]:
        assert self._compute is not None
        for tensor, one in zip(self._tensors, inputs, strict=True):
            refuse_cut(one, f"input {tensor.name!r}")
        given = [keras.ops.convert_to_tensor(one) for one in inputs]
        return [keras.ops.convert_to_numpy(one) for one in self._compute(given)]


def _part(array: Any, key: Any) -> Any:
    return array if key is None else array[key]


def _slices_of(model: Any, places: dict[int, int]) -> dict[int, Source]:
    """Return the tensors of a model that are slices of its inputs, by their ids."""
    found = {}
    for operation in getattr(model, "operations", ()):
        if type(operation).__name__ != "GetItem" or not type(operation).__module__.startswith("keras."):
            continue
        for node in operation._inbound_nodes:
            arguments = [*node.arguments.args, *node.arguments.kwargs.values()]
            if len(arguments) == 2 and id(arguments[0]) in places and _is_plain(arguments[1]):
                key = tuple(arguments[1]) if isinstance(arguments[1], list) else arguments[1]
                found[id(node.output_tensors[0])] = Source(places[id(arguments[0])], key)
    return found


def _is_plain(key: Any) -> bool:
    """Whether a slice is the same in every framework."""
    parts = key if isinstance(key, tuple | list) else (key,)
    return all(
        one is None or one is Ellipsis or isinstance(one, int)
        or (isinstance(one, slice) and one.step in (None, 1)
            and all(end is None or isinstance(end, int) for end in (one.start, one.stop)))
        for one in parts
    )  # fmt: skip


def _block(layer: TableLayer, sources: Sequence[Source | int]) -> Source | None:
    """Return the slice that is the layer's whole matrix of keys, where its inputs are neighbouring columns."""
    order = layer.input_order()
    if order is None or len(order) != len(sources):
        return None
    first, stop, place = 0, -1, -1
    for number in order:
        source = sources[number]
        columns = source.columns if isinstance(source, Source) else None
        if columns is None or not isinstance(source, Source):
            return None
        if stop < 0:
            first, stop, place = columns.start, columns.start, source.place
        if source.place != place or columns.start != stop:
            return None
        stop = columns.stop
    return Source(place, (slice(None), slice(first, stop))) if stop - first == layer.columns.num_columns else None


def _fitted(array: Any, tensor: Any) -> Any:
    """Return an array with the rank of a model's input, as Keras makes it.

    Raises:
        DataError: it has another shape.
    """
    wanted, shape = tuple(tensor.shape), tuple(array.shape)
    if len(shape) == len(wanted) + 1 and shape[-1] == 1:
        return array[..., 0]
    if len(shape) == len(wanted) - 1 and wanted[-1] == 1:
        return array[..., None]
    same = len(shape) == len(wanted) and all(w is None or n == w for n, w in zip(shape[1:], wanted[1:], strict=True))
    if not same:
        raise DataError(
            "an input has another shape than the model's", where=f"input {tensor.name!r}", value=str(shape),
            allowed=str(wanted),
        )  # fmt: skip
    return array


class Rest:
    """A model from its inputs and the vectors of its table layers on.

    Where one `Concatenate` takes all vectors of a layer, in the order in which the lookup has them side by side, the
    lookup's matrix is its result.

    Args:
        model: functional or Sequential.
        layers: its table layers.
    """

    def __init__(self, model: Any, layers: Sequence[TableLayer]) -> None:
        self._layers = layers
        outputs = [keras.tree.flatten(layer.output) for layer in layers]
        self._joined = [_joined(model, layer, own) for layer, own in zip(layers, outputs, strict=True)]
        parts = [own if one is None else [one] for own, one in zip(outputs, self._joined, strict=True)]
        vectors = [one for part in parts for one in part]
        self.model = keras.Model([*keras.tree.flatten(model.inputs), *vectors], model.outputs)

    def __call__(self, inputs: Sequence[Any], flats: Sequence[Any], training: bool) -> Any:
        """Return the model's outputs.

        Args:
            inputs: of the model.
            flats: by layer, what its `step_input` gave, as tensors of the backend.
        """
        vectors: list[Any] = []
        for layer, joined, flat in zip(self._layers, self._joined, flats, strict=True):
            vectors += layer.outputs_of(flat) if joined is None else [flat]
        return self.model([*inputs, *vectors], training=training)


def _joined(model: Any, layer: TableLayer, outputs: Sequence[Any]) -> Any:
    """Return the tensor that is a layer's whole lookup, if there is one and nothing else takes a part of it."""
    order = layer.output_order()
    if order is None:
        return None
    own = {id(one) for one in outputs}
    if any(id(one) in own for one in model.outputs):
        return None
    takers = [
        node for operation in getattr(model, "operations", ()) for node in operation._inbound_nodes
        if any(id(one) in own for one in node.input_tensors)
    ]  # fmt: skip
    if len(takers) != 1 or type(takers[0].operation) is not keras.layers.Concatenate:
        return None
    [node] = takers
    join, wanted = node.operation, [id(outputs[i]) for i in order]
    same = join.axis in (-1, 1) and join.compute_dtype == layer.compute_dtype and join.activity_regularizer is None
    return node.output_tensors[0] if same and [id(one) for one in node.input_tensors] == wanted else None
