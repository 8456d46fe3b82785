"""Which rows of a model's tables have changed since they were published, and their content."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, TableConfig
from viviane.embedding.keys import rows_of_keys
from viviane.embedding.module_parts import collections_of
from viviane.store.row_layout import Column, Keys, RowLayout, Rows

Changes = dict[str, tuple[Keys, Rows]]
"""By table, "<collection>.<table>": keys (n,) and rows (n, row_bytes)."""
_NO_KEYS: Keys = np.empty(0, np.int64)


class ChangedRows:
    """Remembers the rows that batches have touched; a bit a row, on the tables' device.

    Args:
        module: whose tables are watched.

    Raises:
        ConfigError: an optimizer moves rows that no batch touches, or tables are spread over processes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.collections: dict[str, EmbeddingCollection] = {}
        for name, one in collections_of(module).items():
            if not isinstance(one, EmbeddingCollection):
                raise ConfigError(
                    "tables that are spread over processes are not published", where=f"embedding {name!r}",
                    fix="publish from a run of one process",
                )  # fmt: skip
            self.collections[name] = one
        self._touched: dict[str, Tensor] = {}
        self._published: dict[str, Tensor] = {}
        self._clocks: dict[str, int] = {}
        self._keys_by_row: dict[str, tuple[Tensor, Tensor]] = {}
        self._removed: dict[str, Keys] = {}
        self.layouts: dict[str, RowLayout] = {}
        for full, (collection, table) in self._tables().items():
            config = collection.tables[table]
            self.layouts[full] = RowLayout([Column("weight", config.dtype, config.dim)])
            if isinstance(config, DynamicTableConfig):
                self._clocks[full] = collection.dynamic_table(table).clock
                self._keys_by_row[full] = collection.dynamic_table(table).keys_by_row()
                continue
            rule = config.optimizer or collection.optimizer
            if getattr(rule, "update", "local") != "local":
                raise ConfigError(
                    "the optimizer moves rows that no batch touches, so that all of them would have to be published",
                    where=f"table {full!r}", value=f"update={rule.update!r}", allowed="update='local'",  # type: ignore[union-attr]
                )  # fmt: skip
            self._touched[full] = torch.zeros(config.num_rows, dtype=torch.bool, device=collection.device)
            self._published[full] = torch.zeros_like(self._touched[full])

    def _tables(self) -> dict[str, tuple[EmbeddingCollection, str]]:
        found = {}
        for name, collection in self.collections.items():
            for table in collection.tables:
                found[f"{name}.{table}" if name else table] = (collection, table)
        return found

    def mark(self, batch: Batch, only: object = None) -> None:
        """Remember the rows of a batch that weights were updated by; `only`: of one collection."""
        for name, collection in self.collections.items():
            if only is not None and collection is not only:
                continue
            for feature in collection.features.values():
                table = collection.tables[feature.table]
                if isinstance(table, TableConfig) and table.trainable:
                    is_bag = feature.name in batch.bags
                    place = None if is_bag else batch.layout.one_hot_index[feature.name]
                    ids = batch.bags[feature.name].values if is_bag else batch.one_hot[:, place]
                    self._mark(f"{name}.{table.name}" if name else table.name, table, ids)

    def _mark(self, full: str, table: TableConfig, ids: Tensor) -> None:
        self._touched[full][rows_of_keys(ids, table)] = True

    def mark_again(self, *, all_rows: bool = False) -> None:
        """Remember all rows that were published, since other weights were loaded; with `all_rows`, every row."""
        for full, published in self._published.items():
            self._touched[full] |= published
            self._touched[full] |= all_rows
        self._clocks = dict.fromkeys(self._clocks, -1)

    @property
    def num_dynamic(self) -> int:
        """How many tables are dynamic."""
        return len(self._clocks)

    def first_rows(self, count: int) -> dict[str, Rows]:
        """Return the first rows of each table with a size."""
        found = {}
        for full, (collection, table) in self._tables().items():
            if full in self._touched:
                found[full] = self._rows(full, collection.table_rows(table).detach()[:count].cpu())
        return found

    def begin(self) -> None:
        """Take the keys of dynamic tables as they are now as those that servers know: a checkpoint was loaded."""
        for full, (collection, table) in self._tables().items():
            if full in self._keys_by_row:
                self._keys_by_row[full] = collection.dynamic_table(table).keys_by_row()

    def take_removed(self) -> dict[str, Keys]:
        """Return the keys that dynamic tables have evicted or erased, and forget that they had; call it after `take`.

        A key that came back since is not among them.
        """
        found: dict[str, Keys] = {}
        for full, (collection, table) in self._tables().items():
            if full not in self._keys_by_row:
                continue
            dynamic = collection.dynamic_table(table)
            (before, known), (now, in_use) = self._keys_by_row[full], dynamic.keys_by_row()
            count = min(len(before), len(now))
            gone = known.clone()
            gone[:count] &= ~in_use[:count] | (before[:count] != now[:count])
            keys = torch.cat([before[gone], torch.from_numpy(self._removed.pop(full, _NO_KEYS)).to(before.device)])
            keys = keys[~dynamic.find(keys)[1]]
            self._keys_by_row[full] = (now, in_use)
            if len(keys):
                found[full] = np.unique(keys.cpu().numpy())
        return found

    def take(self) -> Changes:
        """Return the rows that have changed, as they are now, and forget that they had."""
        found: Changes = {}
        for full, (collection, table) in self._tables().items():
            keys, weight = self._content(full, collection, table)
            if len(keys):
                found[full] = (keys, self._rows(full, weight))
        return found

    def give_back(
        self, changes: Mapping[str, tuple[Keys, Rows]], clocks: Mapping[str, int], removed: Mapping[str, Keys]
    ) -> None:
        """Remember rows and removed keys again that could not be published."""
        self._removed |= removed
        for full, (keys, _) in changes.items():
            if full in self._touched:
                self._touched[full][torch.from_numpy(keys).to(self._touched[full].device)] = True
        self._clocks |= clocks

    @property
    def clocks(self) -> dict[str, int]:
        """Of dynamic tables: up to which of their clock's times rows were taken."""
        return dict(self._clocks)

    def _content(self, full: str, collection: EmbeddingCollection, table: str) -> tuple[Keys, Tensor]:
        if full in self._clocks:
            dynamic = collection.dynamic_table(table)
            content = dynamic.export(since=self._clocks[full])
            self._clocks[full] = dynamic.clock
            return content.keys.cpu().numpy(), content.weight.detach().cpu()
        touched = self._touched[full]
        rows = touched.nonzero().view(-1)
        self._published[full] |= touched
        touched.zero_()
        return rows.cpu().numpy(), collection.table_rows(table).detach()[rows].cpu()

    def _rows(self, full: str, weight: Tensor) -> Rows:
        layout = self.layouts[full]
        rows = layout.zeros(len(weight))
        data = np.ascontiguousarray(weight.contiguous().view(torch.uint8).numpy()).reshape(len(weight), -1)
        layout.column(rows, "weight")[:] = data
        return rows
