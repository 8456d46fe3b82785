"""The exported program: tensors in, predictions out, traced from the model with its tables frozen.

Shapes: B rows of the batch, N dense values, F one-hot columns, L labels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from viviane.batch import Bag, Batch, Layout
from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.embedding import EmbeddingBag
from viviane.embedding.base import TableCollection
from viviane.embedding.module_parts import collections_of
from viviane.export.tables import FrozenCollection, FrozenEmbeddingBag, FrozenTables, GivenCollection, given
from viviane.model import GraphModule
from viviane.nn.next_item import NextItemSoftmax
from viviane.schema import Schema
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision

PrecisionName: TypeAlias = Literal["fp32", "bf16", "fp16"]
Kind: TypeAlias = Literal["dense", "one_hot", "values", "lengths", "weights", "vectors", "mask", "table"]
DATA_KINDS: Final = frozenset({"dense", "one_hot", "values", "lengths", "weights"})
"""Kinds of inputs that are made from columns of the data."""
BATCH = "batch"


class ProgramInput(Settings):
    """One input of a program.

    Args:
        name: "dense", "one_hot", "values/<column>", "lengths/<column>", "weights/<column>"; in a dense-only program
            "vectors/<embedding>" and "mask/<embedding>"; for tables outside the program "table/<embedding>.<n>.<what>".
        kind: kind of the input.
        dtype: type of its elements.
        shape: its sizes; "batch" is B, any other text a size of its own.
        columns: the data's columns that it contains, in order; for vectors, the features.
    """

    name: str
    kind: Kind
    dtype: Literal["float32", "float16", "bfloat16", "int64", "int32", "bool"]
    shape: tuple[int | str, ...]
    columns: tuple[str, ...] = Field(default=())

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its elements."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def data_inputs(schema: Schema) -> list[ProgramInput]:
    """Return the inputs for a batch's columns.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[
        ...     {"name": "c", "num_ids": 9}, {"name": "h", "num_ids": 9, "kind": "multi_hot"}])
        >>> [(one.name, one.shape) for one in data_inputs(schema)]
        [('dense', ('batch', 1)), ('one_hot', ('batch', 1)), ('values/h', ('values/h',)), ('lengths/h', ('batch',))]
    """
    found = []
    if schema.dense:
        names = tuple(column.name for column in schema.dense)
        found.append(
            ProgramInput(name="dense", kind="dense", dtype="float32", shape=(BATCH, schema.num_dense), columns=names)
        )
    if schema.one_hot:
        names = tuple(column.name for column in schema.one_hot)
        found.append(
            ProgramInput(name="one_hot", kind="one_hot", dtype="int64", shape=(BATCH, len(names)), columns=names)
        )
    for column in schema.bags:
        size, own = f"values/{column.name}", (column.name,)
        found.append(ProgramInput(name=size, kind="values", dtype="int64", shape=(size,), columns=own))
        found.append(
            ProgramInput(name=f"lengths/{column.name}", kind="lengths", dtype="int64", shape=(BATCH,), columns=own)
        )
        if column.weights is not None:
            found.append(
                ProgramInput(name=f"weights/{column.name}", kind="weights", dtype="float32", shape=(size,), columns=own)
            )
    return found


def batch_tensors(batch: Batch, inputs: Sequence[ProgramInput]) -> list[Tensor]:
    """Return the tensors of a batch for the inputs of its columns, in order."""
    found = []
    for one in inputs:
        if one.kind == "dense":
            found.append(batch.dense)
        elif one.kind == "one_hot":
            found.append(batch.one_hot.to(torch.int64))
        else:
            bag = batch.bags[one.columns[0]]
            parts = {"values": bag.values.to(torch.int64), "lengths": bag.lengths, "weights": bag.weights}
            part = parts[one.kind]
            if part is None:  # the schema has weights, but the rows have none: each id has weight 1
                part = torch.ones(len(bag.values), device=bag.values.device)
            found.append(part)
    return found


class Program(nn.Module):
    """A frozen model: called with its inputs in order, it returns predictions, (B, L), float32.

    Args:
        module: the model's module with replaced collections.
        objective: computes predictions from logits.
        schema: the data's columns.
        inputs: inputs in order.
        precision: precision of dense layers.
    """

    outputs: tuple[str, ...] = ("predictions",)
    """Names of the outputs of `forward`."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        schema: Schema,
        inputs: Sequence[ProgramInput],
        precision: PrecisionName = "fp32",
    ) -> None:
        super().__init__()
        self.module = module
        self.inputs = tuple(inputs)
        self.precision = precision
        self._objective = objective
        self._layout = Layout.of(schema)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return predictions, (B, L), float32."""
        named = {one.name: tensor for one, tensor in zip(self.inputs, tensors, strict=True)}
        batch = self._batch(named)
        with given(named), self._precision(batch.device):
            output = self.module(batch)
        predictions = self._objective.predictions(output, batch.size)
        return predictions.to(torch.float32)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision == "fp32" else Precision(self.precision).context(device)

    def _batch(self, named: Mapping[str, Tensor]) -> Batch:
        first = next(named[one.name] for one in self.inputs if one.shape[:1] == (BATCH,))
        size, layout = first.shape[0], self._layout
        width = sum(dim for _, dim in layout.dense)
        dense = named.get("dense")
        if dense is None:
            dense = first.new_zeros(size, width, dtype=torch.float32)
        one_hot = named.get("one_hot")
        if one_hot is None:
            one_hot = first.new_zeros(size, len(layout.one_hot), dtype=torch.int64)
        bags = {}
        for name in layout.bags:
            lengths = named.get(f"lengths/{name}")
            if lengths is None:
                nothing = first.new_zeros(0, dtype=torch.int64)
                bags[name] = Bag(nothing, first.new_zeros(size + 1, dtype=torch.int64))
                continue
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            values = named.get(f"values/{name}")
            if values is None:  # the program uses only their number
                values = first.new_zeros(0, dtype=torch.int64)
            bags[name] = Bag(values, offsets, named.get(f"weights/{name}"))
        labels = first.new_zeros(size, 0, dtype=torch.float32)
        return Batch(layout, labels, dense, one_hot, bags)

    def collections(self) -> list[FrozenCollection]:
        """Return the frozen collections inside."""
        return [part for part in self.modules() if isinstance(part, FrozenCollection)]

    def drop_unused(self, used: set[str]) -> None:
        """Keep only inputs that the program reads; inputs of a bag stay together, and one defines the number of rows.

        Args:
            used: names of the inputs that it reads.
        """
        bags = {name.partition("/")[2] for name in used if name.startswith(("values/", "lengths/"))}
        kept = [
            one
            for one in self.inputs
            if one.name in used or (one.kind in ("values", "lengths") and one.columns[0] in bags)
        ]
        if not any(one.shape[:1] == (BATCH,) for one in kept):
            kept.insert(0, next(one for one in self.inputs if one.shape[:1] == (BATCH,)))
        self.inputs = tuple(kept)

    def sizes(self) -> tuple[str, ...]:
        """Return the names of dynamic sizes."""
        return tuple(dict.fromkeys(size for one in self.inputs for size in one.shape if isinstance(size, str)))


def freeze(
    module: nn.Module,
    objective: Objective,
    schema: Schema,
    *,
    kernels: bool,
    precision: PrecisionName = "fp32",
    dense_only: bool = False,
    tables_outside: bool = False,
    dtype: torch.dtype | None = None,
    frozen: FrozenTables | None = None,
) -> Program:
    """Create the program of a trained module; tables share the module's memory, dense weights are copied.

    Args:
        module: maps a batch to logits.
        objective: objective of its trainer.
        schema: the data's columns.
        kernels: look up with the operators of `viviane.export.operators`; False: with torch's operators.
        precision: precision of dense layers.
        dense_only: the inputs are the vectors of the tables, and everything else that layers read.
        tables_outside: the tables are inputs, too.
        dtype: type of dense weights and vectors; None keeps theirs.
        frozen: copies of dynamic tables that programs of one model share; new copies are added.

    Raises:
        ConfigError: the module has a dynamic table outside a collection, an `EmbeddingBag` with `max_norm`, or
            tables sharded over processes.
    """
    memo: dict[int, Any] = {}
    replaced: list[FrozenCollection | GivenCollection] = []
    for name, collection in collections_of(module).items():
        one = (
            GivenCollection(collection, name)
            if dense_only
            else FrozenCollection(collection, name, kernels, {} if frozen is None else frozen)
        )
        if dtype is not None and isinstance(one, FrozenCollection):
            one.output_dtype = dtype
        memo[id(collection)] = one
        replaced.append(one)
    copied: nn.Module = copy.deepcopy(module, memo)
    _check_modules(copied)
    if isinstance(copied, GraphModule):
        # Names of nodes may collide with attributes of nn.Module, by which weights are looked up.
        copied._modules = {f"n{i}": part for i, part in enumerate(copied._modules.values())}
    for part in copied.modules():
        if isinstance(part, EmbeddingBag):
            if part.max_norm is not None:
                raise ConfigError(
                    "an EmbeddingBag with max_norm changes rows at lookups, and exported tables do not change",
                    value=part.max_norm,
                    fix="limit all rows first: bag.collection.limit_norms('bag', torch.arange(bag.num_embeddings), "
                    "bag.max_norm); bag.max_norm = None",
                )  # fmt: skip
            part.__class__ = FrozenEmbeddingBag
        elif isinstance(part, NextItemSoftmax):
            part.scores_only = True
    copied.eval().requires_grad_(False)
    if dtype is not None:
        for part in copied.modules():
            if not any(part is table for one in replaced for table in one.modules()):
                _cast(part, dtype)
    inputs = data_inputs(schema)
    if dense_only:
        inputs += [one for part in replaced if isinstance(part, GivenCollection) for one in _vector_inputs(part)]
    elif tables_outside:
        inputs += [one for part in replaced if isinstance(part, FrozenCollection) for one in _table_inputs(part)]
    return Program(copied, objective, schema, inputs, precision)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point():
            module._parameters[name] = nn.Parameter(parameter.to(dtype), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def _check_modules(module: nn.Module) -> None:
    from viviane.embedding import DynamicTable

    for name, part in module.named_modules():
        if isinstance(part, DynamicTable | TableCollection):
            raise ConfigError(
                "a table outside an embedding collection cannot be exported",
                where=f"submodule {name!r}",
                fix="look it up through an EmbeddingCollection with a DynamicTableConfig",
            )


def _vector_inputs(part: GivenCollection) -> list[ProgramInput]:
    names = tuple(part.features)
    found = [
        ProgramInput(
            name=f"vectors/{part.name}", kind="vectors", dtype="float32", shape=(BATCH, *part.shape), columns=names
        )
    ]
    if part.num_masked:
        masked = tuple(name for name, place in part.places.items() if place.is_concat)
        found.append(
            ProgramInput(
                name=f"mask/{part.name}", kind="mask", dtype="bool", shape=(BATCH, part.num_masked), columns=masked
            )
        )
    return found


def _table_inputs(collection: FrozenCollection) -> list[ProgramInput]:
    found = []
    for name, tensor in collection.move_outside().items():
        dtype: Any = str(tensor.dtype).removeprefix("torch.")
        found.append(ProgramInput(name=name, kind="table", dtype=dtype, shape=tuple(tensor.shape)))
    return found
