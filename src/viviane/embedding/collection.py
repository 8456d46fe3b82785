"""The embedding collection: tables, the features that look them up, and their fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Bag, Batch
from viviane.config.optimizers import AnyOptimizer
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, suggest
from viviane.embedding.buffers import Buffers
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.keys import Violations
from viviane.embedding.lookup import Lookup, gather
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.plan import Plan, Planner, place_features, read_keys
from viviane.embedding.state import (
    TableState,
    TableSummary,
    export_table,
    import_table,
    load_entries,
    state_entries,
)
from viviane.embedding.storage import Storage

_MOST_UNCHECKED = 256  # lookups on a GPU whose range checks may wait unread


class EmbeddingCollection(nn.Module):
    """Embedding tables, their features and their optimizer.

    All tables of one width and type lie in one storage, and one lookup serves all its one-hot features. Backward keeps
    the gradients of the touched rows; `step` sums those of equal rows and moves rows and state in place. No
    `nn.Parameter` and no dense gradient exist.

    In `eval()` mode, and where autograd is off, nothing is kept.

    Args:
        tables: settings of the tables.
        features: settings of the features; the output has them side by side in this order.
        optimizer: the rule of tables that have none of their own.
        device: "cpu", "cuda", ...
        seed: of the initial values, which depend besides on each table's name and shape alone.
        output_dtype: of the output: float32, float16 or bfloat16, whatever the tables are of.

    Example:
        >>> from viviane.config import SGD
        >>> table = TableConfig(name="item", num_rows=4, dim=2, init={"type": "constant", "value": 1.0})
        >>> emb = EmbeddingCollection([table], [FeatureConfig(name="seen", table="item")], SGD())
        >>> out = emb({"seen": Bag.from_lists([[0, 0], [], [3]])})
        >>> out["seen"].tolist()
        [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
        >>> out.flat.sum().backward(); emb.step(lr=0.25)
        >>> emb.export_table("item").weight.tolist()
        [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [0.75, 0.75]]
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        optimizer: AnyOptimizer,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tables = _by_name("table", tables)
        self.features = _by_name("feature", features)
        self.optimizer = optimizer
        for feature in features:
            if feature.table not in self.tables:
                where = f"feature {feature.name!r}"
                raise ConfigError(
                    "no such table", where=where, value=feature.table, fix=suggest(feature.table, self.tables)
                )
        if not features:
            raise ConfigError("an embedding collection needs at least one feature")
        self._places = place_features(features, self.tables)
        self._width = max(place.stop for place in self._places.values())
        kinds = list(dict.fromkeys((table.dim, table.dtype) for table in tables))
        where_to = resolve_device(str(device))
        self.storages = nn.ModuleList(
            Storage([table for table in tables if (table.dim, table.dtype) == kind], optimizer, where_to, seed)
            for kind in kinds
        )
        self._storage_of = {name: i for i, s in enumerate(self.storages) for name in s.tables}  # type: ignore[union-attr]
        self._frozen = frozenset(table.name for table in tables if not table.trainable)
        self._violations = Violations()
        self._memory = Buffers(_output_dtype(output_dtype))
        self._plans: dict[tuple[tuple[str, ...], torch.device], Plan] = {}

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._storage(next(iter(self.tables))).weight.device

    @property
    def width(self) -> int:
        """Columns of the flat output."""
        return self._width

    def _storage(self, table: str) -> Storage:
        try:
            storage = self.storages[self._storage_of[table]]
        except KeyError:
            raise ConfigError("no such table in the collection", value=table, fix=suggest(table, self.tables)) from None
        assert isinstance(storage, Storage)
        return storage

    def all_storages(self) -> list[Storage]:
        """Return the storages, one for each width."""
        return [storage for storage in self.storages if isinstance(storage, Storage)]

    # Lookup -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Mapping[str, Bag | Tensor]) -> EmbeddingOutput:
        """Look a batch up.

        Args:
            batch: a Batch that has all features, or keys by feature: a Bag, ids (B,), or ids (B, H).

        Raises:
            KeyRangeError: a key out of range in a table with "raise"; on a GPU `check` and `step` raise it.
            DataError: a bag is longer than max_length, or features differ in their number of rows.
        """
        keys = read_keys(batch, self.features, self.device)
        plan = self._plan(keys.one_hot_names)
        parts, masks = plan.parts(keys, self._frozen)
        if self.training and torch.is_grad_enabled() and any(part.tables for part in parts):
            anchor = torch.empty(0, device=self.device, requires_grad=True)
            flat: Tensor = Lookup.apply(anchor, parts, keys.size, self._width, self._memory)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                flat = gather(parts, keys.size, self._width, self._memory)
        if len(self._violations) >= _MOST_UNCHECKED:
            self.check()
        return EmbeddingOutput(flat, self._places, masks)

    def _plan(self, one_hot: tuple[str, ...]) -> Plan:
        key = (one_hot, self.device)
        if key not in self._plans:
            make = Planner(self.features, self.tables, self.all_storages(), self._places, self._violations, self.device)
            self._plans[key] = make.plan(one_hot)
        return self._plans[key]

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise".

        Between the replays of a CUDA graph too; while one is recorded nothing is read.
        """
        self._violations.check()
        for storage in self.all_storages():
            storage.steps.check()

    # Update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float | Tensor, scale: float | Tensor = 1.0, factor: float | Tensor = 1.0) -> None:
        """Sum the gradients of equal rows, move the touched rows and their state, and drop the gradients.

        Args:
            lr: rate of optimizers without one of their own; a number, or a 0-dim tensor on the device, as a CUDA graph
                needs it: then the device counts the steps too. See docs/how-to/cuda-graphs.md.
            scale: what gradients are multiplied by first, such as a clipping factor.
            factor: the schedule's factor, by which an optimizer's own rate (`settings.lr`) is multiplied.
        """
        self.check()
        for storage in self.all_storages():
            storage.step(lr, factor, scale)

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        for storage in self.all_storages():
            storage.discard_gradients()

    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients, those of equal rows summed first; 0-dim, float32."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for storage in self.all_storages():
            if storage.has_gradients:
                total += torch.linalg.vector_norm(storage.summed_gradients()[1], dtype=torch.float64).square()
        return total.to(torch.float32)

    def nonfinite_gradients(self) -> list[str]:
        """Return the features whose tables have NaN or infinite gradients waiting."""
        bad: set[str] = set()
        for storage in self.all_storages():
            # One pass over what waits; only where that finds something are gradients summed by row.
            if all(bool(torch.isfinite(one.sum())) for one in storage.waiting_gradients()):
                continue
            rows, sums = storage.summed_gradients()
            wrong = rows[~torch.isfinite(sums).all(1)]
            for name, base in storage.bases.items():
                if bool(((wrong >= base) & (wrong < base + storage.tables[name].num_rows)).any()):
                    bad.add(name)
        return [feature.name for feature in self.features.values() if feature.table in bad]

    def freeze(self, table: str) -> None:
        """Keep a table's rows and state as they are until `unfreeze`."""
        self._storage(table)
        self._frozen |= {table}

    def unfreeze(self, table: str) -> None:
        """Let a frozen table move again."""
        self._storage(table)
        if not self.tables[table].trainable:
            raise ConfigError("the table has no optimizer state", value=table, fix="build it with trainable=True")
        self._frozen -= {table}

    # Content ------------------------------------------------------------------------------------------------

    def export_table(self, table: str, *, copy: bool = True) -> TableState:
        """Return a table's rows and optimizer state: a copy, or views of the live memory for writing to a file."""
        return export_table(self._storage(table), table, copy)

    def import_table(self, table: str, content: TableState) -> None:
        """Replace a table's rows and optimizer state.

        Without state in `content`, such as rows trained elsewhere, the optimizer starts anew. The padding row
        stays zero.

        Raises:
            CheckpointError: shapes or names of the state differ; nothing is changed then.
        """
        import_table(self._storage(table), table, content)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for table in self.tables:
            destination.update(state_entries(self._storage(table), table, prefix))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known: set[str] = set()
        for table in self.tables:
            known |= load_entries(self._storage(table), table, prefix, state_dict, missing_keys, error_msgs)
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)

    def summary(self) -> list[TableSummary]:
        """Return what a model's summary says of each table."""
        lines = []
        for name, table in self.tables.items():
            storage = self._storage(name)
            state = storage.table_state(name)
            rule = (table.optimizer or self.optimizer).type if table.trainable else "none"
            users = tuple(feature.name for feature in self.features.values() if feature.table == name)
            weight_bytes = table.num_rows * table.dim * table.torch_dtype.itemsize
            state_bytes = sum(part.numel() * part.element_size() for part in state.values())
            trainable = name not in self._frozen
            lines.append(
                TableSummary(name, table.num_rows, table.dim, users, rule, trainable, weight_bytes, state_bytes)
            )
        return lines


def _by_name(kind: str, items: Sequence[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in items:
        if item.name in result:
            raise ConfigError(f"two {kind}s of one name", value=item.name)
        result[item.name] = item
    return result


def _output_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError("no such output type", value=str(dtype), allowed="float32, float16, bfloat16")
    return dtype
