"""The contract of a storage: what collections, optimizers and checkpoints use of rows, wherever the rows are.

`RowGradients` wait for a step. A `TableLock` defines which threads may use a table at a time: compiled kernels work on
its memory without Python's lock, so calls that change a table, and all calls of a dynamic table, run one after another.

Shapes: B rows of the batch, S columns of vectors in a lookup, N entries, U distinct rows, D the width.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.embedding.changed_marks import ChangedMarks
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.row_lease import RowLease
from viviane.embedding.row_mean import RowMean
from viviane.ops.capture import URGENT, branch
from viviane.ops.row_update import Entries

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


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class TableLock:
    """The lock of a table, which one thread may take several times; a copy of the table gets its own.

    Example:
        >>> with TableLock() as lock, lock:
        ...     lock.claim("table 'user'")
    """

    def __init__(self) -> None:
        self.reentrant = threading.RLock()
        """What `with` takes and releases; `serialized` takes it directly, without a Python call."""
        self._trainer: threading.Thread | None = None

    def __reduce__(self) -> Any:
        return TableLock, ()

    def __enter__(self) -> TableLock:
        self.reentrant.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.reentrant.release()

    def claim(self, where: str) -> None:
        """Make the current thread the one that trains the table, until `free`; call it inside the lock.

        Raises:
            ConfigError: another thread trains it, and has not ended.
        """
        own = threading.current_thread()
        if self._trainer is not None and self._trainer is not own and self._trainer.is_alive():
            raise ConfigError(
                "another thread is training this table: its looked-up rows wait for an update", where=where,
                value=own.name, allowed=self._trainer.name,
                fix="train a dynamic table from one thread at a time; step() or release() there ends its turn",
            )  # fmt: skip
        self._trainer = own

    def free(self) -> None:
        """Let any thread train the table next."""
        self._trainer = None


class Locked(Protocol):
    """What has the lock that `serialized` takes."""

    @property
    def lock(self) -> TableLock:
        """The lock."""


_Owner = TypeVar("_Owner", bound=Locked)


def serialized(
    method: Callable[Concatenate[_Owner, _Parameters], _Result],
) -> Callable[Concatenate[_Owner, _Parameters], _Result]:
    """Let calls of a method wait for one another, and for those of other such methods of the same object."""

    @wraps(method)
    def one_at_a_time(self: _Owner, *args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with self.lock.reentrant:
            return method(self, *args, **options)

    return cast("Callable[Concatenate[_Owner, _Parameters], _Result]", one_at_a_time)


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

    def hold(self, lease: RowLease) -> None:
        """Keep rows in memory until the next step, since their gradients wait; where all are, do nothing."""

    def arrive(self, lease: RowLease) -> None:
        """Wait for rows that are on their way to memory; where all are there, do nothing."""

    def check(self) -> None:
        """Raise the errors that the device found in captured steps since the last call."""

    @abstractmethod
    def tables_of(self, rows: Tensor) -> set[str]:
        """Return the names of the tables that own rows of this storage."""

    def settle(self) -> None:
        """Wait until a checkpoint that is being written has read the rows; call it before they are changed."""

    # Content ------------------------------------------------------------------------------------------------

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

    @abstractmethod
    def checkpoint_tensors(self, table: str) -> dict[str, Tensor]:
        """Return what a checkpoint has of a table: "weight", "state.<name>", and what else a dynamic table needs.

        Of a table in tiers it returns only shapes, on the meta device.
        """

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
