"""The contract of a storage: what collections, optimizers and checkpoints use of rows, wherever the rows are.

`RowGradients` wait for a step. A method that means something to some storages only, such as those in tiers, does
nothing here, so that callers need not ask of which kind a storage is.

Shapes: B rows of the batch, S columns of vectors in a lookup, N entries, U distinct rows, D the width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding.changed_marks import ChangedMarks
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.row_lease import RowLease
from viviane.embedding.row_mean import RowMean
from viviane.embedding.row_snapshot import RowSnapshot
from viviane.embedding.slot_cache import PassMove
from viviane.embedding.state import SavedRows
from viviane.embedding.table_lock import TableLock
from viviane.ops.capture import URGENT, branch
from viviane.ops.row_update import Entries
from viviane.store import Tier, TierStats

_log = get_logger(__name__)
MANY_WAITING: Final = 256  # backward passes without a step, of which gradient accumulation has fewer


@dataclass(frozen=True)
class RowGradients:
    """Gradients of one backward pass.

    Args:
        entries: looked-up rows of the storage and their gradients.
        tables: names of the tables whose rows they may move.
    """

    entries: Entries
    tables: frozenset[str]


@lru_cache
def warn_of_lost_updates(tables: frozenset[str]) -> None:
    """Warn where gradients of `MANY_WAITING` backward passes wait: a torch optimizer does not move tables."""
    _log.warning(
        "tables %s have gradients of %d backward passes, and no step moved their rows: call step(lr=...) of the "
        "collection or EmbeddingBag beside optimizer.step(), or discard_gradients()",
        ", ".join(sorted(tables)[:10]), MANY_WAITING,
    )  # fmt: skip


def distinct_gradients(waiting: Sequence[RowGradients]) -> Iterator[Tensor]:
    """Give each flat gradient that waits, once."""
    seen: set[int] = set()
    for one in waiting:
        if id(one.entries.gradients) not in seen:
            seen.add(id(one.entries.gradients))
            yield one.entries.gradients


def join_entries(waiting: Sequence[Entries]) -> Entries:
    """Join passes and parts into one list of entries; a gradient that parts share stays one."""
    if len(waiting) == 1:
        return waiting[0]
    gradients: list[Tensor] = []
    sources: list[Tensor] = []
    start, aligned = 0, waiting[0].aligned
    for one in waiting:
        if not gradients or one.gradients is not gradients[-1]:
            start += len(gradients[-1]) if gradients else 0
            gradients.append(one.gradients)
        assert one.sources is not None
        sources.append(one.sources.to(torch.int64) + start if start else one.sources)
        aligned = math.gcd(aligned, one.aligned, start)
    weights = join_weights([one.weights for one in waiting], [one.rows for one in waiting])
    flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
    return Entries(torch.cat([one.rows for one in waiting]), flat, torch.cat(sources), weights, aligned)


def join_weights(weights: Sequence[Tensor | None], rows: Sequence[Tensor]) -> Tensor | None:
    """Join the weights of lists of entries, flat, with ones where a list has none; None where no list has any.

    Example:
        >>> join_weights([None, torch.tensor([0.5])], [torch.tensor([3, 4]), torch.tensor([5])])
        tensor([1.0000, 1.0000, 0.5000])
    """
    if all(one is None for one in weights):
        return None
    pairs = zip(weights, rows, strict=True)
    own = [torch.ones(r.numel(), device=r.device) if w is None else w.reshape(-1) for w, r in pairs]
    return own[0] if len(own) == 1 else torch.cat(own)


@dataclass(frozen=True)
class LocatedRows:
    """Where rows of a batch are in memory.

    Args:
        rows: (N,), as lookups count them: in the storage's weight, or in `aside`.
        lease: keeps them there; None: they stay.
        aside: copies of rows that did not fit, for a lookup that trains nothing.
    """

    rows: Tensor
    lease: RowLease | None = None
    aside: Tensor | None = None


@dataclass(frozen=True)
class TieredTable:
    """A table of which memory has only some rows.

    Args:
        num_rows: of the table.
        rows_in_memory: at most.
        slot_bytes: memory that a row takes with its optimizer state.
        tier: holds the other rows.
    """

    num_rows: int
    rows_in_memory: int
    slot_bytes: int
    tier: Tier


class TableStorage(nn.Module, ABC):
    """Rows of one or more tables, their optimizer state, and the gradients that wait for a step.

    `Storage` holds tables of fixed size, `DynamicStorage` one dynamic table. A lookup reads `weight` at the rows that a
    plan found for its keys; backward calls `add_gradients`, and `step` applies each table's rule to the touched rows.

    Attributes:
        tables: settings by name.
        dim, dtype: of every row.
        weight: (R, D), indexed by the rows of lookups.
        null_row: the first of two rows of zeros, which serve padding and absent keys.
        key_null: the same, as maps of keys to rows count; it differs where a cache gives rows their slots later.
        lock: held by every method that reads or changes gradients or rows.
        row_mean: the running mean of the rows; None if none is kept.
    """

    is_dynamic: ClassVar[bool] = False
    """Whether the host assigns rows to keys during a lookup, so that neither lookup nor step can be captured."""
    in_tiers: ClassVar[bool] = False
    """Whether `weight` has only the rows of current batches, and all others are in tiers."""
    tables: Mapping[str, AnyTable]
    dim: int
    dtype: torch.dtype
    weight: Tensor
    null_row: int
    key_null: int
    lock: TableLock
    row_mean: RowMean | None
    changed: ChangedMarks | None = None
    """Rows that updates have changed, once an incremental checkpoint asks for them."""

    @property
    def capture_ineligible_reason(self) -> str | None:
        """Why a step with this storage cannot be captured in a CUDA graph; None if it can."""
        return None

    @property
    def num_steps_was_set(self) -> bool:
        """Whether the number of updates was set since the last step, other than by a step."""
        return False

    # Gradients ----------------------------------------------------------------------------------------------

    def prepare(self, lookups: Sequence[StorageLookup], size: int, width: int) -> None:
        """Start the part of an update that needs no gradients, so that it overlaps with forward and backward.

        Args:
            lookups: those of one batch that are trained together.
            size: rows of the output.
            width: columns of the output.
        """

    def prepared_sources(self, lookup: StorageLookup, stride: int) -> Tensor | None:
        """Return the positions of a lookup's gradients in the flat gradient, if `prepare` has computed them.

        Args:
            lookup: one that `prepare` was given.
            stride: of the rows of the gradient.
        """
        return None

    @abstractmethod
    def add_gradients(self, gradients: RowGradients) -> None:
        """Keep the gradients of a backward pass until the next step."""

    @property
    @abstractmethod
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""

    @abstractmethod
    def waiting_gradients(self) -> Iterator[Tensor]:
        """Yield each flat gradient that waits, once."""

    def waiting_tensors(self) -> list[Tensor]:
        """Return the tensors that the next step reads; they are kept until the captured step has read them."""
        return []

    @abstractmethod
    def summed_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the touched rows, (U,), ascending, and their summed gradients, (U, D)."""

    @abstractmethod
    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the gradients after those of equal rows are summed; 0-dim, float64."""

    @abstractmethod
    def discard_gradients(self) -> None:
        """Drop the gradients that wait."""

    def settle_rows(self) -> None:
        """Compute everything that the step needs of the batch, whose memory may be overwritten afterwards."""

    @abstractmethod
    def step(
        self, lr: float | Tensor, factor: float | Tensor, scale: float | Tensor, gate: Tensor | None = None
    ) -> None:
        """Apply each table's rule to the touched rows, unless the gate is 0, and drop the gradients.

        Args:
            lr: learning rate of rules without their own.
            factor: multiplies the learning rate of rules with their own.
            scale: multiplies the gradients.
            gate: 0-dim, int32, on the device; None updates always.
        """

    def check(self) -> None:
        """Raise the errors that the device found in captured steps since the last call."""

    @abstractmethod
    def tables_of(self, rows: Tensor) -> set[str]:
        """Return the names of the tables that own rows of this storage."""

    def settle(self) -> None:
        """Wait until a checkpoint that is being written has read the rows; call it before they are changed."""

    # Tiers --------------------------------------------------------------------------------------------------

    def tiered_tables(self) -> dict[str, TieredTable]:
        """Return by name the tables of which memory has only some rows."""
        return {}

    @property
    def plans_on_host(self) -> bool:
        """Whether rows get their places in memory by keys that lie in host memory."""
        return False

    def locate(self, rows: Tensor, *, training: bool, ahead: bool) -> LocatedRows:
        """Return where rows of a batch are in memory, and begin to fetch those that are not there.

        Args:
            rows: (N,), as `key_null` counts them.
            training: whether they will be updated; others may be copied aside.
            ahead: the lookup comes later, and the lease's `settle` says then whether the rows fit.

        Raises:
            CacheFullError: rows that will be updated do not fit into the memory of their table.
        """
        return LocatedRows(rows)

    def hold(self, lease: RowLease) -> None:
        """Keep rows in memory until the next step, since their gradients wait; where all are, do nothing."""

    def arrive(self, lease: RowLease) -> None:
        """Wait for rows that are on their way to memory; where all are there, do nothing."""

    def begin_pass(
        self, keys: Mapping[str, NDArray[np.int64]], later: Sequence[Mapping[str, NDArray[np.uint8]]] = ()
    ) -> PassMove:
        """Bring the rows of a pass into memory, and write changed rows that leave; where all are, do nothing.

        Args:
            keys: of tables in tiers, by name: rising, distinct rows of this storage's part of the table.
            later: of the passes that follow, by name: a bit for each such row, the lowest bit of a byte first. Rows
                that leave are written beside the others of the pass that needs them next.

        Raises:
            CacheFullError: a table's rows do not fit into its memory; nothing has changed.
        """
        return PassMove()

    def tier_stats(self) -> dict[str, TierStats]:
        """Return what was counted: "memory", the cache, and by name of the tiers below it; empty without tiers."""
        return {}

    # Content ------------------------------------------------------------------------------------------------

    def dynamic_table(self, table: str) -> DynamicTable:
        """Return a dynamic table.

        Raises:
            ConfigError: the table has a fixed size.
        """
        raise ConfigError("the table is not dynamic", value=table, fix="use export_table and import_table")

    @abstractmethod
    def num_rows(self, table: str) -> int:
        """Return the number of rows of a table; of a dynamic table, those with a key."""

    @abstractmethod
    def num_steps(self, table: str) -> int:
        """Return the number of updates of a table."""

    @abstractmethod
    def table_rows(self, table: str) -> Tensor:
        """Return a view of a table's rows, (num_rows, D); of a dynamic table, those that have had a key."""

    def rows_in_memory(self, table: str) -> Tensor:
        """Return a view of those rows of a table that are in memory."""
        return self.table_rows(table)

    # Checkpoints --------------------------------------------------------------------------------------------

    @abstractmethod
    def checkpoint_tensors(self, table: str) -> dict[str, Tensor]:
        """Return what a checkpoint has of a table: "weight", "state.<name>", and what else a dynamic table needs.

        Of a table in tiers it returns only shapes, on the meta device.
        """

    def follow_changes(self) -> None:
        """Note from now on which rows change, and forget what changed before."""

    def changed_rows(self, table: str) -> Tensor | None:
        """Return the rows of a table that have changed since `follow_changes`, rising; None: all may have."""
        return None

    def changed_tensors(self, table: str, rows: Tensor) -> dict[str, Tensor]:
        """Return copies of what an increment has of a table in memory: `checkpoint_tensors` of these rows alone.

        Args:
            table: its name.
            rows: as `changed_rows` gave them.
        """
        live = self.checkpoint_tensors(table)
        return {name: one.detach().index_select(0, rows.to(one.device)).cpu() for name, one in live.items()}

    def take_snapshots(self) -> bool:
        """Hold rows and state as they are now, for a checkpoint that is written beside training; return whether it can.

        Steps continue; other changes wait until all is read, or until `end_snapshots`.
        """
        return False

    def snapshot_of(self, table: str) -> tuple[RowSnapshot, range] | None:
        """Return the snapshot that holds a table, and which of its rows are the table's; None: none was taken."""
        return None

    def end_snapshots(self) -> None:
        """Let all changes go on: the snapshots are read completely, or abandoned."""

    def column_pieces(
        self, table: str, name: str, rows: NDArray[np.int64] | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of one of `checkpoint_tensors`, in order, a piece at a time.

        Args:
            rows: only these, distinct; None: all.
        """
        whole = self.checkpoint_tensors(table)[name].detach()
        picked = whole if rows is None else whole[torch.from_numpy(rows).to(whole.device)]
        yield picked.cpu().contiguous().view(-1).view(torch.uint8).numpy()

    @abstractmethod
    def restore(self, table: str, saved: SavedRows, *, weights_only: bool) -> None:
        """Replace a table's rows, and its optimizer state unless `weights_only`, which makes it start again."""

    def mean_rows(self, table: str) -> Tensor | None:
        """Return an up-to-date view of the running mean of a table's rows; None if there is none."""
        return None

    @abstractmethod
    def state_entries(self, table: str, prefix: str) -> dict[str, Tensor]:
        """Return a table's part of a state_dict, under names that begin with `prefix`."""

    @abstractmethod
    def load_entries(
        self, table: str, prefix: str, given: Mapping[str, Tensor], missing_keys: list[str], error_msgs: list[str]
    ) -> set[str]:
        """Copy a table's part of a state_dict in, as `nn.Module.load_state_dict` does; return the keys it read."""


@dataclass(frozen=True)
class StorageLookup:
    """The lookups of a batch in one storage.

    Args:
        rows: (B, S) without offsets, one row for each column of vectors; (N,) with offsets, S bags for each row of the
            batch.
        offsets: (S * B + 1,), the bags of the first column of vectors, then of the second, ...
        weights: shaped as rows, or None.
        columns: S columns of the output, where the vectors begin.
        tables: names of the tables among them that are trained.
        lease: keeps rows of tables in tiers in memory.
        aside: what the rows count in, where that is not the storage's weight: copies for a lookup that trains nothing.
    """

    storage: TableStorage
    rows: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    columns: tuple[int, ...]
    tables: frozenset[str]
    lease: RowLease | None = None
    aside: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """What the rows count in."""
        return self.storage.weight if self.aside is None else self.aside

    def to(self, device: torch.device) -> StorageLookup:
        """Return the lookup of rows that were found in host memory, for the device of the storage."""
        weights = None if self.weights is None else sent(self.weights, device)
        offsets = None if self.offsets is None else sent(self.offsets, device)
        return replace(self, rows=sent(self.rows, device), offsets=offsets, weights=weights)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of host memory on a device; a GPU's current stream copies it, and the host does not wait.

    The copy is out of memory of its own, which torch keeps until it is done: the tensor's may be written to at once.

    Example:
        >>> sent(torch.ones(1), torch.device("cpu"))
        tensor([1.])
    """
    if device.type == "cpu":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


def begin_updates(
    storages: Sequence[TableStorage],
    device: torch.device,
    name: str,
    move: Callable[[TableStorage], None],
) -> Callable[[], None]:
    """Update storages one after another; during capture each in its own branch, so that tails of updates overlap.

    Args:
        storages: whose gradients wait.
        device: of the storages.
        name: of the branches; storages of the same name follow one another.
        move: takes a storage's step.

    Returns:
        a function that makes the current stream wait for all updates and releases their inputs; it must be called.
    """
    if device.type != "cuda":
        for storage in storages:
            move(storage)
        return _nothing
    held: list[list[Tensor]] = []
    joins: list[Callable[[], None]] = []
    for i, storage in enumerate(storages):
        held.append(storage.waiting_tensors())
        with branch(device, f"{name}.{i}", is_open=True, priority=URGENT) as join:
            move(storage)
        joins.append(join)

    def finish() -> None:
        for join in joins:
            join()
        held.clear()

    return finish


def _nothing() -> None:
    """Do nothing: updates on a CPU are finished when they return."""
