"""A graph as a torch module: a batch in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer
from viviane.core.seeds import derive_seed
from viviane.embedding import TableCollection
from viviane.model.graph import Plan
from viviane.model.nodes import DenseLayer, SparseEmbedding
from viviane.parallel import make_tables

Source: TypeAlias = Callable[[Batch], Tensor]
TableMaker: TypeAlias = Callable[..., TableCollection]
Step: TypeAlias = tuple[nn.Module, tuple[int, ...], tuple[int, ...]]


class GraphModule(nn.Module):
    """Runs the layers of a plan in order; a submodule, and its weights in the state dict, carry the node's name.

    What no loss needs is not computed.

    Args:
        plan: a checked graph; its layers become part of the module.
        optimizer: the rule of embedding tables that have none of their own.
        device: where the weights go.
        seed: of the tables' initial values.
        make: builds the collections, called as `viviane.parallel.make_tables` with (tables, features, optimizer,
            device=, seed=); it decides whether they are spread over processes.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: AnyOptimizer,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        make: TableMaker = make_tables,
    ) -> None:
        super().__init__()
        needed = _needed(plan)
        slots: dict[str, int] = {}
        self._sources: list[tuple[int, Source]] = []
        self._steps: list[Step] = []
        for name, columns in plan.dense.items():
            if name in needed:
                widths = [(column, plan.dense_dims[column]) for column in columns]
                self._sources.append((_slot(slots, name), _Dense(widths)))
        for node in plan.nodes:
            if isinstance(node, SparseEmbedding):
                tables = plan.tables[node.name]
                own = derive_seed(seed, "embedding", node.name)  # nodes with equal tables start apart
                collection = make(tables.tables, tables.features, optimizer, device=device, seed=own)
                self._keep(node.name, collection)
                if node.name in needed:
                    self._sources.append((_slot(slots, node.name), _Stack(collection, tables.shape)))
            elif isinstance(node, DenseLayer) and node.name in plan.layers:
                layer = plan.layers[node.name].to(device)
                self._keep(node.name, layer)
                if needed.intersection(node.top):
                    bottoms = tuple(slots[bottom] for bottom in node.bottom)
                    self._steps.append((layer, bottoms, tuple(_slot(slots, top) for top in node.top)))
        self._num_slots = len(slots)
        self._outputs = tuple(slots[loss.output] for loss in plan.losses)

    def _keep(self, name: str, module: nn.Module) -> None:
        # Not add_module: it refuses names that nn.Module uses itself, such as "type" or "train".
        self._modules[name] = module

    def forward(self, batch: Batch) -> Tensor:
        """Return what the losses read side by side: the logits, (B, L), where there is one for each label."""
        values: list[Any] = [None] * self._num_slots
        for slot, source in self._sources:
            values[slot] = source(batch)
        for layer, bottoms, tops in self._steps:
            result = layer(*[values[slot] for slot in bottoms])
            if len(tops) == 1:
                values[tops[0]] = result
            else:
                for slot, part in zip(tops, result, strict=True):
                    values[slot] = part
        logits = [values[slot] for slot in self._outputs]
        return logits[0] if len(logits) == 1 else torch.cat(logits, 1)


class _Stack:
    """Looks a batch up and returns (B, S, D)."""

    def __init__(self, collection: TableCollection, shape: tuple[int, ...]) -> None:
        self.collection = collection
        self.shape = shape

    def __call__(self, batch: Batch) -> Tensor:
        flat: Tensor = self.collection(batch).flat
        return flat.view(flat.shape[0], *self.shape)


class _Dense:
    """Returns dense columns side by side, (B, N); without a copy where they are all there are, in order."""

    def __init__(self, columns: Sequence[tuple[str, int]]) -> None:
        self.columns = tuple(columns)

    def __call__(self, batch: Batch) -> Tensor:
        if batch.layout.dense == self.columns:
            return batch.dense
        return torch.cat([batch.dense_feature(name) for name, _ in self.columns], 1)


def _slot(slots: dict[str, int], name: str) -> int:
    slots[name] = len(slots)
    return slots[name]


def _needed(plan: Plan) -> set[str]:
    """Return the tensors that some logit depends on."""
    needed = {loss.output for loss in plan.losses}
    for node in reversed(plan.nodes):
        if isinstance(node, DenseLayer) and needed.intersection(node.top) and node.name in plan.layers:
            needed.update(node.bottom)
    return needed
