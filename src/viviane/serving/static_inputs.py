"""The inputs of a captured forward pass: one packed allocation on the host, one on the device, of the same layout.

Shapes: B rows of the captured size, N dense numbers, F one-hot features, H ids of a row in a bag, padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.ops.capture import branch
from viviane.ops.copies import Refill
from viviane.schema import Schema

_ALIGNED: Final = 256  # bytes
_WORD: Final = 16  # bytes that a kernel reads at once


@dataclass(frozen=True)
class Field:
    """One matrix of the inputs, a row for each row of the batch."""

    name: str
    width: int
    dtype: torch.dtype

    def num_bytes(self, size: int) -> int:
        """Return the bytes of `size` rows, rounded up to where the next field begins."""
        return -(-size * self.width * self.dtype.itemsize // _ALIGNED) * _ALIGNED


class InputLayout:
    """Which matrices a batch is packed into. Every bag has H places, and padding ids after its own.

    Args:
        schema: the columns; each bag has a hotness or a max_length.

    Example:
        >>> layout = InputLayout(Schema(dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}]))
        >>> [field.width for field in layout.fields], layout.num_bytes(100)
        ([1, 1], 1024)
    """

    def __init__(self, schema: Schema) -> None:
        self.batch_layout = Layout.of(schema)
        wide = any(column.dtype == "int64" for column in schema.one_hot)
        self.fields = [
            Field("dense", schema.num_dense, torch.float32),
            Field("one_hot", len(schema.one_hot), torch.int64 if wide else torch.int32),
        ]
        self.places: dict[str, int] = {}
        self._fixed = {column.name for column in schema.bags if column.hotness is not None}
        self.weighted = {column.name for column in schema.bags if column.weights is not None}
        for column in schema.bags:
            places = column.hotness or column.max_length
            assert places is not None
            self.places[column.name] = places
            self.fields.append(Field(f"ids {column.name}", places, getattr(torch, column.dtype)))
            if column.weights is not None:
                self.fields.append(Field(f"weights {column.name}", places, torch.float32))

    @staticmethod
    def prevented(schema: Schema) -> str | None:
        """Return the reason why a schema's batches have no such layout, or None."""
        for column in schema.bags:
            if column.hotness is None and column.max_length is None:
                return f"column {column.name!r} has neither hotness nor max_length"
            if column.hotness is None and column.num_ids is None:
                return f"column {column.name!r} holds raw ids, none of which is padding"
        return None

    def has_places_for(self, bags: Mapping[str, Bag]) -> bool:
        """Whether each row's ids and weights have their places; an eager pass says what is wrong, or pools others.

        Example:
            >>> column = {"name": "m", "num_ids": 9, "kind": "multi_hot", "max_length": 2}
            >>> layout = InputLayout(Schema(categorical=[column]))
            >>> [layout.has_places_for({"m": Bag.from_lists([row])}) for row in ([3, 4], [3, 4, 5])]
            [True, False]
        """
        for name, places in self.places.items():
            bag = bags[name]
            offsets, num_ids = bag.offsets.numpy(), len(bag.values)
            lengths = np.diff(offsets)
            least = places if name in self._fixed else 0
            if offsets[0] != 0 or offsets[-1] != num_ids or ((lengths < least) | (lengths > places)).any():
                return False
            if (bag.weights is not None) != (name in self.weighted):
                return False
            if bag.weights is not None and len(bag.weights) != num_ids:
                return False
        return True

    def matrices(self, batch: Batch) -> dict[str, Tensor] | None:
        """Return a batch's inputs as matrices, (B, width) each; None where types differ or a bag is not full.

        On a GPU one question is asked about all bags, and waited for.

        Example:
            >>> column = {"name": "m", "num_ids": 9, "kind": "multi_hot", "hotness": 2}
            >>> schema = Schema(categorical=[column])
            >>> batch = Batch.from_columns(schema, {"m": [[1, 2], [3, 4]]})
            >>> InputLayout(schema).matrices(batch)["ids m"].tolist()
            [[1, 2], [3, 4]]
        """
        size, found = batch.size, {"dense": batch.dense, "one_hot": batch.one_hot}
        for name, places in self.places.items():
            bag = batch.bags[name]
            weights = [] if bag.weights is None else [bag.weights]
            if len(weights) != (name in self.weighted) or any(
                len(one) != size * places for one in (bag.values, *weights)
            ):
                return None
            found[f"ids {name}"] = bag.values.view(size, places)
            if bag.weights is not None:
                found[f"weights {name}"] = bag.weights.view(size, places)
        if any(found[field.name].dtype != field.dtype for field in self.fields):
            return None  # an id cut to 32 bits would be another one
        if self.places:
            given = torch.stack([batch.bags[name].offsets for name in self.places])
            places_of_each = torch.tensor([*self.places.values()], device=given.device)
            if not torch.equal(given, places_of_each[:, None] * torch.arange(size + 1, device=given.device)):
                return None
        return found

    def num_bytes(self, size: int) -> int:
        """Return the bytes of a packed batch."""
        return sum(field.num_bytes(size) for field in self.fields)

    def views(self, memory: Tensor, size: int) -> dict[str, Tensor]:
        """Return the matrices of a packed batch of `size` rows, (size, width) each, as views of its bytes."""
        found, start = {}, 0
        for field in self.fields:
            used = size * field.width * field.dtype.itemsize
            found[field.name] = memory[start : start + used].view(field.dtype).view(size, field.width)
            start += field.num_bytes(size)
        return found

    def batch(self, views: Mapping[str, Tensor], size: int) -> Batch:
        """Return matrices as a batch without labels."""
        bags = {}
        for name, places in self.places.items():
            ids = views[f"ids {name}"]
            offsets = torch.arange(size + 1, device=ids.device) * places
            weights = views[f"weights {name}"].view(-1) if name in self.weighted else None
            bags[name] = Bag(ids.view(-1), offsets, weights)
        dense, one_hot = views["dense"], views["one_hot"]
        labels = torch.zeros(size, 0, device=dense.device)
        return Batch(self.batch_layout, labels, dense, one_hot, bags)


