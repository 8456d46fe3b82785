"""The one thing that passes from reader to loss: labels, dense numbers, ids.

Shapes: B rows of the batch, L labels, N dense numbers, F one-hot features, nnz ids of a bag feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import DataError, SchemaError, suggest
from viviane.core.tensors import check_mask, check_tensor, is_tensor, tensor_array
from viviane.core.whole_numbers import whole_numbers
from viviane.schema import Schema

_ALIGNED: Final = 256  # bytes


@dataclass(frozen=True)
class Bag:
    """Ids of one feature: row b of the batch holds values[offsets[b]:offsets[b + 1]].

    Args:
        values: ids, (nnz,), int32 or int64.
        offsets: (B + 1,), int64 or int32, from 0 to nnz, never falling.
        weights: (nnz,), float32, finite, or None where every id counts once.

    A collection checks all of this at each lookup: at once on the CPU; on a GPU offsets and weights are read by a
    kernel, and `check` and `step` raise what it found.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Number of ids of each row, (B,)."""
        return self.offsets.diff()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Bag:
        """Return the bag on another device."""
        return Bag(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Bag:
        """Return the bag in page-locked host memory."""
        return Bag(
            self.values.pin_memory(),
            self.offsets.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
        )

    @classmethod
    def from_lists(cls, rows: Any, dtype: torch.dtype = torch.int64, weights: Any = None) -> Bag:
        """Build from a list of lists.

        Example:
            >>> Bag.from_lists([[3, 4], [], [5]]).offsets.tolist()
            [0, 2, 2, 3]

        Raises:
            DataError: an id is no whole number, or does not fit the type; the weights are not one per id.
        """
        rows = _lists(rows, "ids of a bag")
        weights = None if weights is None else _lists(weights, "weights of a bag")
        lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        keys = whole_numbers([key for row in rows for key in row], str(dtype).removeprefix("torch."), "ids of a bag")
        if keys.ndim != 1:
            raise DataError("a bag is a list of ids, not of lists", where="ids of a bag", value=f"shape {keys.shape}")
        values = torch.from_numpy(keys)
        flat = None if weights is None else _weights(weights)
        if weights is not None and [len(row) for row in weights] != [len(row) for row in rows]:
            pairs = list(zip_longest(map(len, rows), map(len, weights)))
            row = next(n for n, (ids, own) in enumerate(pairs) if ids != own)
            ids, own = pairs[row]
            raise DataError(
                "a bag needs one weight per id", where=f"row {row}", value=f"{ids or 0} ids, {own or 0} weights"
            )
        return cls(values, lengths.cumsum(0), flat)


def _lists(rows: Any, where: str) -> list[Any]:
    """Return rows as a list of lists or arrays.

    Raises:
        DataError: a row is no list.
    """
    try:
        found = [tensor_array(row, where) if is_tensor(row) else row for row in rows]
        for row in found:
            check_mask(row, where)
            len(row)
    except TypeError as error:
        raise DataError("rows of bags are lists of lists", where=where, value=str(error)[:200]) from error
    return found


def _weights(rows: list[Any]) -> Tensor:
    try:
        return torch.tensor([float(w) for row in rows for w in row], dtype=torch.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError("weights must be numbers", where="weights of a bag", value=str(error)[:200]) from error


@dataclass(frozen=True)
class Layout:
    """The position of each column in a batch; made from a schema, shared by all its batches."""

    labels: tuple[str, ...]
    dense: tuple[tuple[str, int], ...]
    one_hot: tuple[str, ...]
    bags: tuple[str, ...]

    @classmethod
    def of(cls, schema: Schema) -> Layout:
        """Return the layout of a schema's batches."""
        return cls(
            labels=tuple(column.name for column in schema.labels),
            dense=tuple((column.name, column.dim) for column in schema.dense),
            one_hot=tuple(column.name for column in schema.one_hot),
            bags=tuple(column.name for column in schema.bags),
        )

    @cached_property
    def label_index(self) -> dict[str, int]:
        """Column of each label."""
        return {name: i for i, name in enumerate(self.labels)}

    @cached_property
    def one_hot_index(self) -> dict[str, int]:
        """Column of each one-hot feature."""
        return {name: i for i, name in enumerate(self.one_hot)}

    @cached_property
    def dense_slice(self) -> dict[str, slice]:
        """Columns of each dense feature."""
        result, start = {}, 0
        for name, dim in self.dense:
            result[name] = slice(start, start + dim)
            start += dim
        return result


