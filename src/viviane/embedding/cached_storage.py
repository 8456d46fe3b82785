"""A storage whose memory holds some of its rows, the cache, and whose tiers hold the others.

Shapes: R rows of all tables together, S slots of the cache, D their width, N entries of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding.cache_sizes import row_layout, slot_bytes_of
from viviane.embedding.config import TableConfig
from viviane.embedding.device_slot_cache import DeviceSlotCache
from viviane.embedding.launches import RuleRange
from viviane.embedding.prepared import is_same_list
from viviane.embedding.row_lease import RowLease
from viviane.embedding.row_moves import PIECE_ROWS, SlotGroup, TableRows
from viviane.embedding.slot_cache import HostSlotCache, PassMove, SlotCache
from viviane.embedding.state import SavedRows, TableState, check_content
from viviane.embedding.storage import ZERO_ROWS, Storage
from viviane.embedding.table_storage import LocatedRows, TieredTable
from viviane.embedding.tier_rows import MakeTier, TierRows, bytes_of
from viviane.ops.capture import refuse_capture
from viviane.ops.native.pages import advise_huge_pages
from viviane.ops.row_update import Entries, Scratch, initial_state, norm_squared, sort_entries, state_shape
from viviane.ops.slot_table import SWAP_PROGRAMS
from viviane.store import ArrayTier, HostCacheTier, Tier, TierStats
from viviane.store.slots import CacheFullError, Region
from viviane.store.streams import TransferStreams


class CachedStorage(Storage):
    """The rows of all tables of one width and type, some of them in S slots of memory.

    Lookups and updates are those of a `Storage` of S rows: `admit` gives the rows of a batch slots before its lookup,
    fetches what is missing from the table's tier with its optimizer state, and writes changed rows of the slots that
    it takes back. A row is in its slot or in its tier, and what the tier holds of a row in a slot is not read. A row
    that was never trained is in no tier: it begins as in memory, by `viviane.embedding.initializers`.

    Rows move in order while the caller computes: threads copy them between slots and tiers, on a GPU through
    page-locked memory (`viviane.embedding.staged_moves`); where the tiers' rows all lie in host memory that a GPU
    reaches, its own kernels do (`viviane.embedding.device_slot_cache`). Rows of a batch stay as long as its `RowLease`.
    The same batches give the same bits as a `Storage`, whatever the number of slots: sums of gradients go by entries,
    stochastic rounding by rows.

    Args:
        tables, optimizer, device, seed: as of a `Storage`.
        num_slots: of each table.
        make_tier: opens the tier of a table.
        streams: copy rows between host memory and the device; None: slots lie in host memory, where tiers reach them.
        plan_on_device: kernels of the device give rows slots and move them; all tiers are `ArrayTier`s whose memory
            they reach, and rows of 16 bits have an even number of columns.

    Raises:
        ConfigError: a table's optimizer moves rows that no batch has.
    """

    in_tiers = True

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: AnyOptimizer,
        device: torch.device,
        seed: int,
        *,
        num_slots: Mapping[str, int],
        make_tier: MakeTier,
        streams: TransferStreams | None = None,
        plan_on_device: bool = False,
    ) -> None:
        super().__init__(tables, optimizer, device, seed, room=num_slots)
        self._check()
        regions, first = [], 0
        for name, table in self.tables.items():
            regions.append(Region(name, first, table.num_rows, self.bases[name], self.room[name]))
            first += table.num_rows
        self.regions = {one.name: one for one in regions}
        self.key_bases = {one.name: one.first_row for one in regions}
        self.key_null = first
        rules = {name: segment.optimizer for segment in self.rule_ranges for name in segment.tables}
        self.layouts = {name: row_layout(table, rules[name]) for name, table in self.tables.items()}
        self.tiers: dict[str, Tier] = {
            name: make_tier(table, self.layouts[name])
            for name, table in self.tables.items()
            if self.room[name] < table.num_rows
        }
        """Of tables that are not whole in memory."""
        self._below = {
            name: TierRows(table, self.layouts[name], rules[name], seed, self.tiers.get(name))
            for name, table in self.tables.items()
        }
        self._live: dict[int, int] = {}
        self._leases: list[RowLease] = []
        self._clock = 0
        groups = tuple(self._group(i) for i in range(len(self.rule_ranges)))
        self.cache = self._make_cache(regions, groups, streams, plan_on_device)
        self._norm_scratch = Scratch()
        self._sorted: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        """Slots that `prepare` has joined, and their order by row id."""
        for name in self.tables:
            self._fill(name)

    def _make_cache(
        self, regions: Sequence[Region], groups: tuple[SlotGroup, ...], streams: TransferStreams | None, on_device: bool
    ) -> SlotCache:
        if not on_device:
            return HostSlotCache(regions, groups, ZERO_ROWS, streams)
        assert streams is not None
        tiers = {name: one for name, one in self.tiers.items() if isinstance(one, ArrayTier)}
        return DeviceSlotCache(regions, groups, tiers, ZERO_ROWS, streams)

    def _check(self) -> None:
        for segment in self.rule_ranges:
            if getattr(segment.optimizer, "update", "local") == "global":
                raise ConfigError(
                    "update='global' moves every row in each step, also those that are not in the cache",
                    where=f"table {segment.tables[0]!r}", allowed="'local', 'lazy_global'",
                    fix="choose another update, or leave embedding_memory out",
                )  # fmt: skip

    def _allocate(self, device: torch.device, seed: int) -> None:
        weight = torch.zeros(self.null_row + ZERO_ROWS, self.dim, dtype=self.dtype, device=device)
        advise_huge_pages(weight)
        self.register_buffer("weight", weight, persistent=False)
        for i, segment in enumerate(self.rule_ranges):
            for name, value in initial_state(segment.optimizer).items():
                assert segment.optimizer is not None
                shape = state_shape(name, self.weight[segment.start : segment.stop], segment.optimizer)
                state = torch.full(shape, value, dtype=torch.float32, device=device)
                self.register_buffer(f"{name}_{i}", state, persistent=False)

    def _fill(self, name: str) -> None:
        """Put rows where they begin: those of a table that fits into its slots, where they stay."""
        if name not in self.tiers:
            self.cache.fill_whole(self.regions[name])
        elif isinstance(self.cache, DeviceSlotCache):
            self.cache.fill_tier(self.regions[name], self._below[name].beginning_on)

    @property
    def plans_on_host(self) -> bool:
        """Whether rows get slots by keys in host memory."""
        return self.cache.plans_on_host

    # Slots ------------------------------------------------------------------------------------------------------

    def admit(self, rows: Tensor) -> tuple[Tensor, RowLease]:
        """Give the rows of a batch slots, and begin to fetch what is missing.

        Args:
            rows: (N,), of all tables together, as `key_bases` counts them.

        Returns:
            slots, (N,); a lease: `arrive` waits for the rows, which stay as long as it lives.

        Raises:
            CacheFullError: here or in the lease's `settle`: the rows of this batch and of those before it do not fit;
                nothing has changed.
        """
        refuse_capture(
            self.weight.device, "giving rows of tables in tiers their slots",
            fix="look up the keys of the batch itself, each feature once a step, or set cuda_graph=False",
        )  # fmt: skip
        self._clock += 1
        guard = min(self._live, default=self._clock)
        found = self.cache.admit(rows.reshape(-1), self._clock, guard)
        return found.slots.view(rows.shape), RowLease(self._live, self._clock, found)

    def locate(self, rows: Tensor, *, training: bool, ahead: bool) -> LocatedRows:
        """Give the rows of a batch slots; rows that will not be updated are copied aside where they do not fit."""
        try:
            slots, lease = self.admit(rows)
            if not ahead:
                lease.settle()
        except CacheFullError:
            if training:
                raise
            aside, places = self.copies(rows)
            return LocatedRows(places, aside=aside)
        return LocatedRows(slots, lease)

    def begin_pass(
        self, keys: Mapping[str, NDArray[np.int64]], later: Sequence[Mapping[str, NDArray[np.uint8]]] = ()
    ) -> PassMove:
        """Give the rows of a pass slots: write changed rows that leave, then read those that are missing, by address.

        Rows that both passes need stay where they are. A row that no pass names is fetched when a batch has it. Those
        that a later pass needs are written beside each other.
        """
        self.finish_moves()
        for name, own in keys.items():
            if len(own) > self.room[name]:
                size = slot_bytes_of(self.layouts[name])
                raise CacheFullError(
                    "the rows of a pass do not fit into the memory of their table", where=f"table {name!r}",
                    value=f"{len(own):,} rows, {len(own) * size:,} bytes",
                    allowed=f"{self.room[name]:,} rows, {self.room[name] * size:,} bytes",
                    fix="give the table more memory (embedding_memory), or cut the data into more passes",
                )  # fmt: skip
        self._clock += 1
        guard = min(self._live, default=self._clock)
        moved = PassMove()
        for name, own in keys.items():
            follow = [one[name] for one in later]
            moved += self.cache.load(own + self.regions[name].first_row, self._clock, guard, follow)
        return moved

    def copies(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the distinct rows of a batch, (U + 2, D), then zeros, and where each entry's is, (N,)."""
        distinct, places = np.unique(rows.cpu().numpy(), return_inverse=True)
        values = torch.zeros(len(distinct) + ZERO_ROWS, self.dim, dtype=self.dtype)
        self.finish_moves()
        for name, region in self.regions.items():
            own = (distinct >= region.first_row) & (distinct < region.first_row + region.num_rows)
            keys = distinct[own].astype(np.int64) - region.first_row
            weight = np.ascontiguousarray(self.layouts[name].column(self._rows_of(name, keys), "weight"))
            values[torch.from_numpy(own.nonzero()[0])] = torch.from_numpy(weight).view(self.dtype).view(-1, self.dim)
        found = torch.from_numpy(places.reshape(-1)).to(rows.dtype)
        return values.to(self.weight.device), found.to(rows.device)

    def arrive(self, lease: RowLease) -> None:
        """Let lookups wait for the rows of a batch."""
        lease.arrive()

    def hold(self, lease: RowLease) -> None:
        """Keep the rows of a batch until the next step: their gradients wait.

        Raises:
            ConfigError: the step that these rows were looked up for is over, and they may have left their slots.
        """
        if not lease.is_live:
            raise ConfigError(
                "backward through a lookup whose step is over: rows in tiers may have left their slots",
                fix="look the batch up again",
            )  # fmt: skip
        if not any(one is lease for one in self._leases):  # the features of a batch share one
            self._leases.append(lease)

    def finish_moves(self) -> None:
        """Wait until no row is on its way."""
        self.cache.finish()

    def _group(self, index: int) -> SlotGroup:
        """Return the tables of a rule as moves see them."""
        segment = self.rule_ranges[index]
        state = {one: getattr(self, f"{one}_{index}") for one in initial_state(segment.optimizer)}
        columns = {"weight": self.weight[segment.start : segment.stop], **state}
        tables = [
            TableRows(self.regions[name], below.fetch, below.put, below.exchange)
            for name in segment.tables
            for below in (self._below[name],)
        ]
        return SlotGroup(self.layouts[segment.tables[0]], columns, segment.start, tuple(tables))

    def begin_as(self, name: str, fill: Callable[[Tensor, Tensor], None]) -> None:
        """Let rows of a table begin as `fill(weight (K, D), keys (K,))` makes them, when they come into memory."""
        self._below[name].fill = fill
        self.finish_moves()
        self.cache.clear(self.regions[name])
        self._fill(name)

    def _segment(self, name: str) -> tuple[int, RuleRange]:
        return next((i, one) for i, one in enumerate(self.rule_ranges) if name in one.tables)

    def _pack(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return rows out of their slots."""
        group = self._group(self._segment(name)[0])
        packed = torch.zeros(len(slots), group.layout.row_bytes, dtype=torch.uint8, device=self.weight.device)
        group.pack(torch.from_numpy(slots - group.first_slot).to(packed.device), packed)
        rows: NDArray[np.uint8] = packed.cpu().numpy()
        return rows

    def _unpack(self, name: str, slots: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Put rows into slots."""
        group, device = self._group(self._segment(name)[0]), self.weight.device
        places = torch.from_numpy(slots - group.first_slot).to(device)
        group.unpack(places, torch.from_numpy(np.ascontiguousarray(rows)).to(device))

    # Update -----------------------------------------------------------------------------------------------------

    def _updating(self, rows: Tensor) -> ExitStack:
        if self.changed is not None:
            self.changed.mark(self.cache.row_ids[rows.to(torch.int64)])
        self.cache.mark_updated(rows, self._leases, [self.regions[name] for name in self.waiting_tables()])
        return ExitStack()

    def _sort_ahead(self, rows: Tensor) -> None:
        """Sort entries by row id, as the step needs them; `rows` are slots."""
        self._sorted = rows, self._order_of(rows)

    def _order_of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots by rising row id, and the entry that each came from."""
        spare = 0 if self.plans_on_host else SWAP_PROGRAMS
        _, order = sort_entries(self._row_ids(slots), self.key_null + ZERO_ROWS, spare=spare)
        return slots.index_select(0, order), order

    def _row_ids(self, slots: Tensor) -> Tensor:
        return self.cache.row_ids.index_select(0, slots).to(slots.dtype)

    def _entries(self) -> Entries:
        """Return all entries that wait, on a GPU by rising row id: how it rounds a sum depends on that order."""
        if self._all is None and self.weight.is_cuda:
            entries = self._joined()
            prepared, ordered = self._sorted or (None, None)
            is_same = prepared is not None and is_same_list(entries.rows, prepared)
            slots, order = ordered if ordered and is_same else self._order_of(entries.rows)
            self._all = replace(entries, rows=slots, order=order)
        return super()._entries()

    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients; summed in the order that a `Storage` has."""
        if self._summed is None and self.weight.is_cuda:
            entries = self._entries()
            by_row = replace(entries, rows=self._row_ids(entries.rows))
            return norm_squared(by_row, self.dim, num_rows=self.key_null, scratch=self._norm_scratch)
        rows, sums = self.summed_gradients()
        order = torch.argsort(self.cache.row_ids[rows])
        norm: Tensor = torch.linalg.vector_norm(sums[order], dtype=torch.float64)
        return norm.square()

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step, and let their rows go."""
        super().discard_gradients()
        self._sorted = None
        for lease in self._leases:
            lease.end()
        self._leases.clear()

    def _names(self, start: int, stop: int, table: str) -> tuple[Tensor, int]:
        return self.cache.row_ids[start:stop], self.key_bases[table]

    # Content ----------------------------------------------------------------------------------------------------

    def table_rows(self, table: str) -> Tensor:
        """Refuse: no view of a table exists that is not whole in memory."""
        raise self._no_view(table)

    def table_state(self, name: str) -> dict[str, Tensor]:
        """Refuse, as `table_rows`."""
        raise self._no_view(name)

    @property
    def capture_ineligible_reason(self) -> str | None:
        """Why no step can be captured: the host moves rows; None where the device does."""
        if not self.cache.plans_on_host:
            return None
        return f"rows of table {next(iter(self.tiers or self.tables))!r} are moved by threads of the host"

    def checkpoint_tensors(self, table: str) -> dict[str, Tensor]:
        """Return the shapes of what a checkpoint has of a table, on the meta device."""
        found = self.column_shapes(table)
        return {name if name == "weight" else f"state.{name}": one for name, one in found.items()}

    def rows_in_memory(self, table: str) -> Tensor:
        """Return a view of the slots of a table, (slots, D), whatever rows they hold."""
        self.finish_moves()
        return self.weight[self.bases[table] : self.bases[table] + self.room[table]]

    def tables_of(self, rows: Tensor) -> set[str]:
        """Return the names of the tables that own slots."""
        stops = {name: base + self.room[name] for name, base in self.bases.items()}
        return {name for name, base in self.bases.items() if bool(((rows >= base) & (rows < stops[name])).any())}

    def column_shapes(self, name: str) -> dict[str, Tensor]:
        """Return tensors of the shapes of a table's weight and state, without memory."""
        rule = self._segment(name)[1].optimizer
        shape = (self.tables[name].num_rows, self.dim)
        weight = torch.empty(shape, dtype=self.dtype, device="meta")
        found = {"weight": weight}
        for state in initial_state(rule):
            assert rule is not None
            found[state] = torch.empty(state_shape(state, weight, rule), dtype=torch.float32, device="meta")
        return found

    def read_columns(self, name: str, first: int, stop: int) -> dict[str, Tensor]:
        """Return rows of a table and their state, by column, wherever they are: (rows, D), or (rows,)."""
        rows, layout = self.read_rows(name, first, stop), self.layouts[name]
        found = {}
        for column, like in self.column_shapes(name).items():
            data = torch.from_numpy(np.ascontiguousarray(layout.column(rows, column))).view(-1).view(like.dtype)
            found[column] = data.view(stop - first, *like.shape[1:])
        return found

    def write_columns(self, name: str, first: int, given: Mapping[str, Tensor]) -> None:
        """Replace some columns of a table's rows from `first` on; the other columns stay."""
        count, layout, shapes = len(next(iter(given.values()))), self.layouts[name], self.column_shapes(name)
        rows = layout.zeros(count) if given.keys() == shapes.keys() else self.read_rows(name, first, first + count)
        for column, part in given.items():
            values = part.detach().cpu().to(shapes[column].dtype).contiguous()
            layout.column(rows, column)[:] = bytes_of(values)
        self.write_rows(name, first, rows)

    def _replace(self, name: str, given: Mapping[str, Tensor]) -> None:
        for first in range(0, self.tables[name].num_rows, PIECE_ROWS):
            self.write_columns(name, first, {column: one[first : first + PIECE_ROWS] for column, one in given.items()})

    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a whole table's rows, (num_rows, D), and leave its optimizer state alone."""
        self._replace(table, {"weight": rows})

    def export_table(self, table: str, *, copy: bool) -> TableState:
        """Return a table's rows and optimizer state, a copy in memory."""
        whole = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in self.column_shapes(table).items()}
        for first in range(0, self.tables[table].num_rows, PIECE_ROWS):
            stop = min(first + PIECE_ROWS, self.tables[table].num_rows)
            for name, part in self.read_columns(table, first, stop).items():
                whole[name][first:stop] = part
        return TableState(whole.pop("weight"), whole, self.steps[table])

    def import_table(self, table: str, content: TableState) -> None:
        """Copy a table in; see `EmbeddingCollection.import_table`."""
        shapes = self.column_shapes(table)
        has_state = len(shapes) > 1
        if not content.state:
            shapes = {"weight": shapes["weight"]}
        given = {"weight": content.weight, **content.state}
        check_content(table, shapes, given)
        self._replace(table, given)
        if content.state or not has_state:  # a rule without state, such as SGD: its count is still known
            self.steps[table] = content.step
        else:
            self.reset_table_state(table)
        self.clear_padding(table)

    def state_entries(self, table: str, prefix: str) -> dict[str, Tensor]:
        """Return a table's part of a state_dict: copies, and the step."""
        whole = self.export_table(table, copy=True)
        parts = {"weight": whole.weight, **whole.state, "step": torch.tensor(whole.step)}
        return {prefix + name: part for name, part in parts.items()}

    def load_entries(
        self, table: str, prefix: str, given: Mapping[str, Tensor], missing_keys: list[str], error_msgs: list[str]
    ) -> set[str]:
        """Copy a table's part of a state_dict in; return the keys it read."""
        shapes = self.column_shapes(table)
        own = {prefix + name: tuple(one.shape) for name, one in shapes.items()} | {f"{prefix}step": ()}
        fits = True
        for key, shape in own.items():
            if key not in given:
                missing_keys.append(key)
            elif tuple(given[key].shape) != shape:
                error_msgs.append(f"{key} has shape {tuple(given[key].shape)}, the table {shape}")
            fits &= key in given and tuple(given[key].shape) == shape
        if fits:
            self._replace(table, {name: given[prefix + name] for name in shapes})
            self.steps[table] = int(given[f"{prefix}step"])
            self.clear_padding(table)
        return set(own)

    def _no_view(self, name: str) -> ConfigError:
        return ConfigError(
            "the rows of a table in tiers lie in no one piece of memory", where=f"table {name!r}",
            fix="use export_table or read_rows, or leave embedding_memory out",
        )  # fmt: skip

    def column_pieces(
        self, table: str, name: str, rows: NDArray[np.int64] | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of one of `checkpoint_tensors`, out of memory and tiers, a piece at a time."""
        column, count = name.removeprefix("state."), self.tables[table].num_rows if rows is None else len(rows)
        for first in range(0, count, PIECE_ROWS):
            stop = min(first + PIECE_ROWS, count)
            found = self.read_rows(table, first, stop) if rows is None else self.rows_at(table, rows[first:stop])
            yield np.ascontiguousarray(self.layouts[table].column(found, column))

    def restore(self, table: str, saved: SavedRows, *, weights_only: bool) -> None:
        """Replace a table's rows in memory and tiers, a piece at a time; see `Storage.restore`."""
        shapes = {name: one for name, one in self.column_shapes(table).items() if name == "weight" or not weights_only}
        for first in range(0, self.tables[table].num_rows, PIECE_ROWS):
            stop = min(first + PIECE_ROWS, self.tables[table].num_rows)
            given = {}
            for name, like in shapes.items():
                given[name] = torch.empty(stop - first, *like.shape[1:], dtype=like.dtype)
                saved.copy_to(name if name == "weight" else f"state.{name}", given[name], first)
            self.write_columns(table, first, given)
        self._end_restore(table, saved, weights_only)

    def read_rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """Return rows first <= row < stop of a table with their state, as `layouts[name]` says, wherever they are."""
        self.finish_moves()
        return self._rows_of(name, np.arange(first, stop))

    def rows_at(self, name: str, keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return some distinct rows of a table with their state, as `read_rows` does."""
        self.finish_moves()
        return self._rows_of(name, keys)

    def _rows_of(self, name: str, keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return rows of distinct keys of a table out of their slots and tier, while nothing moves."""
        slots = self.cache.places(keys + self.regions[name].first_row)
        rows, there = self.layouts[name].empty(len(keys)), slots >= 0
        if not there.all():
            rest = self.layouts[name].zeros(int((~there).sum()))
            self._below[name].fetch(keys[~there], rest)
            rows[~there] = rest
        if there.any():
            rows[there] = self._pack(name, slots[there])
        return rows

    def write_rows(self, name: str, first: int, rows: NDArray[np.uint8]) -> None:
        """Replace rows of a table with their state, from `first` on; see `read_rows`."""
        self.finish_moves()
        region = self.regions[name]
        stop = first + len(rows)
        if self.changed is not None:
            self.changed.mark_range(region.first_row + first, region.first_row + stop)
        slots = self.cache.places(np.arange(region.first_row + first, region.first_row + stop))
        there = slots >= 0
        if name in self.tiers:
            self.tiers[name].put(np.arange(first, stop), rows)
        if there.any():
            self._unpack(name, slots[there], rows[there])
            self.cache.set_dirty(slots[there], name not in self.tiers)

    def reset_table_state(self, name: str) -> None:
        """Put a table's optimizer state back to its beginning."""
        layout = self.layouts[name]
        for first in range(0, self.tables[name].num_rows, PIECE_ROWS):
            stop = min(first + PIECE_ROWS, self.tables[name].num_rows)
            rows, fresh = self.read_rows(name, first, stop), self._below[name].beginning(np.arange(1))
            for column in layout.columns[1:]:
                layout.column(rows, column.name)[:] = layout.column(fresh, column.name)
            self.write_rows(name, first, rows)
        self.steps[name] = 0

    def clear_row(self, name: str, row: int) -> None:
        """Make a row of a table zero, and leave its optimizer state alone."""
        self.write_columns(name, row, {"weight": torch.zeros(1, self.dim, dtype=self.dtype)})

    def take_snapshots(self) -> bool:
        """Hold nothing: rows in tiers are written before training continues."""
        return False

    def tiered_tables(self) -> dict[str, TieredTable]:
        """Return by name the tables of which memory has only some rows."""
        return {
            name: TieredTable(self.tables[name].num_rows, self.room[name], slot_bytes_of(self.layouts[name]), tier)
            for name, tier in self.tiers.items()
        }

    def tier_stats(self) -> dict[str, TierStats]:
        """Return what was counted: "memory", the cache, and by name of the tiers below it."""
        hits, misses = self.cache.hits_and_misses()
        found: dict[str, TierStats] = {"memory": TierStats(hits=hits, misses=misses)}
        for tier in self.tiers.values():
            below: Tier | None = tier
            while below is not None:
                stats = below.stats()
                found[below.name] = found[below.name].plus(stats) if below.name in found else stats
                below = below.below if isinstance(below, HostCacheTier) else None
        moved = self.cache.moved()
        if moved.rows_read or moved.rows_written:
            name = next(iter(self.tiers.values())).name
            found[name] = found[name].plus(moved)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if fn(torch.zeros(1, device=self.weight.device)).device != self.weight.device:
            raise ConfigError("a cache of tables stays on its device", value=str(self.weight.device),
                              fix="build the collection with device=")  # fmt: skip
        return super()._apply(fn, recurse)
