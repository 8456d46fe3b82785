"""Conversion of HugeCTR's graph to a Viviane model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import viviane.config as settings
from viviane.compat.hugectr.capacity import fitting_slots, free_bytes, slots_with_keys
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.collection_graph import CollectionNodes, collection_slots
from viviane.compat.hugectr.columns import Columns, columns_of
from viviane.compat.hugectr.enums import Embedding_t
from viviane.compat.hugectr.inputs import DataReaderParams, Input, SparseEmbedding
from viviane.compat.hugectr.layers import DenseLayer
from viviane.compat.hugectr.processes import num_processes
from viviane.compat.hugectr.sharding import plan_of
from viviane.compat.hugectr.solver import OptParams, Solver
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicOptions, UniformInit
from viviane.model import Input as InputNode
from viviane.model import Model, TableOptions
from viviane.model import SparseEmbedding as EmbeddingNode


@dataclass(frozen=True)
class Graph:
    """The objects that a script added: an Input, embeddings and layers, in order."""

    given: Input
    embeddings: tuple[SparseEmbedding, ...]
    collections: tuple[EmbeddingCollectionConfig, ...]
    layers: tuple[DenseLayer, ...]
    added: tuple[SparseEmbedding | EmbeddingCollectionConfig | DenseLayer, ...]

    @classmethod
    def of(cls, added: Sequence[Any]) -> Graph:
        """Sort the added objects.

        Raises:
            ConfigError: the graph does not begin with an Input, or has two.
        """
        if not added or not isinstance(added[0], Input):
            raise ConfigError("a graph must begin with an Input", fix="model.add(hugectr.Input(...)) first")
        if any(isinstance(one, Input) for one in added[1:]):
            raise ConfigError("a graph must have one Input", fix="put several labels and sparse parameters into it")
        embeddings = tuple(one for one in added if isinstance(one, SparseEmbedding))
        layers = tuple(one for one in added if isinstance(one, DenseLayer))
        collections = tuple(one for one in added if isinstance(one, EmbeddingCollectionConfig))
        return cls(added[0], embeddings, collections, layers, tuple(added[1:]))


def build_model(
    graph: Graph,
    solver: Solver,
    reader: DataReaderParams,
    optimizer: OptParams,
    loss_weights: dict[str, float] | None,
    trainer: settings.Solver,
    memory_of: Callable[[Columns], Mapping[str, int]] | None = None,
) -> tuple[Model, Columns]:
    """Return the compiled model, and the columns of its data.

    Args:
        memory_of: returns the memory of tables that are trained in passes; None: without passes.

    Raises:
        ConfigError, SchemaError: the graph is invalid; names the layer or tensor.
    """
    for one in graph.collections:
        one.check_plan()
    model, columns = _assembled(graph, solver, reader, optimizer, trainer, memory_of)
    model.compile(optimizer.to_dense(), loss_weights=loss_weights)
    return model, columns


def describe_graph(
    graph: Graph, solver: Solver, reader: DataReaderParams, optimizer: OptParams, trainer: settings.Solver
) -> Model:
    """Return the uncompiled model of a graph, whose summary has layers and shapes.

    Raises:
        ConfigError, SchemaError, DataError: see `build_model`.
    """
    return _assembled(graph, solver, reader, optimizer, trainer)[0]


def _assembled(
    graph: Graph,
    solver: Solver,
    reader: DataReaderParams,
    optimizer: OptParams,
    trainer: settings.Solver,
    memory_of: Callable[[Columns], Mapping[str, int]] | None = None,
) -> tuple[Model, Columns]:
    columns = columns_of(reader, graph.given, graph.embeddings, i64_input_key=solver.i64_input_key)
    columns = replace(columns, slots=slots_with_keys(columns, graph.embeddings, reader))
    if graph.collections:
        columns = replace(columns, slots=tuple(collection_slots(columns.slots, graph.collections)))
    if memory_of is not None and (memory := memory_of(columns)):
        trainer = trainer.model_copy(update={"embedding_memory": dict(memory)})
    else:
        free = free_bytes(str(trainer.device))
        fitting = fitting_slots(columns.slots, graph.embeddings, graph.collections, optimizer, free)
        columns = replace(columns, slots=fitting)
    plan = plan_of(graph.collections, columns.slots, num_processes(), has_others=bool(graph.embeddings))
    if plan is not None:
        trainer = trainer.model_copy(update={"plan": plan})
    return assemble(graph, columns, solver.model_name, optimizer, trainer), columns


def assemble(
    graph: Graph,
    columns: Columns,
    name: str,
    optimizer: OptParams,
    trainer: settings.Solver,
    change: Callable[[EmbeddingNode], EmbeddingNode] | None = None,
) -> Model:
    """Return the uncompiled model of a graph with known columns.

    Args:
        name: HugeCTR's name of the model, any text; a model here has a name of letters, digits, "_" and "-".
        change: returns embeddings with changed settings.
    """
    made = {
        id(one): CollectionNodes(one, number, columns.slots, optimizer) for number, one in enumerate(graph.collections)
    }
    model = Model(trainer, columns.model_schema(), name=re.sub(r"[^A-Za-z0-9_-]+", "_", name) or "model")
    dense = {graph.given.dense_name: tuple(name for name, _ in columns.dense)} if columns.dense else {}
    model.add(InputNode(label=columns.labels, dense=dense, sparse=_groups(graph, columns, list(made.values()))))
    left_out: set[str] = set()
    for one in graph.added:
        if isinstance(one, EmbeddingCollectionConfig):
            for part in made[id(one)].nodes():
                model.add(part)
        elif isinstance(one, SparseEmbedding):
            node = _embedding(one, columns, optimizer)
            model.add(node if change is None else change(node))
        else:
            model.add(one.to_node(left_out))
    return model


def _groups(graph: Graph, columns: Columns, made: Sequence[CollectionNodes]) -> dict[str, tuple[str, ...]]:
    """Return the used groups of slots, including those of collections."""
    read = {one.bottom_name for one in graph.embeddings} | {name for one in graph.layers for name in one.bottom_names}
    groups: dict[str, list[str]] = {}
    for slot in columns.slots:
        if not slot.source and (slot.group in read or not graph.collections):
            groups.setdefault(slot.group, []).append(slot.column)
    result = {name: tuple(members) for name, members in groups.items()}
    for one in made:
        result |= one.columns()
    return result


def _embedding(given: SparseEmbedding, columns: Columns, optimizer: OptParams) -> EmbeddingNode:
    where = f"SparseEmbedding {given.sparse_embedding_name!r}"
    slots = [slot for slot in columns.slots if slot.group == given.bottom_name]
    if not slots:
        known = {slot.group for slot in columns.slots}
        raise ConfigError("an embedding needs a DataReaderSparseParam", where=where, value=given.bottom_name,
                          fix=suggest(given.bottom_name, known))  # fmt: skip
    static = slots[0].size is not None
    rule = (given.optimizer or optimizer).to_sparse(static=static, where=where)
    options: dict[str, Any] = {"init": UniformInit(low=-0.05, high=0.05), "optimizer": rule}
    if not static:
        options["dynamic"] = DynamicOptions()
    elif given.embedding_type is not Embedding_t.DistributedSlotSparseEmbeddingHash and given.slot_size_array:
        bounds = {slot.column: sqrt(1 / slot.size) for slot in slots if slot.size is not None}
        options["tables"] = {
            name: TableOptions(init=UniformInit(low=-bound, high=bound)) for name, bound in bounds.items()
        }
    return EmbeddingNode(
        name=given.sparse_embedding_name, bottom=given.bottom_name, dim=given.embedding_vec_size,
        combiner=given.combiner, **options,
    )  # fmt: skip
