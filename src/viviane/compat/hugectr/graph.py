"""HugeCTR's graph as a model of Viviane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import viviane.config as settings
from viviane.compat.hugectr.columns import Columns, columns_of
from viviane.compat.hugectr.enums import Embedding_t
from viviane.compat.hugectr.inputs import DataReaderParams, Input, SparseEmbedding
from viviane.compat.hugectr.layers import DenseLayer
from viviane.compat.hugectr.solver import OptParams, Solver
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicOptions, UniformInit
from viviane.model import Input as InputNode
from viviane.model import Model, TableOptions
from viviane.model import SparseEmbedding as EmbeddingNode


@dataclass(frozen=True)
class Graph:
    """What a script added: an Input, embeddings and layers in their order."""

    given: Input
    embeddings: tuple[SparseEmbedding, ...]
    layers: tuple[DenseLayer, ...]
    added: tuple[SparseEmbedding | DenseLayer, ...]

    @classmethod
    def of(cls, added: Sequence[Any]) -> Graph:
        """Sort what was added.

        Raises:
            ConfigError: it does not begin with an Input, or has two.
        """
        if not added or not isinstance(added[0], Input):
            raise ConfigError("a graph begins with an Input", fix="model.add(hugectr.Input(...)) first")
        if any(isinstance(one, Input) for one in added[1:]):
            raise ConfigError("a graph has one Input", fix="put several labels and sparse parameters into it")
        embeddings = tuple(one for one in added if isinstance(one, SparseEmbedding))
        layers = tuple(one for one in added if isinstance(one, DenseLayer))
        return cls(added[0], embeddings, layers, tuple(added[1:]))


def build_model(
    graph: Graph,
    solver: Solver,
    reader: DataReaderParams,
    optimizer: OptParams,
    loss_weights: dict[str, float] | None,
    trainer: settings.Solver,
) -> tuple[Model, Columns]:
    """Return the compiled model, and the columns of its data.

    Raises:
        ConfigError, SchemaError: the graph is not right; the layer or tensor is named.
    """
    columns = columns_of(reader, graph.given, graph.embeddings, i64_input_key=solver.i64_input_key)
    groups: dict[str, list[str]] = {group.top_name: [] for group in graph.given.sparse}
    for slot in columns.slots:
        groups[slot.group].append(slot.column)
    model = Model(trainer, columns.model_schema(), name=solver.model_name or "model")
    dense = {graph.given.dense_name: tuple(name for name, _ in columns.dense)} if columns.dense else {}
    sparse = {name: tuple(members) for name, members in groups.items()}
    model.add(InputNode(label=columns.labels, dense=dense, sparse=sparse))
    left_out: set[str] = set()
    for one in graph.added:
        node = _embedding(one, columns, optimizer) if isinstance(one, SparseEmbedding) else one.to_node(left_out)
        model.add(node)
    model.compile(optimizer.to_dense(), loss_weights=loss_weights)
    return model, columns


def _embedding(given: SparseEmbedding, columns: Columns, optimizer: OptParams) -> EmbeddingNode:
    where = f"SparseEmbedding {given.sparse_embedding_name!r}"
    slots = [slot for slot in columns.slots if slot.group == given.bottom_name]
    if not slots:
        known = {slot.group for slot in columns.slots}
        raise ConfigError("an embedding reads a DataReaderSparseParam", where=where, value=given.bottom_name,
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
