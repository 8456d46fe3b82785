"""The embedding collection: tables, the features that look them up, and their fused optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Bag, Batch
from viviane.config import SGD, AdaGrad, Adam
from viviane.core.device import resolve_device
from viviane.core.errors import CheckpointError, ConfigError, DataError, suggest
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.keys import RowMap, Violation
from viviane.embedding.lookup import Lookup, Part, Run, gather
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.plan import BagPlan, OneHotPlan, as_bag, place_features
from viviane.embedding.state import TableState, TableSummary
from viviane.embedding.storage import Storage


class EmbeddingCollection(nn.Module):
    """Embedding tables, their features and their optimizer.

    All tables of one width lie in one storage, and one lookup serves all its one-hot features. Backward keeps
    the gradients of the touched rows; `step` sums those of equal rows and moves rows and state in place. No
    `nn.Parameter` and no dense gradient exist.

    In `eval()` mode, and where autograd is off, nothing is kept.

    Args:
        tables: settings of the tables.
        features: settings of the features; the output has them side by side in this order.
        optimizer: the rule of tables that have none of their own.
        device: "cpu", "cuda", ...
        seed: of the initial values, which depend besides on each table's name and shape alone.

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
        optimizer: SGD | AdaGrad | Adam,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
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
        dims = list(dict.fromkeys(table.dim for table in tables))
        where_to = resolve_device(str(device))
        self.storages = nn.ModuleList(
            Storage([table for table in tables if table.dim == dim], optimizer, where_to, seed) for dim in dims
        )
        self._storage_of = {name: i for i, s in enumerate(self.storages) for name in s.tables}  # type: ignore[union-attr]
        self._frozen = frozenset(table.name for table in tables if not table.trainable)
        self._violations: deque[Violation] = deque()
        self._plans: dict[Any, tuple[list[OneHotPlan], list[BagPlan]]] = {}

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

    def _all_storages(self) -> list[Storage]:
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
        one_hot, bags, size, origin = self._keys(batch)
        one_hot_plans, bag_plans = self._plan(tuple(one_hot[0]))
        parts: list[Part] = [plan.part(one_hot[1], self._frozen, origin) for plan in one_hot_plans]
        masks: dict[str, Tensor] = {}
        for plan in bag_plans:
            part, mask = plan.part(bags[plan.feature.name], self._frozen, origin)
            parts.append(part)
            if mask is not None:
                masks[plan.feature.name] = mask
        if self.training and torch.is_grad_enabled() and any(part.tables for part in parts):
            anchor = torch.empty(0, device=self.device, requires_grad=True)
            flat: Tensor = Lookup.apply(anchor, parts, size, self._width)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                flat = gather(parts, size, self._width)
        return EmbeddingOutput(flat, self._places, masks)

    def _keys(
        self, batch: Batch | Mapping[str, Bag | Tensor]
    ) -> tuple[tuple[tuple[str, ...], Tensor], Mapping[str, Bag], int, str]:
        if isinstance(batch, Batch):
            known = batch.layout.one_hot_index.keys() | batch.bags.keys()
            self._need(known)
            bags = {n: batch.bag(n) for n in self.features if n in batch.bags or self.features[n].combiner == "concat"}
            return (batch.layout.one_hot, batch.one_hot), bags, batch.size, batch.origin
        self._need(batch.keys())
        singles: dict[str, Tensor] = {}
        bags = {}
        for name, feature in self.features.items():
            keys = batch[name]
            if isinstance(keys, Tensor) and keys.dim() == 1 and feature.combiner != "concat":
                singles[name] = keys
            else:
                bags[name] = keys if isinstance(keys, Bag) else as_bag(keys, name)
        sizes = {name: len(keys) for name, keys in singles.items()}
        sizes |= {n: len(bag.offsets) - 1 for n, bag in bags.items()}
        if len(set(sizes.values())) > 1:
            raise DataError("features differ in their number of rows", value=sizes)
        ids = (
            torch.stack(list(singles.values()), 1)
            if singles
            else torch.empty(0, 0, dtype=torch.int64, device=self.device)
        )
        return (tuple(singles), ids), bags, next(iter(sizes.values())), ""

    def _need(self, known: Any) -> None:
        for name in self.features:
            if name not in known:
                raise DataError("the batch lacks a feature", value=name, fix=suggest(name, known))

    def _plan(self, one_hot: tuple[str, ...]) -> tuple[list[OneHotPlan], list[BagPlan]]:
        key = (one_hot, self.device)
        if key not in self._plans:
            index = {name: i for i, name in enumerate(one_hot)}
            singles = [self._one_hot_plan(storage, index) for storage in self._all_storages()]
            bags = [self._bag_plan(f) for f in self.features.values() if f.name not in index or f.combiner == "concat"]
            self._plans[key] = [plan for plan in singles if plan is not None], bags
        return self._plans[key]

    def _row_map(self, features: Sequence[FeatureConfig], storage: Storage) -> RowMap:
        tables = [self.tables[feature.table] for feature in features]
        names = [feature.name for feature in features]
        bases = [storage.bases[table.name] for table in tables]
        return RowMap(names, tables, bases, storage.null_row, self._violations, self.device)

    def _one_hot_plan(self, storage: Storage, index: Mapping[str, int]) -> OneHotPlan | None:
        features = [
            f
            for f in self.features.values()
            if f.name in index and f.table in storage.tables and f.combiner != "concat"
        ]
        if not features:
            return None
        columns = [index[feature.name] for feature in features]
        whole = columns == list(range(len(index)))
        runs: list[Run] = []
        for i, feature in enumerate(features):
            start = self._places[feature.name].start
            if runs and runs[-1].start + (runs[-1].last - runs[-1].first) * storage.dim == start:
                runs[-1] = Run(runs[-1].first, i + 1, runs[-1].start)
            else:
                runs.append(Run(i, i + 1, start))
        picked = None if whole else torch.tensor(columns, device=self.device)
        return OneHotPlan(storage, tuple(features), picked, self._row_map(features, storage), tuple(runs))

    def _bag_plan(self, feature: FeatureConfig) -> BagPlan:
        storage = self._storage(feature.table)
        return BagPlan(storage, feature, self._row_map([feature], storage), self._places[feature.name])

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise"."""
        while self._violations:
            self._violations.popleft().raise_if_any()

    # Update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor = 1.0, factor: float = 1.0) -> None:
        """Sum the gradients of equal rows, move the touched rows and their state, and drop the gradients.

        Args:
            lr: rate of optimizers without one of their own.
            scale: what gradients are multiplied by first, such as a clipping factor.
            factor: the schedule's factor, by which an optimizer's own rate (`settings.lr`) is multiplied.
        """
        self.check()
        for storage in self._all_storages():
            storage.step(lr, factor, scale)

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        for storage in self._all_storages():
            storage.discard_gradients()

    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients, those of equal rows summed first; 0-dim, float32."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for storage in self._all_storages():
            if storage.has_gradients:
                total += torch.linalg.vector_norm(storage.summed_gradients()[1], dtype=torch.float64).square()
        return total.to(torch.float32)

    def nonfinite_gradients(self) -> list[str]:
        """Return the features whose tables have NaN or infinite gradients waiting."""
        bad: set[str] = set()
        for storage in self._all_storages():
            if not storage.has_gradients:
                continue
            rows, sums = storage.summed_gradients()
            if bool(torch.isfinite(sums.sum())):
                continue
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
        storage = self._storage(table)
        content = TableState(storage.table_rows(table), storage.table_state(table), storage.steps[table])
        if not copy:
            return content
        state = {name: part.clone() for name, part in content.state.items()}
        return TableState(content.weight.clone(), state, content.step)

    def import_table(self, table: str, content: TableState) -> None:
        """Replace a table's rows and optimizer state.

        Without state in `content`, such as rows trained elsewhere, the optimizer starts anew. The padding row
        stays zero.

        Raises:
            CheckpointError: shapes or names of the state differ; nothing is changed then.
        """
        storage = self._storage(table)
        own = {"weight": storage.table_rows(table)}
        given = {"weight": content.weight}
        if content.state:
            own |= storage.table_state(table)
            given |= content.state
        if own.keys() != given.keys():
            allowed = ", ".join(own)
            raise CheckpointError(
                "another optimizer's state", where=f"table {table!r}", value=", ".join(given), allowed=allowed
            )
        for name, part in given.items():
            if part.shape != own[name].shape:
                where = f"table {table!r}, {name}"
                raise CheckpointError(
                    "the shape differs", where=where, value=tuple(part.shape), allowed=str(tuple(own[name].shape))
                )
        for name, part in given.items():
            own[name].copy_(part)
        if content.state:
            storage.steps[table] = content.step
        else:
            storage.reset_table_state(table)
            if not storage.table_state(table):  # a rule without state, such as SGD: its count is still known
                storage.steps[table] = content.step
        padding = self.tables[table].padding_id
        if padding is not None:
            own["weight"][padding] = 0.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for table in self.tables:
            storage = self._storage(table)
            destination[f"{prefix}{table}.weight"] = storage.table_rows(table)
            for name, part in storage.table_state(table).items():
                destination[f"{prefix}{table}.{name}"] = part
            destination[f"{prefix}{table}.step"] = torch.tensor(storage.steps[table])

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
            storage = self._storage(table)
            targets = {"weight": storage.table_rows(table), **storage.table_state(table)}
            known |= {f"{prefix}{table}.{name}" for name in (*targets, "step")}
            for name, target in targets.items():
                key = f"{prefix}{table}.{name}"
                if key not in state_dict:
                    missing_keys.append(key)
                elif state_dict[key].shape != target.shape:
                    error_msgs.append(
                        f"{key} has shape {tuple(state_dict[key].shape)}, the table {tuple(target.shape)}"
                    )
                else:
                    target.copy_(state_dict[key])
            if f"{prefix}{table}.step" in state_dict:
                storage.steps[table] = int(state_dict[f"{prefix}{table}.step"])
            else:
                missing_keys.append(f"{prefix}{table}.step")
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)

    def summary(self) -> list[TableSummary]:
        """Return what a model's summary says of each table."""
        lines = []
        for name, table in self.tables.items():
            storage = self._storage(name)
            state = storage.table_state(name)
            rule = (table.optimizer or self.optimizer).type if table.trainable else "none"
            users = tuple(feature.name for feature in self.features.values() if feature.table == name)
            sizes = 4 * table.num_rows * table.dim
            trainable = name not in self._frozen
            lines.append(
                TableSummary(name, table.num_rows, table.dim, users, rule, trainable, sizes, sizes * len(state))
            )
        return lines


def _by_name(kind: str, items: Sequence[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in items:
        if item.name in result:
            raise ConfigError(f"two {kind}s of one name", value=item.name)
        result[item.name] = item
    return result
