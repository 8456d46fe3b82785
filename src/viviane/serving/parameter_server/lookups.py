"""Replaces an `EmbeddingCollection` in a served model: it looks keys up in the tiers of its tables.

Vectors are pooled by an ordinary collection over the rows of one batch, so that predictions have the bits of the model
in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Bag, Batch
from viviane.config import SGD
from viviane.embedding import (
    DynamicTableConfig,
    EmbeddingCollection,
    EmbeddingOutput,
    FeatureConfig,
    TableConfig,
)
from viviane.embedding.config import ZeroInit
from viviane.embedding.keys import RowMap, Violations
from viviane.embedding.lookup import place_features
from viviane.serving.parameter_server.device_caches import Asked, lookup_on_device
from viviane.store.device_cache import DeviceCacheTier
from viviane.store.hierarchy import TableHierarchy

_NOTHING: Final = 0
"""Row of a batch's table for an entry that does not count."""
_ZEROS: Final = 1
"""Row for zeros that count in a mean."""
_FIRST: Final = 2


class StoreCollection(nn.Module):
    """Looks features up in hierarchies of tiers; it gives the output of the collection that was trained.

    Args:
        tables, features: of the collection.
        hierarchies: by table.
        device: where the output goes.
    """

    margins: Any = None  # a graph may ask for room beside the output; there is none
    gradient_watch: Any = None

    def __init__(
        self,
        tables: Sequence[TableConfig | DynamicTableConfig],
        features: Sequence[FeatureConfig],
        hierarchies: Mapping[str, TableHierarchy],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tables = {table.name: table for table in tables}
        self.features = {feature.name: feature for feature in features}
        self.device = device
        self._hierarchies = dict(hierarchies)
        self._places = place_features(list(features), self.tables)
        self.width = max(place.stop for place in self._places.values())
        self._row_maps: dict[str, RowMap] = {}
        for feature in features:
            table = self.tables[feature.table]
            if isinstance(table, TableConfig):
                cpu = torch.device("cpu")
                self._row_maps[feature.name] = RowMap([feature.name], [table], [0], table.num_rows, Violations(), cpu)
        self._batch_rows: list[EmbeddingCollection] = []  # in a list: its rows are no weights of the model
        self._capacity: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreCollection:
        """Copy for another thread: the tiers are shared."""
        tables, features = list(self.tables.values()), list(self.features.values())
        made = StoreCollection(copy.copy(tables), copy.copy(features), self._hierarchies, self.device)
        made.train(self.training)
        return made

    def forward(self, batch: Batch) -> EmbeddingOutput:
        """Look a batch up.

        Raises:
            KeyRangeError: a key out of range in a table with "raise".
            StoreError: in strict mode, a tier that may have a row fails.
        """
        direct = self._direct(batch)
        if direct is not None:
            return EmbeddingOutput(direct.to(self.device), self._places, {})
        found = self._pooled(batch)
        masks = {name: mask.to(self.device) for name, mask in found.masks.items()}
        return EmbeddingOutput(found.flat.to(self.device), self._places, masks)

    # One id a row -----------------------------------------------------------------------------------------------

    def _direct(self, batch: Batch) -> Tensor | None:
        """Let rows be copied to where the output has them; None where something has to be pooled or widened."""
        for feature in self.features.values():
            layout = self._hierarchies[feature.table].layout
            plain = self.tables[feature.table].dtype == "float32" and layout.row_bytes == 4 * layout["weight"].width
            if feature.combiner == "concat" or feature.name in batch.bags or not plain:
                return None
        if all(isinstance(one.levels[0].tier, DeviceCacheTier) for one in self._hierarchies.values()):
            return self._on_device(batch)
        out = torch.empty((batch.size, self.width), dtype=torch.float32)
        data: NDArray[np.uint8] = out.numpy().view(np.uint8)
        for name, feature in self.features.items():
            keys, skipped = self._keys(feature, _ids(batch, name), batch.origin)
            place = self._places[name]
            rows = data[:, 4 * place.start : 4 * place.stop]
            if skipped is None:
                self._hierarchies[feature.table].lookup(keys, rows)
                continue
            there = np.setdiff1d(np.arange(len(keys)), skipped, assume_unique=True)
            few = np.empty((len(there), rows.shape[1]), np.uint8)
            self._hierarchies[feature.table].lookup(np.ascontiguousarray(keys[there]), few)
            rows[skipped] = 0
            rows[there] = few
        return out

    def _on_device(self, batch: Batch) -> Tensor:
        """Let the caches on the GPU be searched there; rows that they lack come from the host."""
        asked = []
        for name, feature in self.features.items():
            keys, skipped = self._keys(feature, _ids(batch, name), batch.origin)
            asked.append(Asked(self._hierarchies[feature.table], keys, skipped, self._places[name].start))
        out = torch.empty((batch.size, self.width), dtype=torch.float32, device=self.device)
        lookup_on_device(asked, out)
        return out

    def _keys(
        self, feature: FeatureConfig, ids: Tensor, origin: str, offsets: Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the keys of a feature's ids, and the places of those that read zeros, whose keys mean nothing."""
        table = self.tables[feature.table]
        if isinstance(table, DynamicTableConfig):
            keys: NDArray[np.int64] = np.ascontiguousarray(ids.cpu().to(torch.int64).numpy())
            if table.padding_id is None:
                return keys, None
            skipped = np.flatnonzero(keys == table.padding_id)
            return keys, skipped if len(skipped) else None
        rows = self._row_maps[feature.name](ids.cpu().view(-1, 1), offsets, origin).view(-1)
        keys = rows.numpy().astype(np.int64)
        skipped = np.flatnonzero(keys >= table.num_rows)
        return keys, skipped if len(skipped) else None

    # Bags -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _pooled(self, batch: Batch) -> EmbeddingOutput:
        given: dict[str, Bag | Tensor] = {}
        keys_of: dict[str, list[tuple[str, NDArray[np.int64], NDArray[np.int64]]]] = {}
        bags: dict[str, Bag] = {}
        for name, feature in self.features.items():
            is_bag = name in batch.bags or feature.combiner == "concat"
            if is_bag:
                bags[name] = batch.bag(name)
            ids = bags[name].values if is_bag else _ids(batch, name)
            keys, skipped = self._keys(feature, ids, batch.origin, bags[name].offsets if is_bag else None)
            codes = np.full(len(keys), _FIRST, np.int64)
            if skipped is not None:
                codes[skipped] = self._code(feature, keys[skipped])
            keys_of.setdefault(feature.table, []).append((name, keys, codes))
        for table, parts in keys_of.items():
            for name, local in self._fetch(table, parts):
                ids = torch.from_numpy(local)
                given[name] = Bag(ids, bags[name].offsets.cpu(), _host(bags[name].weights)) if name in bags else ids
        found: EmbeddingOutput = self._batch_rows[0](given)
        return found

    def _code(self, feature: FeatureConfig, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which row of zeros keys without a row read."""
        table = self.tables[feature.table]
        if isinstance(table, DynamicTableConfig):
            return np.full(len(keys), _NOTHING, np.int64)
        return np.where(keys == table.num_rows, _NOTHING, _ZEROS)

    def _fetch(
        self, table: str, parts: Sequence[tuple[str, NDArray[np.int64], NDArray[np.int64]]]
    ) -> list[tuple[str, NDArray[np.int64]]]:
        """Put the rows of all keys of a table into this batch's table; returns the ids there of each feature."""
        keys = np.concatenate([keys for _, keys, _ in parts])
        codes = np.concatenate([codes for _, _, codes in parts])
        wanted = codes == _FIRST
        distinct, inverse = np.unique(keys[wanted], return_inverse=True)
        hierarchy = self._hierarchies[table]
        rows = hierarchy.layout.empty(len(distinct))
        hierarchy.lookup(distinct, rows)
        target = self._room(table, len(distinct))
        if len(distinct):
            weight = np.ascontiguousarray(hierarchy.layout.column(rows, "weight")).reshape(-1)
            vectors = torch.from_numpy(weight).view(self.tables[table].torch_dtype).view(len(distinct), -1)
            target[_FIRST : _FIRST + len(distinct)] = vectors
        codes[wanted] = _FIRST + inverse
        found, start = [], 0
        for name, own, _ in parts:
            found.append((name, codes[start : start + len(own)]))
            start += len(own)
        return found

    def _room(self, table: str, count: int) -> Tensor:
        """Return the rows of this batch's table, grown where it has too few."""
        if not self._batch_rows or self._capacity[table] < count + _FIRST:
            for name in self.tables:
                self._capacity.setdefault(name, 64)
            self._capacity[table] = 1 << (count + _FIRST - 1).bit_length()
            before = self._batch_rows[0] if self._batch_rows else None
            tables = [
                TableConfig(name=name, num_rows=self._capacity[name], dim=one.dim, dtype=one.dtype, init=ZeroInit(),
                            padding_id=_NOTHING, trainable=False)
                for name, one in self.tables.items()
            ]  # fmt: skip
            made = EmbeddingCollection(tables, list(self.features.values()), SGD(), device="cpu", seed=0).eval()
            if before is not None:  # rows that this batch has put into other tables
                for name in self.tables:
                    rows = before.table_rows(name)
                    made.table_rows(name)[: len(rows)] = rows[: self._capacity[name]]
            self._batch_rows = [made]
        return self._batch_rows[0].table_rows(table)


def _ids(batch: Batch, name: str) -> Tensor:
    return batch.one_hot[:, batch.layout.one_hot_index[name]]


def _host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