class HostInputs:
    """Page-locked memory of one captured size, which batches are packed into where they do not lie in such memory.

    Args:
        memory: bytes; page-locked where a GPU copies from them.
    """

    def __init__(self, layout: InputLayout, memory: Tensor, size: int) -> None:
        self.size, self._layout = size, layout
        views = layout.views(memory, size)
        self._arrays: dict[str, NDArray[Any]] = {name: view.numpy() for name, view in views.items()}
        self._dense, self._one_hot = self._arrays["dense"], self._arrays["one_hot"]

    def fill(self, batch: Batch, start: int, stop: int) -> None:
        """Pack rows [start, stop) of a batch; the rows after them keep what they held, whose results are not read."""
        count = stop - start
        if self._dense.shape[1]:
            self._dense[:count] = batch.dense.numpy()[start:stop]
        if self._one_hot.shape[1]:
            self._one_hot[:count] = batch.one_hot.numpy()[start:stop]
        for name, places in self._layout.places.items():
            self._fill_bag(name, places, batch.bags[name], start, stop)

    def _fill_bag(self, name: str, places: int, bag: Bag, start: int, stop: int) -> None:
        count = stop - start
        offsets = bag.offsets.numpy()[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        parts = [(f"ids {name}", bag.values)]
        if bag.weights is not None:
            parts.append((f"weights {name}", bag.weights))
        lengths = np.diff(offsets)
        full = last - first == count * places and bool((lengths == places).all())
        inside = None if full else np.arange(places) < lengths[:, None]
        for field, values in parts:
            flat = values.numpy()[first:last]
            if inside is None:
                self._arrays[field][:count] = flat.reshape(count, places)
            else:
                target = self._arrays[field][:count]
                target[...] = 0
                target[inside] = flat


class InputFill:
    """Copies inputs from page-locked memory by kernels; ids in the branch of the lookups, beside the first layers.

    Args:
        views: the inputs on the device.
        names: of the inputs; the dense numbers come first.
        words: where the inputs are at the time of a replay, on the device, (N,).
        overlaps: whether ids are copied in a branch.
    """

    def __init__(self, views: dict[str, Tensor], names: Sequence[str], words: Tensor, overlaps: bool) -> None:
        self._device = words.device
        split = 1 if overlaps and names[0] == "dense" else 0
        self._parts = [
            (Refill([views[name] for name in own]), words[first : first + len(own)])
            for first, own in ((0, names[:split]), (split, names[split:]))
            if own
        ]

    def __call__(self) -> None:
        """Copy what `words` names."""
        *front, (ids, words) = self._parts
        for refill, own in front:
            refill.fill(own)
        with branch(self._device, "lookup") if front else nullcontext():
            ids.fill(words)


def is_readable(tensor: Tensor, start: int, size: int) -> bool:
    """Whether `size` rows of a matrix from a row on lie as kernels read them: aligned, and no fewer.

    Rows past the last are read if they are in the same allocation, such as that of `InferenceSession.new_batch`.

    Example:
        >>> is_readable(torch.zeros(8, 4), 0, 8), is_readable(torch.zeros(8, 4), 1, 8)
        (True, False)
    """
    width = tensor.shape[1]
    if not width:
        return True
    first, item = tensor.storage_offset() + start * width, tensor.element_size()
    fits = tensor.is_contiguous() and (first + size * width) * item <= tensor.untyped_storage().nbytes()
    return fits and (tensor.data_ptr() + start * width * item) % _WORD == 0
