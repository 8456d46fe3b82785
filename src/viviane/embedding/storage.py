"""One storage for all tables of one width and type: rows, optimizer state, and the gradients that wait for a step.

Shapes: R rows of all tables together, D their width, N entries, U distinct rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.core.seeds import derive_seed
from viviane.embedding.changed_marks import ChangedMarks
from viviane.embedding.config import TableConfig
from viviane.embedding.initializers import fill_initial
from viviane.embedding.launches import Launch, Launches, RuleRange
from viviane.embedding.prepared import Prepared, prepare_entries
from viviane.embedding.row_mean import RowMean
from viviane.embedding.row_snapshot import RowSnapshot
from viviane.embedding.state import SavedRows, TableState, check_content
from viviane.embedding.step_counters import StepCounters
from viviane.embedding.table_lock import TableLock, serialized
from viviane.embedding.table_storage import (
    MANY_WAITING,
    RowGradients,
    StorageLookup,
    TableStorage,
    distinct_gradients,
    join_entries,
    warn_of_lost_updates,
)
from viviane.ops.capture import is_capturing, refuse_capture
from viviane.ops.dispatch import kernels_serve
from viviane.ops.native.pages import advise_huge_pages
from viviane.ops.row_update import (
    Entries,
    Scratch,
    initial_state,
    join_rows,
    norm_squared,
    prepare_overlapped,
    prepare_rows,
    state_shape,
    sum_rows,
    update_rows,
)

ZERO_ROWS = 2
"""Rows of zeros behind those of all tables, see `viviane.ops.key_rows`."""
_FILL_ELEMENTS = 1 << 22  # numbers that begin at a time


class Storage(TableStorage):
    """The rows of all tables of one width and type, with two last rows that are always zero.

    Args:
        tables: all of one dim and dtype.
        optimizer: the rule of tables without their own.
        device: where the rows are.
        seed: of the initial values and of stochastic rounding.
        room: rows of memory for each table; None: for all its rows.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: AnyOptimizer,
        device: torch.device,
        seed: int,
        *,
        room: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        rules = [table.optimizer or optimizer if table.trainable else None for table in tables]
        order = sorted(range(len(tables)), key=lambda i: rules.index(rules[i]))  # tables of one rule are neighbours
        self.tables: dict[str, TableConfig] = {tables[i].name: tables[i] for i in order}
        self.dim = tables[0].dim
        self.dtype = tables[0].torch_dtype
        self.room = {name: table.num_rows if room is None else room[name] for name, table in self.tables.items()}
        self.bases: dict[str, int] = {}
        self.rule_ranges: list[RuleRange] = []
        self.steps = StepCounters(list(self.tables))
        self.lock = TableLock()
        start = 0
        for i in order:
            table = tables[i]
            self.bases[table.name] = start
            stop = start + self.room[table.name]
            if self.rule_ranges and self.rule_ranges[-1].optimizer == rules[i]:
                last = self.rule_ranges.pop()
                self.rule_ranges.append(RuleRange(last.start, stop, last.optimizer, (*last.tables, table.name)))
            else:
                self.rule_ranges.append(RuleRange(start, stop, rules[i], (table.name,)))
            start = stop
        self.null_row = start
        self.key_bases, self.key_null = self.bases, start
        self._allocate(device, seed)
        self._seed = derive_seed(seed, "rounding", *self.tables) % 2**32
        self._pending: list[RowGradients] = []
        self._all: Entries | None = None
        self._summed: tuple[Tensor, Tensor] | None = None
        self._prepared: Prepared | None = None
        self._gradient_stride = (0, 0)
        """An output's width, and how far apart the rows of its last gradient began."""
        self._scratch = Scratch()
        rounds = self.dtype != torch.float32
        self._launches = Launches(self.rule_ranges, self.bases, self.room, self.steps, rounds)
        self.row_mean: RowMean | None = None
        self.snapshots: dict[int, RowSnapshot] = {}
        """By rule_range, what a checkpoint in progress still has to read."""
        self._all_read: threading.Event | None = None
        self.changed: ChangedMarks | None = None
        """Rows that have changed since `follow_changes`, of all tables as `key_bases` counts them."""
        self.is_joined = False
        """Whether what waits is a sum over all processes already."""

    def _allocate(self, device: torch.device, seed: int) -> None:
        weight = torch.empty(self.null_row + ZERO_ROWS, self.dim, dtype=self.dtype, device=device)
        advise_huge_pages(weight)
        self.register_buffer("weight", weight, persistent=False)
        self.weight[self.null_row :] = 0.0
        for name, table in self.tables.items():
            fill_initial(self.table_rows(name), table, seed)
        for i, rule_range in enumerate(self.rule_ranges):
            for name, value in initial_state(rule_range.optimizer).items():
                assert rule_range.optimizer is not None
                shape = state_shape(name, self.weight[rule_range.start : rule_range.stop], rule_range.optimizer)
                state = torch.empty(shape, dtype=torch.float32, device=device)
                advise_huge_pages(state)
                self.register_buffer(f"{name}_{i}", state.fill_(value), persistent=False)

    def follow_changes(self) -> None:
        """Note from now on which rows change; what changed before is forgotten."""
        if self.changed is None:
            self.changed = ChangedMarks(self.key_null + ZERO_ROWS, self.weight.device)
        self.changed.clear()

    def changed_rows(self, table: str) -> Tensor | None:
        """Return the rows of a table that have changed since `follow_changes`, rising; None: all may have."""
        rule = next(one.optimizer for one in self.rule_ranges if table in one.tables)
        if self.changed is None or self.row_mean is not None or getattr(rule, "update", "local") == "global":
            return None
        start = self.key_bases[table]
        return self.changed.rows(start, start + self.tables[table].num_rows)

    def _note_table(self, table: str) -> None:
        """Note that a whole table has been replaced."""
        if self.changed is not None:
            start = self.key_bases[table]
            self.changed.mark_range(start, start + self.tables[table].num_rows)

    def num_rows(self, table: str) -> int:
        """Return the number of rows of a table."""
        return self.tables[table].num_rows

    def num_steps(self, table: str) -> int:
        """Return the number of updates of a table."""
        return self.steps[table]

    def table_rows(self, table: str) -> Tensor:
        """Return the view (num_rows, dim) of a table."""
        start = self.bases[table]
        return self.weight[start : start + self.tables[table].num_rows]

    def tables_of(self, rows: Tensor) -> set[str]:
        """Return the names of the tables that own rows of this storage."""
        stops = {name: base + self.tables[name].num_rows for name, base in self.bases.items()}
        return {name for name, base in self.bases.items() if bool(((rows >= base) & (rows < stops[name])).any())}

    def check(self) -> None:
        """Raise the errors that the device found in captured steps since the last call."""
        self.steps.check()

    @property
    def num_steps_was_set(self) -> bool:
        """Whether the number of updates was set since the last step, other than by a step."""
        return self.steps.were_set

    def checkpoint_tensors(self, table: str) -> dict[str, Tensor]:
        """Return views of a table's rows, "weight", and of its optimizer state, "state.<name>"."""
        return {"weight": self.table_rows(table), **{f"state.{n}": one for n, one in self.table_state(table).items()}}

    def mean_rows(self, table: str) -> Tensor | None:
        """Return an up-to-date view of the running mean of a table's rows; None if there is none."""
        if self.row_mean is None:
            return None
        self.settle()
        start = self.bases[table]
        return self.row_mean.catch_up(self.weight).mean[start : start + self.tables[table].num_rows]

    def table_state(self, name: str) -> dict[str, Tensor]:
        """Return the views of a table's optimizer state, each (num_rows, dim), or (num_rows,)."""
        i = next(i for i, one in enumerate(self.rule_ranges) if name in one.tables)
        return self._state(i, self.bases[name], self.bases[name] + self.tables[name].num_rows)

    def _state(self, index: int, start: int, stop: int) -> dict[str, Tensor]:
        rule_range = self.rule_ranges[index]
        names = initial_state(rule_range.optimizer)
        if (start, stop) == (rule_range.start, rule_range.stop):
            return {name: getattr(self, f"{name}_{index}") for name in names}
        inside = slice(start - rule_range.start, stop - rule_range.start)
        return {name: getattr(self, f"{name}_{index}")[inside] for name in names}

    def reset_table_state(self, name: str) -> None:
        """Put a table's optimizer state back to its beginning."""
        self.settle()
        self._note_table(name)
        rule_range = next(one for one in self.rule_ranges if name in one.tables)
        initial = initial_state(rule_range.optimizer)
        for state_name, state in self.table_state(name).items():
            state.fill_(initial[state_name])
        self.steps[name] = 0

    def restore(self, table: str, saved: SavedRows, *, weights_only: bool) -> None:
        """Replace a table's rows, and its optimizer state unless `weights_only`, which makes it start again."""
        self.settle()
        self._note_table(table)
        for name, own in self.checkpoint_tensors(table).items():
            if name == "weight" or not weights_only:
                saved.copy_to(name, own)
        self._end_restore(table, saved, weights_only)

    def _end_restore(self, table: str, saved: SavedRows, weights_only: bool) -> None:
        if weights_only:
            self.reset_table_state(table)
        else:
            self.steps[table] = saved.step
        if saved.padding_row is not None:
            self.clear_row(table, saved.padding_row)

    def begin_as(self, name: str, fill: Callable[[Tensor, Tensor], None]) -> None:
        """Let rows of a table begin as `fill(weight (K, D), keys (K,))` makes them; before the first lookup."""
        weight = self.table_rows(name)
        count = max(1, _FILL_ELEMENTS // self.dim)
        for first, rows in zip(range(0, len(weight), count), torch.split(weight, count), strict=True):
            fill(rows, torch.arange(first, first + len(rows), device=weight.device))

    def clear_padding(self, name: str) -> None:
        """Make a table's padding row zero, as it stays."""
        padding = self.tables[name].padding_id
        if padding is not None:
            self.clear_row(name, padding)

    def clear_row(self, name: str, row: int) -> None:
        """Make a row of a table zero, and leave its optimizer state alone."""
        if self.changed is not None:
            self.changed.mark_range(self.key_bases[name] + row, self.key_bases[name] + row + 1)
        self.table_rows(name)[row] = 0.0

    @serialized
    def prepare(self, lookups: Sequence[StorageLookup], size: int, width: int) -> None:
        """Begin the part of an update that needs no gradients, for lookups that are trained together.

        On a GPU rows and positions of gradients are concatenated and sorted in parallel with forward and backward.
        The stride of the gradient is known in backward only; until then that of the last batch is assumed.

        Args:
            lookups: those of one batch that are trained together.
            size: rows of the output.
            width: its columns.
        """
        device = self.weight.device
        if self._pending or not kernels_serve(device) or not any(part.rows.numel() for part in lookups):
            return
        apart = self._gradient_stride[1] if self._gradient_stride[0] == width else width
        read = [one for part in lookups for one in (part.rows, part.offsets, part.weights) if one is not None]
        with prepare_overlapped(device, self._scratch, read):
            joined = prepare_entries(lookups, size, width, apart)
            self._sort_ahead(joined.rows)
            self._prepared = joined.placed()

    def _sort_ahead(self, rows: Tensor) -> None:
        prepare_rows(rows, self._scratch, self.null_row + ZERO_ROWS, ZERO_ROWS)

    @serialized
    def prepared_sources(self, lookup: StorageLookup, stride: int) -> Tensor | None:
        """Return the positions of the gradients of a part, if `prepare` has made that.

        Args:
            lookup: one that `prepare` was given.
            stride: of the rows of the gradient.
        """
        if self._prepared is None or self._prepared.sources_of(lookup) is None:
            return None
        if self._prepared.size > 1:
            self._gradient_stride = (self._prepared.width, stride)
        self._prepared = self._prepared.at(stride)
        return self._prepared.sources_of(lookup)

    def _joined(self) -> Entries:
        """Return all entries that wait; rows that `prepare` joined are those that it sorts."""
        waiting = [one.entries for one in self._pending]
        join_rows(self.weight.device, self._scratch)
        joined = None if self._prepared is None else self._prepared.join(waiting)
        return join_entries(waiting) if joined is None else joined

    @serialized
    def add_gradients(self, gradients: RowGradients) -> None:
        """Keep the gradients of a backward pass until the next step."""
        # The step may not be part of the graph, whose forks must all be joined.
        if self.weight.is_cuda and is_capturing(self.weight.device):
            join_rows(self.weight.device, self._scratch)
        self._pending.append(gradients)
        if len(self._pending) == MANY_WAITING:
            warn_of_lost_updates(self._pending[-1].tables)
        self._forget_sums()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return bool(self._pending)

    def waiting_gradients(self) -> Iterator[Tensor]:
        """Give each flat gradient that waits, once."""
        return distinct_gradients(self._pending)

    def waiting_tensors(self) -> list[Tensor]:
        """Return all that the next step reads of what waits."""
        every = [one.entries for one in self._pending] + ([] if self._all is None else [self._all])
        parts = [part for one in every for part in (one.rows, one.gradients, one.sources, one.weights, one.order)]
        return [part for part in parts if part is not None]

    def waiting_tables(self) -> frozenset[str]:
        """Return the tables that the waiting gradients may move."""
        every = {one.tables for one in self._pending}
        return next(iter(every)) if len(every) == 1 else frozenset().union(*every)

    @serialized
    def replace_gradients(self, gradients: RowGradients) -> None:
        """Put one list of gradients in place of all that waits: their sum over several processes."""
        self.discard_gradients()
        self.add_gradients(gradients)
        self.is_joined = True

    @serialized
    def discard_gradients(self) -> None:
        """Drop the gradients that wait."""
        self._pending.clear()
        self._forget_sums()
        if self._prepared is not None:
            self._prepared = None
        if self.is_joined:
            self.is_joined = False

    def _forget_sums(self) -> None:
        """Drop what was made of the waiting gradients; a module's attributes take long to set, so only where needed."""
        if self._all is not None:
            self._all = None
        if self._summed is not None:
            self._summed = None

    @serialized
    def summed_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the touched rows, (U,), rising, and their gradients summed over all that waits, (U, D)."""
        if self._summed is None:
            refuse_capture(
                self.weight.device, "counting the distinct rows of gradients",
                fix="leave it to the step, or do it between replays",
            )  # fmt: skip
            entries = self._joined()
            self._summed = sum_rows(entries, self.dim, num_rows=self.null_row, scratch=self._scratch)
        return self._summed

    @serialized
    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients, those of equal rows summed first; 0-dim, float64."""
        if self._summed is None and self.weight.is_cuda:  # which is not asked how many rows are distinct
            return norm_squared(self._entries(), self.dim, num_rows=self.null_row, scratch=self._scratch)
        norm: Tensor = torch.linalg.vector_norm(self.summed_gradients()[1], dtype=torch.float64)
        return norm.square()

    def _entries(self) -> Entries:
        """Return all entries that wait; the same tensors again for a norm and the step, whose rows are sorted once."""
        if self._all is not None:
            return self._all
        joined = self._joined()
        if self.weight.is_cuda:  # a CPU does not sort, and needs no bound
            self._all = joined = replace(joined, bound=self.null_row + ZERO_ROWS, skipped=ZERO_ROWS)
        elif len(self._pending) > 1:  # to keep a single one takes longer than to join it again
            self._all = joined
        return joined

    @serialized
    def settle_rows(self) -> None:
        """Let the next step of what waits read nothing that a batch brought: rows are sorted, weights are copied."""
        if not self._pending:
            return
        entries = self._entries()
        if entries.order is None:  # where `prepare` has sorted them nothing is launched
            prepare_rows(entries.rows, self._scratch, entries.bound, entries.skipped)
        join_rows(self.weight.device, self._scratch)
        if entries.weights is not None:
            self._all = replace(entries, weights=entries.weights.clone())

    @serialized
    def step(
        self, lr: float | Tensor, factor: float | Tensor, scale: float | Tensor, gate: Tensor | None = None
    ) -> None:
        """Apply each table's rule to the touched rows, unless the gate is 0, and drop the gradients."""
        if not self._pending:
            return
        weight = self.weight
        device = weight.device
        if device.type == "cuda" and (is_capturing(device) or isinstance(lr, Tensor) or isinstance(factor, Tensor)):
            self.steps.hold(device)
        active = self.waiting_tables()
        self.steps.count(active, gate)
        # A mean of rows takes rows several times: neither a GPU nor a recorded step is asked which are distinct.
        by_row = self.row_mean is not None and gate is None and not weight.is_cuda
        if self._summed is not None or by_row:
            rows, sums = self.summed_gradients()
            entries = Entries(rows, sums.view(-1))
        else:
            entries = self._entries()
            rows = entries.rows
        before = None
        if self.row_mean is not None:
            rows = rows.to(torch.int64)
            before = weight.index_select(0, rows)
        with self._updating(entries.rows):
            for one in self._launches.of(active, weight, self._state):
                rule = one.rule
                if one.by_count:
                    self.steps.bind_shared(one.tables)
                names, first_name = self._names(one.start, one.stop, one.tables[0])
                update_rows(
                    one.weight, one.state, entries, rule, lr=lr if rule.lr is None else rule.lr * factor,
                    step=self.steps.counter(one.tables[0]), scale=scale, first_row=one.start,
                    seed=self._seed + first_name, scratch=self._scratch, gate=gate, names=names, first_name=first_name,
                )  # fmt: skip
            if self.row_mean is not None and before is not None:
                self.row_mean.visit(rows, before, weight.index_select(0, rows), gate)
        self.discard_gradients()

    # Small steps --------------------------------------------------------------------------------------------

    @property
    def rounding_seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._seed

    @property
    def scratch(self) -> Scratch:
        """The working memory of updates."""
        return self._scratch

    @property
    def is_watched(self) -> bool:
        """Whether a step has more to do than to move rows: gradients wait already, or something follows the rows."""
        follows = self.changed is not None or self.row_mean is not None or bool(self.snapshots)
        return bool(self._pending) or follows or self._all_read is not None

    def begin_launches(self, tables: frozenset[str]) -> list[Launch]:
        """Count a step of some tables, and return what its launches move; the caller moves it, within the lock."""
        self.steps.count(tables)
        return self._launches.of(tables, self.weight, self._state)

    # Content ------------------------------------------------------------------------------------------------

    def export_table(self, table: str, *, copy: bool) -> TableState:
        """Return a table's rows and optimizer state: a copy, or views of the live memory."""
        content = TableState(self.table_rows(table), self.table_state(table), self.steps[table])
        if not copy:
            return content
        state = {name: part.clone() for name, part in content.state.items()}
        return TableState(content.weight.clone(), state, content.step)

    def import_table(self, table: str, content: TableState) -> None:
        """Copy a table in; see `EmbeddingCollection.import_table`."""
        own, given = {"weight": self.table_rows(table)}, {"weight": content.weight}
        if content.state:
            own |= self.table_state(table)
            given |= content.state
        check_content(table, own, given)
        self.settle()
        self._note_table(table)
        for name, part in given.items():
            own[name].copy_(part)
        if content.state:
            self.steps[table] = content.step
        else:
            self.reset_table_state(table)
            if not self.table_state(table):  # a rule without state, such as SGD: its count is still known
                self.steps[table] = content.step
        self.clear_padding(table)

    @serialized
    def limit_norms(self, table: str, ids: Tensor, max_norm: float, norm_type: float) -> None:
        """Scale looked-up rows with a larger norm to it; see `EmbeddingCollection.limit_norms`."""
        own = self.table_rows(table)
        ids = ids[(ids >= 0) & (ids < len(own))].to(torch.int64).unique()  # type: ignore[no-untyped-call]
        norms = torch.linalg.vector_norm(own.index_select(0, ids), norm_type, dim=1, dtype=torch.float32)
        ids, norms = ids[norms > max_norm], norms[norms > max_norm]
        with self._updating(ids + self.bases[table]):
            if self.row_mean is not None:
                self.row_mean.catch_up_rows(ids + self.bases[table], own.index_select(0, ids))
            # As torch computes it, so that rows which it makes equal are equal here.
            scale = (max_norm / (norms.to(torch.float64) + 1e-7)).to(torch.float32)
            own.index_copy_(0, ids, (own.index_select(0, ids) * scale.unsqueeze(1)).to(own.dtype))

    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a table's rows, (num_rows, dim), and leave its optimizer state alone."""
        self.settle()
        self._note_table(table)
        self.table_rows(table).copy_(rows)

    def state_entries(self, table: str, prefix: str) -> dict[str, Tensor]:
        """Return a table's part of a state_dict: views, and the step."""
        parts = {"weight": self.table_rows(table), **self.table_state(table)}
        parts["step"] = torch.tensor(self.steps[table])
        return {prefix + name: part for name, part in parts.items()}

    def load_entries(
        self, table: str, prefix: str, given: Mapping[str, Tensor], missing_keys: list[str], error_msgs: list[str]
    ) -> set[str]:
        """Copy a table's part of a state_dict in, as `nn.Module.load_state_dict` does; return the keys it read."""
        own = self.state_entries(table, prefix)
        self._note_table(table)
        for key, target in own.items():
            if key not in given:
                missing_keys.append(key)
            elif given[key].shape != target.shape:
                error_msgs.append(f"{key} has shape {tuple(given[key].shape)}, the table {tuple(target.shape)}")
            else:
                target.copy_(given[key])
        self.steps[table] = int(own[f"{prefix}step"])
        self.clear_padding(table)
        return set(own)

    # Snapshots ----------------------------------------------------------------------------------------------

    def take_snapshots(self) -> bool:
        """Hold rows and state as they are now; on a GPU they are copied instead, so it does nothing there."""
        if self.weight.is_cuda:
            return False
        self.settle()
        self.snapshots = {}
        for index, one in enumerate(self.rule_ranges):
            tensors = {"weight": self.weight[one.start : one.stop], **self._state(index, one.start, one.stop)}
            if self.row_mean is not None:
                tensors["mean"] = self.row_mean.mean[one.start : one.stop]
            self.snapshots[index] = RowSnapshot(tensors)
        self._all_read = threading.Event()
        return True

    def snapshot_of(self, table: str) -> tuple[RowSnapshot, range] | None:
        """Return the snapshot that holds a table, and which of its rows are the table's; None: none was taken."""
        index, rule_range = next((i, one) for i, one in enumerate(self.rule_ranges) if table in one.tables)
        first = self.bases[table] - rule_range.start
        rows = range(first, first + self.tables[table].num_rows)
        return (self.snapshots[index], rows) if index in self.snapshots else None

    def end_snapshots(self) -> None:
        """Let all changes go on: the snapshots are read completely, or abandoned."""
        self.snapshots = {}
        if self._all_read is not None:
            self._all_read.set()

    def settle(self) -> None:
        """Wait until a checkpoint in progress has read what it needs; before rows change otherwise than by a step."""
        if self._all_read is not None:
            self._all_read.wait()
            self._all_read = None

    def _names(self, start: int, stop: int, table: str) -> tuple[Tensor | None, int]:
        """Return the row ids that seed stochastic rounding (None: the positions), and the first one."""
        return None, start

    def _updating(self, rows: Tensor) -> AbstractContextManager[Any]:
        if self.changed is not None:
            self.changed.mark(rows)
        if not self.snapshots:
            return nullcontext()
        stack = ExitStack()
        for index, snapshot in self.snapshots.items():
            one = self.rule_ranges[index]
            inside = rows[(rows >= one.start) & (rows < one.stop)] - one.start
            stack.enter_context(snapshot.moving(inside))
        return stack

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ConfigError(
                "embedding tables keep their type and cannot be converted",
                allowed="TableConfig(dtype='float32'), 'float16' or 'bfloat16' when they are built",
                fix="convert the dense layers alone, or train under torch.autocast",
            )
        if self._pending:
            raise ConfigError("gradients wait for a step", fix="call step() or discard_gradients() before moving")
        self._scratch = Scratch()
        self._launches.forget()
        self.steps.release()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
