"""The embedding collection: tables, the features that look them up, and their fused optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config.optimizers import AnyOptimizer
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, DataError, VivianeError, suggest
from viviane.embedding.base import Handover, LocalCollection
from viviane.embedding.batch_keys import AnyKeys, read_keys
from viviane.embedding.buffers import Buffers, Memory, WideRows, autocast_buffers, output_memory
from viviane.embedding.cache_sizes import CacheSettings
from viviane.embedding.compiled import (
    compiled_call,
    compiled_limit_norms,
    compiled_lookup,
    compiled_norm_squared,
    compiled_step,
)
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.construction import by_name, checked_dtype, make_storages
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.keys import Violations
from viviane.embedding.lookup import (
    Lookup,
    LookupPlan,
    LookupPlanner,
    OneHotPlan,
    ResolvedAhead,
    TablesOf,
    arrive,
    both,
    gather,
    hand_over,
    place_features,
    prepare,
    settle,
    whole_table,
)
from viviane.embedding.operators import new_number
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.state import TableState, TableSummary, summarize
from viviane.embedding.static_lookup import Resolved
from viviane.embedding.storage import Storage
from viviane.embedding.table_storage import TableStorage, begin_updates, sent
from viviane.ops.dispatch import kernels_serve
from viviane.ops.dot_interaction import TableRows
from viviane.ops.int8_rows import is_int8
from viviane.store.slots import CacheFullError

_MOST_UNCHECKED = 256  # lookups on a GPU whose range checks may wait unread


class EmbeddingCollection(LocalCollection):
    """Embedding tables, their features and their optimizer.

    All tables of one width and type lie in one storage, and one lookup serves all its one-hot features. Backward keeps
    the gradients of the touched rows; `step` sums those of equal rows and moves rows and state in place. No
    `nn.Parameter` and no dense gradient exist.

    A table whose settings are a `DynamicTableConfig` takes any int64 as key: in training new keys get rows.

    In `eval()` mode, and where autograd is off, nothing is kept.

    Args:
        tables: settings of the tables.
        features: settings of the features; the output has them side by side in this order.
        optimizer: the rule of tables that have none of their own.
        device: "cpu", "cuda", ...
        seed: of the initial values; a row's depend besides on its table's name and law and on its key alone.
        output_dtype: of the output: float32, float16 or bfloat16, whatever the tables are of. Under autocast on a GPU
            float32 becomes its type where the output's width is a multiple of 8: products would round it to that.
        cache: memory for rows of tables that are larger than it, see `viviane.embedding.CachedStorage`; None: all
            tables are whole in memory.

    Example:
        >>> from viviane.batch import Bag
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
        tables: Sequence[TableConfig | DynamicTableConfig],
        features: Sequence[FeatureConfig],
        optimizer: AnyOptimizer,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        cache: CacheSettings | None = None,
    ) -> None:
        super().__init__()
        self.tables: dict[str, TableConfig | DynamicTableConfig] = by_name("table", tables)
        self.features: dict[str, FeatureConfig] = by_name("feature", features)
        self.optimizer = optimizer
        for feature in features:
            if feature.table not in self.tables:
                where, fix = f"feature {feature.name!r}", suggest(feature.table, self.tables)
                raise ConfigError("no such table", where=where, value=feature.table, fix=fix)
        if not features:
            raise ConfigError("an embedding collection needs at least one feature")
        self._places = place_features(features, self.tables)
        self._width = max(place.stop for place in self._places.values())
        fixed, dynamic = make_storages(tables, optimizer, resolve_device(str(device)), seed, cache)
        self.storages = nn.ModuleList([*fixed, *dynamic])
        self._fixed, self._dynamic = tuple(fixed), tuple(dynamic)
        self._storages: tuple[TableStorage, ...] = (*fixed, *dynamic)
        """The same; modules look their attributes up slowly, and these are asked for several times a step."""
        self._storage_of = {name: i for i, one in enumerate(self._storages) for name in one.tables}
        self._frozen = frozenset(table.name for table in tables if not table.trainable)
        self._violations = Violations()
        self._memory = Buffers(checked_dtype(output_dtype))
        self._plans: dict[tuple[tuple[str, ...], torch.device], LookupPlan] = {}
        self._number = new_number(self)
        self._ahead: dict[int, ResolvedAhead] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = new_number(self)  # compiled code must not take a copy for its original
        self._ahead = {}

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._storages[0].weight.device

    @property
    def width(self) -> int:
        """Columns of the flat output."""
        return self._width

    def _storage(self, table: str) -> TableStorage:
        try:
            return self._storages[self._storage_of[table]]
        except KeyError:
            raise ConfigError("no such table in the collection", value=table, fix=suggest(table, self.tables)) from None

    def parts(self) -> list[EmbeddingCollection]:
        """Return this collection: it has all of its tables."""
        return [self]

    def all_storages(self) -> list[TableStorage]:
        """Return the storages: one for each width and type, one for each dynamic table."""
        return list(self._storages)

    def fixed_storages(self) -> list[Storage]:
        """Return the storages of tables of fixed size: the first ones of `all_storages`."""
        return list(self._fixed)

    def dynamic_storages(self) -> list[DynamicStorage]:
        """Return the storages of dynamic tables: the others of `all_storages`."""
        return list(self._dynamic)

    def dynamic_table(self, table: str) -> DynamicTable:
        """Return a dynamic table, to find, export, erase, ... its keys.

        Raises:
            ConfigError: there is no such table, or its settings are a TableConfig.
        """
        return self._storage(table).dynamic_table(table)

    def _static(self, table: str) -> Storage:
        if self._storage(table).is_dynamic:
            fix = "use dynamic_table(name).export() and import_()"
            raise ConfigError("the rows of a dynamic table come with their keys", value=table, fix=fix)
        return self._fixed[self._storage_of[table]]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tables that do not move."""
        return self._frozen

    @property
    def output_buffers(self) -> Buffers:
        """Where outputs are allocated."""
        return self._memory

    @property
    def output_dtype(self) -> torch.dtype:
        """The type of the output."""
        return self._memory.dtype

    # Lookup -------------------------------------------------------------------------------------------------

    def forward(self, batch: AnyKeys) -> EmbeddingOutput:
        """Look a batch up.

        Args:
            batch: a Batch that has all features; keys by feature: a Bag, ids (B,), or ids (B, H); or TorchRec's
                KeyedJaggedTensor.

        Raises:
            KeyRangeError: a key out of range in a table with "raise"; on a GPU `check` and `step` raise it.
            DataError: a bag is longer than max_length, or features differ in their number of rows.
        """
        training = self.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            trains = training and any(feature.table not in self._frozen for feature in self.features.values())
            flat, masks = compiled_lookup(self._number, batch, tuple(self.features), trains)
            return EmbeddingOutput(flat, self._places, masks)
        size, parts, masks = self._resolved(batch, training)
        arrive(parts)
        device = self.device
        memory, wide = self._output_memory(device)
        if training and any(part.tables for part in parts):
            anchor = torch.empty(0, device=device, requires_grad=True)
            flat = Lookup.apply(anchor, parts, size, self._width, memory)  # type: ignore[no-untyped-call]
            if self.gradient_watch is not None:
                flat.register_hook(self.gradient_watch)
        else:
            with torch.no_grad():
                flat = gather(parts, size, self._width, memory)
        return EmbeddingOutput(flat, self._places, masks, wide)

    @torch.no_grad()
    def lookup_rows(self, batch: Batch) -> TableRows | None:
        """Return the rows that hold a batch's vectors (B, F, D), for a reader that looks them up itself.

        Returns:
            None where that saves nothing or cannot be: no GPU, other than one storage of one-hot features in their
            order, 8-bit rows, or no row of the batch.
        """
        if not kernels_serve(self.device) or torch.compiler.is_compiling() or not batch.size:
            return None
        plans = self.one_hot_plans(batch.layout.one_hot)
        if plans is None or len(plans) != 1 or is_int8(plans[0].storage.weight):
            return None
        [plan] = plans
        dim = plan.storage.dim
        if not dim or plan.places != tuple(range(0, self._width, dim)):
            return None
        _, [part], _ = self.resolve(batch, training=False)
        return TableRows(part.weight, part.rows, autocast_buffers(self._memory, self._width, self.device).dtype)

    def look_up_apart(self, batch: AnyKeys) -> tuple[Tensor, Handover | None]:
        """Look a batch up in training without autograd: its two passes through the engine cost more than small lookups.

        Returns:
            the vectors (B, W), and what takes their gradient, to be called once before `step`; None: no table moves.
        """
        if self.gradient_watch is not None or torch.compiler.is_compiling():
            return super().look_up_apart(batch)  # type: ignore[arg-type]  # forward takes more
        flat, _, take = self.look_up_with_masks(batch)
        return flat, take

    @torch.no_grad()
    def look_up_with_masks(self, batch: AnyKeys) -> tuple[Tensor, dict[str, Tensor], Handover | None]:
        """Do what `look_up_apart` does, without a watch of gradients; return the masks of "concat" features as well."""
        size, parts, masks = self._resolved(batch, self.training)
        arrive(parts)
        moves = any(part.tables for part in parts)
        if moves:
            prepare(parts, size, self._width)
        flat = gather(parts, size, self._width, self._output_memory(self.device)[0])
        return flat, masks, partial(hand_over, parts) if moves else None

    def all_rows(self, table: str) -> Tensor:
        """Return all rows of a table that is not dynamic, (num_rows, dim), as a lookup of every key would."""
        trains = self.training and torch.is_grad_enabled() and table not in self._frozen
        return whole_table(self._static(table), table, self._memory.dtype, trains=trains)

    def _resolved(self, batch: AnyKeys, training: bool) -> Resolved:
        """Take what was resolved ahead, or resolve now; then rows of batches whose turn comes later may have to go."""
        if (kept := self._ahead.pop(id(batch), None)) is not None:
            try:
                settle(kept.found[1])
                self._violations.extend(kept.violations)
                return kept.found if kept.of == "all" else both(kept.found, self.resolve(batch, training, of="dynamic"))
            except CacheFullError:  # rows of batches before it were in use when it was announced
                del kept
        try:
            return self.resolve(batch, training)
        except CacheFullError:
            if not self._ahead:
                raise
            self.end_ahead()
        return self.resolve(batch, training)

    @property
    def has_tiers(self) -> bool:
        """Whether some tables are not whole in memory."""
        return any(one.in_tiers for one in self._storages)

    @property
    def looks_ahead(self) -> bool:
        """Whether `resolve_ahead` can fetch rows."""
        return any(one.in_tiers for one in self._fixed)

    def resolve_ahead(self, batch: AnyKeys, host: AnyKeys | None = None) -> bool:
        """Begin to fetch the rows of a batch that will be trained on; for the next lookup of the same object.

        Keys of dynamic tables are resolved when the batch is looked up: it counts them, and new ones get rows.

        Args:
            batch: what will be looked up.
            host: the same keys in host memory, where `batch` is on a GPU and `plans_on_host` holds.

        Returns:
            False where that is not possible: its lookup has the reason, or it is too early, since rows of other batches
            fill the cache.
        """
        of: TablesOf = "fixed" if self._dynamic else "all"
        try:
            with self._violations.apart() as violations:
                if self.plans_on_host:
                    found = self._resolve_on_host(batch if host is None else host, of)
                else:
                    if isinstance(batch, Batch):
                        batch.wait()
                    found = self.resolve(batch, training=True, ahead=True, of=of)
            self._ahead[id(batch)] = ResolvedAhead(batch, found, violations, of)
        except (VivianeError, IndexError):
            return False
        return True

    @property
    def resolves_before_replay(self) -> bool:
        """Whether the host begins the lookups of a captured step before its replay: they need rows of a cache."""
        return any(one.in_tiers for one in self.all_storages())

    def resolved_for_replay(self, batch: Batch) -> Resolved:
        """Return a batch's lookups for a replay; the current stream waits for their rows.

        What is wrong with their keys goes to the records that graphs read (`key_records`).
        """
        batch.wait()
        with self._violations.apart() as violations:
            found = self._resolved(batch, training=True)
        self._violations.merge_into_lasting(violations)
        arrive(found[1])
        return found

    def provide(self, batch: Batch, found: Resolved) -> None:
        """Let the next lookup of a batch be this one."""
        self._ahead[id(batch)] = ResolvedAhead(batch, found, [])

    @property
    def plans_on_host(self) -> bool:
        """Whether the host gives rows slots, by keys in host memory; otherwise the device does."""
        return self.device.type == "cpu" or any(one.plans_on_host for one in self._storages)

    def _resolve_on_host(self, batch: AnyKeys, of: TablesOf) -> Resolved:
        """Resolve keys in host memory for a lookup on the collection's device."""
        size, parts, masks = self.resolve(batch, training=True, where=torch.device("cpu"), ahead=True, of=of)
        return size, [part.to(self.device) for part in parts], {n: sent(m, self.device) for n, m in masks.items()}

    def forget_ahead(self, batch: AnyKeys) -> None:
        """Let go of a batch that was resolved ahead, if it was not looked up."""
        self._ahead.pop(id(batch), None)

    def end_ahead(self) -> None:
        """Let go of batches that were resolved ahead and not looked up."""
        self._ahead.clear()

    def resolve(
        self,
        batch: AnyKeys,
        training: bool,
        where: torch.device | None = None,
        *,
        ahead: bool = False,
        of: TablesOf = "all",
    ) -> Resolved:
        """Find the rows of a batch's keys: rows of the batch, lookups, and the masks of "concat" features.

        Args:
            where: the device of the keys, which computes; None: the collection's.
            ahead: the lookup comes later, and may then find that its rows do not fit.
            of: the tables that are looked up.
        """
        if self._violations.num_lookups >= _MOST_UNCHECKED:
            self.check()
        device = where or self.device
        keys = read_keys(batch, self.features, device, self._violations)
        parts, masks = self._plan(keys.one_hot_names, device).parts(keys, self._frozen, training, ahead, of)
        return keys.size, parts, masks

    def settle_rows(self) -> None:
        """Make all that a step still needs of the batch, which may be written to beside the step then."""
        for storage in self.all_storages():
            storage.settle_rows()

    def _output_memory(self, device: torch.device) -> tuple[Memory, WideRows | None]:
        """Return where the output goes, twice where that has room next to it."""
        return output_memory(autocast_buffers(self._memory, self._width, device), self.margins, self._width, device)

    def _plan(self, one_hot: tuple[str, ...], device: torch.device) -> LookupPlan:
        key = (one_hot, device)
        if key not in self._plans:
            make = LookupPlanner(
                self.features, self.tables, self._fixed, self._dynamic, self._places, self._violations, device
            )
            self._plans[key] = make.plan(one_hot)
        return self._plans[key]

    def one_hot_plans(self, one_hot: Sequence[str]) -> tuple[OneHotPlan, ...] | None:
        """Return how batches with these one-hot columns are looked up, where nothing else is; else None."""
        plan = self._plan(tuple(one_hot), self.device)
        cached = any(one.storage.in_tiers for one in plan.one_hot)
        return None if cached or plan.pooled or plan.concat or plan.dynamic else plan.one_hot

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise".

        Between the replays of a CUDA graph too; while one is recorded nothing is read.
        """
        if torch.compiler.is_compiling():
            compiled_call(self._number, "check")
            return
        self._violations.check()
        for storage in self._storages:
            storage.check()

    # Update -------------------------------------------------------------------------------------------------

    def step(
        self,
        lr: float | Tensor,
        scale: float | Tensor = 1.0,
        factor: float | Tensor = 1.0,
        gate: Tensor | None = None,
    ) -> None:
        """Sum the gradients of equal rows, move the touched rows and their state, and drop the gradients.

        Args:
            lr: rate of optimizers without one of their own; a number, or a 0-dim tensor on the device, as a CUDA graph
                needs it: then the device counts the steps too. See docs/how-to/cuda-graphs.md.
            scale: what gradients are multiplied by first, such as a clipping factor.
            factor: the schedule's factor, by which an optimizer's own rate (`settings.lr`) is multiplied.
            gate: 0-dim, int32, on the device; 0 leaves all rows, state and counts as they are.
        """
        if torch.compiler.is_compiling():
            if isinstance(lr, Tensor) or isinstance(factor, Tensor) or gate is not None:
                raise ConfigError(
                    "in compiled code lr and factor are numbers, without a gate", fix="call step outside of it"
                )
            compiled_step(self._number, lr, scale, factor)
            return
        self.check()
        with torch.no_grad():
            self.begin_step(lr, scale, factor, gate)()

    def begin_step(
        self, lr: float | Tensor, scale: float | Tensor, factor: float | Tensor, gate: Tensor | None
    ) -> Callable[[], None]:
        """Do what `step` does, without its check, under `torch.no_grad`; see `TableCollection.begin_step`."""
        device = self.device
        return begin_updates(
            self._storages, device, f"update {self._number}", lambda one: one.step(lr, factor, scale, gate)
        )

    def key_records(self) -> list[Tensor]:
        """Return the records, (3,), int64, that recorded lookups write: the first number is 0 until a key is wrong."""
        return self._violations.lasting_records()

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        if torch.compiler.is_compiling():
            compiled_call(self._number, "discard_gradients")
            return
        for storage in self.all_storages():
            storage.discard_gradients()

    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients, those of equal rows summed first; 0-dim, float32."""
        if torch.compiler.is_compiling():
            return compiled_norm_squared(self._number, self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for storage in self.all_storages():
            if storage.has_gradients:
                total += storage.norm_squared()
        return total.to(torch.float32)

    def nonfinite_gradients(self) -> list[str]:
        """Return the features whose tables have NaN or infinite gradients waiting."""
        bad: set[str] = set()
        for storage in self.all_storages():
            # One pass over what waits; only where that finds something are gradients summed by row.
            if all(math.isfinite(one.sum().item()) for one in storage.waiting_gradients()):
                continue
            rows, sums = storage.summed_gradients()
            bad |= storage.tables_of(rows[~torch.isfinite(sums).all(1)])
        return [feature.name for feature in self.features.values() if feature.table in bad]

    @torch.no_grad()
    def limit_norms(self, table: str, ids: Tensor, max_norm: float, norm_type: float = 2.0) -> None:
        """Scale rows, in place, whose norm is larger than `max_norm` to it, and leave their optimizer state alone.

        Args:
            table: with all its rows in memory.
            ids: of rows, repeated or not, of any shape; those that are no row are left to the lookup to report.
            max_norm: the largest norm.
            norm_type: p of the norm.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise DataError("ids must be whole numbers", value=str(ids.dtype), allowed="int64 or int32")
        if torch.compiler.is_compiling():
            compiled_limit_norms(self._number, table, ids, max_norm, norm_type)
            return
        storage = self._static(table)
        if storage.in_tiers:
            where, fix = f"table {table!r}", "leave it out of embedding_memory"
            raise ConfigError("norms are limited where the whole table is in memory", where=where, fix=fix)
        storage.limit_norms(table, ids.reshape(-1).to(self.device), max_norm, norm_type)

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
        """Return a table's rows and optimizer state: a copy, or views of the live memory for writing to a file.

        Raises:
            ConfigError: the table is dynamic; see `dynamic_table`.
        """
        return self._static(table).export_table(table, copy=copy)

    def table_rows(self, table: str) -> Tensor:
        """Return a view of a table's rows, (num_rows, dim); of a dynamic table those that have had a key."""
        storage = self._storage(table)
        storage.settle()  # the view may be written to
        return storage.table_rows(table)

    def rows_in_memory(self, table: str) -> Tensor:
        """Return a view of the rows of a table that are in memory: all of them, where it is not in tiers."""
        storage = self._storage(table)
        storage.settle()  # the view may be written to
        return storage.rows_in_memory(table)

    def import_table(self, table: str, content: TableState) -> None:
        """Replace a table's rows and optimizer state.

        Without state in `content`, such as rows trained elsewhere, the optimizer starts over. The padding row
        stays zero.

        Raises:
            CheckpointError: shapes or names of the state differ; nothing is changed then.
        """
        self._static(table).import_table(table, content)

    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a table's rows, (num_rows, dim), and leave its optimizer state alone."""
        self._static(table).copy_rows(table, rows)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for table in self.tables:
            destination.update(self._storage(table).state_entries(table, f"{prefix}{table}."))

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
            own = f"{prefix}{table}."
            known |= self._storage(table).load_entries(table, own, state_dict, missing_keys, error_msgs)
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)

    def summary(self) -> list[TableSummary]:
        """Return the rows of each table for the summary of a model."""
        lines = []
        for name, table in self.tables.items():
            users = tuple(feature.name for feature in self.features.values() if feature.table == name)
            num_rows = self._storage(name).num_rows(name)
            lines.append(summarize(table, self.optimizer, users, num_rows, name not in self._frozen))
        return lines