@dataclass(frozen=True)
class Batch:
    """Rows of a data set, stacked.

    Args:
        layout: position of each column.
        labels: (B, L), float32; L may be 0 when predicting.
        dense: (B, N), float32.
        one_hot: ids of the one-hot features, (B, F), int32 or int64.
        bags: ids of the multi-hot and sequence features, by name.
        weight: sample weights, (B,), float32, or None.
        origin: where the rows came from, for messages.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> batch = Batch.from_columns(schema, {"y": [0, 1], "c": [3, 4]})
        >>> batch.label("y").tolist()
        [0.0, 1.0]
    """

    layout: Layout
    labels: Tensor
    dense: Tensor
    one_hot: Tensor
    bags: Mapping[str, Bag] = field(default_factory=dict)
    weight: Tensor | None = None
    origin: str = ""
    _ready: tuple[torch.cuda.Event, int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of rows, B."""
        return self.one_hot.shape[0]

    def __len__(self) -> int:
        return self.size

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.one_hot.device

    def label(self, name: str) -> Tensor:
        """Return one label, (B,), float32."""
        return self.labels[:, _look_up(self.layout.label_index, name, "label")]

    def dense_feature(self, name: str) -> Tensor:
        """Return one dense feature, (B, dim), float32."""
        return self.dense[:, _look_up(self.layout.dense_slice, name, "dense feature")]

    def bag(self, name: str) -> Bag:
        """Return any categorical feature as a bag; a one-hot feature has bags of one id."""
        if name in self.bags:
            return self.bags[name]
        column = _look_up(self.layout.one_hot_index, name, "categorical feature")
        offsets = torch.arange(self.size + 1, dtype=torch.int64, device=self.device)
        return Bag(self.one_hot[:, column].contiguous(), offsets)

    def _map(self, move: Any) -> Batch:
        return replace(
            self,
            labels=move(self.labels),
            dense=move(self.dense),
            one_hot=move(self.one_hot),
            bags={name: move(bag) for name, bag in self.bags.items()},
            weight=None if self.weight is None else move(self.weight),
        )

    def tensors(self) -> list[Tensor]:
        """Return labels, dense numbers, ids, weights, and the parts of bags."""
        parts = [self.labels, self.dense, self.one_hot]  # asked for several times a step
        if self.weight is not None:
            parts.append(self.weight)
        for bag in self.bags.values():
            parts += (bag.values, bag.offsets) if bag.weights is None else (bag.values, bag.offsets, bag.weights)
        return parts

    def ready_after(self, event: torch.cuda.Event) -> Self:
        """Declare that the tensors are on the GPU once this event completes, whatever its streams do until then.

        A step waits for it then; over several GPUs one that is replayed from a CUDA graph takes the batch over beside
        the update of the step before. It holds for this very object: a copy with other tensors, or tensors written to
        since, go without.

        Example:
            >>> import torch
            >>> schema = Schema(dense=[{"name": "x"}])
            >>> batch = Batch.from_columns(schema, {"x": [0.0, 1.0]})
            >>> if torch.cuda.is_available():
            ...     batch = batch.to("cuda")
            ...     event = torch.cuda.Event()
            ...     event.record()
            ...     batch = batch.ready_after(event)
        """
        object.__setattr__(self, "_ready", (event, self._versions()))
        return self

    @property
    def ready(self) -> torch.cuda.Event | None:
        """The event of `ready_after`; None: the tensors are there after all that the current stream was given."""
        if self._ready is None or self._ready[1] != self._versions():
            return None
        return self._ready[0]

    def wait(self) -> None:
        """Let the current stream wait until the tensors are there, and their memory live until it is done with them.

        Only where `ready_after` said when that is.
        """
        event = None if self._ready is None else self.ready
        if event is None:
            return
        stream = torch.cuda.current_stream(self.device.index)  # a number is looked up sooner than a device
        stream.wait_event(event)
        known: set[int] = set()
        for part in self.tensors():
            storage = part.untyped_storage().data_ptr()
            if storage not in known:  # a packed batch has one
                known.add(storage)
                part.record_stream(stream)

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy, or another process, gets: tensors of its own, which no event is about."""
        return {**self.__dict__, "_ready": None}

    def _versions(self) -> int:
        """Count how often the tensors were written to."""
        try:
            return sum([part._version for part in self.tensors()])
        except RuntimeError:  # tensors of inference mode do not count
            return sum([0 if part.is_inference() else part._version for part in self.tensors()])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on another device; itself where it is there already.

        A packed batch, whose tensors lie side by side in one allocation, is moved by one copy.
        """
        if self._is_on(torch.device(device)):
            return self
        packed = _packed_bytes(self.tensors())
        if packed is None:
            return self._map(lambda part: part.to(device, non_blocking=non_blocking))
        first = packed.data_ptr()
        there = packed.to(device, non_blocking=non_blocking)

        size = there.shape[0]
        typed: dict[torch.dtype, Tensor] = {}

        def move(part: Tensor) -> Tensor:
            each = part.element_size()
            whole = typed.get(part.dtype)
            if whole is None:
                whole = there[: size // each * each] if size % each else there
                whole = typed[part.dtype] = whole.view(part.dtype)
            start = part.data_ptr() - first if part.numel() else 0
            return whole.as_strided(part.shape, part.stride(), start // each)

        return self._map(lambda one: _map_bag(one, move) if isinstance(one, Bag) else move(one))

    def _is_on(self, device: torch.device) -> bool:
        """Whether this is where the tensors are; a GPU without a number is the current one."""
        own = self.device
        if own.type == "cuda" and str(device) == "cuda":
            return own.index == torch.cuda.current_device()
        return own == device

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory."""
        return self._map(lambda part: part.pin_memory())

    @classmethod
    def from_columns(cls, schema: Schema, columns: Mapping[str, Any], origin: str = "columns in memory") -> Batch:
        """Build a batch from arrays, tensors, lists or bags by column name; labels may be left out.

        Raises:
            SchemaError: a feature is missing or unknown, or lengths differ.
        """
        known = set(schema.column_names)
        for name in columns:
            if name not in known and name not in schema.ignored:
                raise SchemaError("no such column in the schema", where=origin, value=name, fix=suggest(name, known))
        layout = Layout.of(schema)
        needed = [name for name, _ in layout.dense] + list(layout.one_hot + layout.bags)
        for name in needed:
            if name not in columns:
                raise SchemaError("a column is missing", where=origin, value=name)
        has_labels = all(name in columns for name in layout.labels)
        rows = _num_rows(columns[needed[0]], needed[0], origin)
        for name in layout.bags:
            if _num_rows(columns[name], name, origin) != rows:
                where, value = f"{origin}, column {name!r}", _num_rows(columns[name], name, origin)
                raise SchemaError("columns differ in length", where=where, value=value, allowed=f"{rows} rows")
        wide = any(column.dtype == "int64" for column in schema.one_hot)
        ids = torch.int64 if wide else torch.int32
        dense = [
            _column(columns[name], torch.float32, rows, name, origin, dim).view(rows, dim) for name, dim in layout.dense
        ]
        labels = [_column(columns[name], torch.float32, rows, name, origin) for name in layout.labels if has_labels]
        one_hot = [_column(columns[name], ids, rows, name, origin) for name in layout.one_hot]
        weight = columns.get(schema.sample_weight) if schema.sample_weight else None
        return cls(
            layout=layout,
            labels=torch.stack(labels, 1) if labels else torch.zeros(rows, 0),
            dense=torch.cat(dense, 1) if dense else torch.zeros(rows, 0),
            one_hot=torch.stack(one_hot, 1) if one_hot else torch.zeros(rows, 0, dtype=ids),
            bags={
                column.name: _bag(
                    columns[column.name],
                    getattr(torch, column.dtype),
                    columns.get(column.weights) if column.weights else None,
                )
                for column in schema.bags
            },
            weight=None if weight is None else _column(weight, torch.float32, rows, "sample weight", origin),
            origin=origin,
        )


def _num_rows(values: Any, name: str, origin: str) -> int:
    if isinstance(values, Tensor):
        check_tensor(values, f"{origin}, column {name!r}", SchemaError)
    try:
        return len(values.offsets) - 1 if isinstance(values, Bag) else len(values)
    except TypeError:
        raise SchemaError("a column is no array", where=f"{origin}, column {name!r}", value=repr(values)[:80]) from None


def _bag(values: Any, dtype: torch.dtype, weights: Any) -> Bag:
    return values if isinstance(values, Bag) else Bag.from_lists(values, dtype, weights)


def _map_bag(bag: Bag, move: Callable[[Tensor], Tensor]) -> Bag:
    return Bag(move(bag.values), move(bag.offsets), None if bag.weights is None else move(bag.weights))


def _packed_bytes(parts: list[Tensor]) -> Tensor | None:
    """Return the bytes that tensors lie in, one beside the other at multiples of 256; None where they do not."""
    parts = [part for part in parts if part.numel()]
    if len(parts) < 2 or parts[0].device.type != "cpu":
        return None
    storage = parts[0].untyped_storage()
    base = storage.data_ptr()
    starts = [part.data_ptr() for part in parts]
    first, num_bytes = min(starts), 0
    last = first
    for part, start in zip(parts, starts, strict=True):
        size = part.nbytes
        if (start - first) % _ALIGNED or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != base:
            return None
        num_bytes += -(-size // _ALIGNED) * _ALIGNED
        last = max(last, start + size)
    if last - first > num_bytes:
        return None  # something else lies between them
    place, size = first - base, last - first
    return torch.empty(0, dtype=torch.uint8).set_(storage, place, (size,), (1,))


def _column(values: Any, dtype: torch.dtype, rows: int, name: str, origin: str, width: int = 1) -> Tensor:
    """Return a column as (rows * width,)."""
    where = f"{origin}, column {name!r}"
    if isinstance(values, Tensor):
        check_tensor(values, where, SchemaError)
    tensor = values if isinstance(values, Tensor) else _from_array(values, where)
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        found = tensor.shape[0] if tensor.dim() else "one number"
        raise SchemaError("columns differ in length", where=where, value=found, allowed=f"{rows} rows")
    if tensor.numel() != rows * width:
        allowed = f"({rows},)" if width == 1 else f"({rows}, {width})"
        raise SchemaError("a column has another shape", where=where, value=tuple(tensor.shape), allowed=allowed)
    tensor = tensor.reshape(-1)
    if not dtype.is_floating_point and (tensor.is_floating_point() or tensor.is_complex()) and rows:
        raise SchemaError("ids must be whole numbers", where=where, value=str(tensor.dtype))
    narrow = tensor.to(dtype)
    if not dtype.is_floating_point and tensor.dtype != dtype:
        wrong = narrow.to(tensor.dtype) != tensor  # 2^32 + 3 would become 3
        if not tensor.dtype.is_signed:  # 2^63 would become negative, and come back
            wrong = wrong | (narrow < 0)
        if bool(wrong.any()):
            value = tensor[wrong][0].cpu().numpy().item()
            raise SchemaError(f"an id does not fit {str(dtype).removeprefix('torch.')}", where=where, value=value)
    return narrow


def _from_array(values: Any, where: str) -> Tensor:
    """Return a tensor of numbers; torch knows neither text, objects nor numbers of another byte order."""
    check_mask(values, where, SchemaError)
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise SchemaError("a column is no array of numbers", where=where, value=str(error)[:200]) from None
    if array.dtype.kind not in "iufb":
        shown = f"{array.dtype}, such as {array.flat[0]!r:.80}" if array.size else str(array.dtype)
        fix = "clean rows as logged with the ETL (raw=True)"
        raise SchemaError("a column is no array of numbers", where=where, value=shown, fix=fix)
    if array.dtype.itemsize > 8 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else np.float64)
    return torch.from_numpy(array.copy())


def _look_up(index: dict[str, Any], name: str, kind: str) -> Any:
    try:
        return index[name]
    except KeyError:
        raise SchemaError(f"no such {kind} in the batch", value=name, fix=suggest(name, index)) from None
