"""Lookups and updates of small batches on a CPU, with nothing but the kernels between keys and rows.

For one key the way through a collection takes a hundred microseconds of Python, its kernels ten.

Shapes: B rows of the batch, F features, W columns of the output.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.embedding.base import TableCollection
from viviane.embedding.collection import EmbeddingCollection
from viviane.embedding.launches import Launch
from viviane.embedding.lookup import OneHotPlan, entries_at, hand_over
from viviane.embedding.table_storage import StorageLookup
from viviane.ops.dispatch import choose, load

_MOST_NUMBERS: Final = 1 << 15
"""Numbers of a lookup above which a second thread pays, and Python's share is small."""


class SmallStep:
    """The steps of batches of one shape: look up, then step, with the bits of the collection's own.

    Args:
        collection: on the CPU, with one lookup of one-hot features.
        plan: of that lookup.
        batch: such a batch.
    """

    def __init__(self, collection: EmbeddingCollection, plan: OneHotPlan, batch: Batch) -> None:
        keys, self._layout = batch.one_hot, batch.layout
        self._collection, self._storage, self._plan = collection, plan.storage, plan
        self._size, self._width = len(keys), collection.width
        self._tables = frozenset(plan.tables)
        rows, vectors = load("key_rows", "cpu"), load("embedding_bag", "cpu")
        rules, columns = plan.row_map.rules, plan.row_map.columns
        self._find = rows.SmallKeyRows(rules, columns, len(keys), keys.shape[1], keys.dtype)
        self._weight = plan.storage.weight
        self._gather = vectors.SmallGather(self._weight, self._find.rows, plan.places, self._width)
        nothing = torch.empty(0)
        self._entries = entries_at(self._find.rows, None, None, plan.places, nothing, self._size, self._width)
        self._launches: list[Launch] | None = None
        self._updates: list[tuple[Launch, object]] = []

    @classmethod
    def of(cls, collection: TableCollection, batch: Batch) -> SmallStep | None:
        """Return the steps of batches like this one; None where they are not of this kind."""
        keys = batch.one_hot
        if not isinstance(collection, EmbeddingCollection) or batch.bags or not keys.numel():
            return None
        if keys.device.type != "cpu" or collection.device.type != "cpu" or collection.output_dtype != torch.float32:
            return None
        plans = collection.one_hot_plans(batch.layout.one_hot)
        if plans is None or len(plans) != 1 or plans[0].storage.in_tiers:
            return None
        [plan] = plans
        storage = plan.storage
        update = load("row_update", "cpu").SmallUpdate
        rules = [one.optimizer for one in storage.rule_ranges]
        if any(rule is None or not update.serves(rule, storage.dim) for rule in rules):
            return None
        fits = keys.shape[0] * len(plan.places) * storage.dim < _MOST_NUMBERS
        return cls(collection, plan, batch) if fits and keys.dtype in (torch.int32, torch.int64) else None

    def serves(self, batch: Batch) -> bool:
        """Whether a batch of this shape is of this kind, and `is_plain`."""
        return batch.layout is self._layout and not batch.bags and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether nothing has come up that the collection has to look after: frozen tables, checkpoints, watches."""
        own, storage = self._collection, self._storage
        plain = own.training and own.gradient_watch is None and own.margins is None and not own.frozen
        same = storage.weight is self._weight and not storage.is_watched
        return plain and same and not torch.compiler.is_compiling() and choose(self._weight.device) == "cpu"

    def look_up(self, keys: Tensor) -> Tensor | None:
        """Return the vectors of keys, (B, W); None: a key is out of range, of which the collection tells."""
        if not keys.is_contiguous() or not self._find.find(keys):
            return None
        out = torch.empty(self._size, self._width)
        self._gather.gather(out)
        return out

    def step(self, gradient: Tensor, lr: float, scale: float) -> None:
        """Move the rows of the last lookup.

        Args:
            gradient: of its vectors, (B, W), float32.
            lr: rate of rules without their own.
            scale: what gradients are multiplied by first.
        """
        storage, own = self._storage, gradient.contiguous()
        with storage.lock:
            launches = storage.begin_launches(self._tables)
            if launches is not self._launches:
                self._prepare(launches)
            for launch, update in self._updates:
                update.update(  # type: ignore[attr-defined]
                    own, lr=lr if launch.rule.lr is None else launch.rule.lr, step=storage.steps[launch.tables[0]],
                    scale=scale, seed=storage.rounding_seed + launch.start,
                )  # fmt: skip

    def _prepare(self, launches: list[Launch]) -> None:
        make = load("row_update", "cpu").SmallUpdate
        self._updates = [
            (one, make(one.weight, one.state, self._entries, one.rule, one.start, self._storage.scratch))
            for one in launches
        ]
        self._launches = launches

    def hand_over(self, gradient: Tensor) -> None:
        """Give the collection the gradient of the last lookup, to keep until its next step."""
        rows = self._find.rows.clone()
        hand_over([StorageLookup(self._storage, rows, None, None, self._plan.places, self._tables)], gradient)
