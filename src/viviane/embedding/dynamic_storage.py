"""A dynamic table as a collection holds it: one storage whose rows come with their keys.

Shapes: N keys of a batch, U distinct rows, D the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.embedding.dynamic_content import load_entries, state_entries
from viviane.embedding.state import SavedRows
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
from viviane.ops.row_update import Entries


class DynamicStorage(TableStorage):
    """Rows of one dynamic table, and the gradients that wait for a step.

    The table itself is not a submodule: the collection saves its part of a state_dict under the table's name.

    Args:
        table: its settings.
        optimizer: the rule, where the settings have none.
        device: where the rows are.
        seed: of initial values, admission and stochastic rounding.
        folder: of the files of rows, with memory="file"; None: that of temporary files.
    """

    is_dynamic = True

    def __init__(
        self,
        table: DynamicTableConfig,
        optimizer: AnyOptimizer,
        device: torch.device,
        seed: int,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.tables: dict[str, DynamicTableConfig] = {table.name: table}
        self.dim = table.dim
        self.dtype = table.torch_dtype
        self._hidden = (
            DynamicTable(table, optimizer, seed=seed, device=device, folder=folder),
        )  # nn.Module does not register what is inside a tuple
        self._pending: list[RowGradients] = []
        self._summed: tuple[Tensor, Tensor] | None = None
        self.row_mean = None

    @property
    def table(self) -> DynamicTable:
        """The table."""
        return self._hidden[0]

    @property
    def lock(self) -> TableLock:  # type: ignore[override]
        """The table's."""
        return self.table.lock

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The memory that rows of lookups index."""
        return self.table.storage

    @property
    def null_row(self) -> int:  # type: ignore[override]
        """The first of its two rows of zeros."""
        return self.table.null_row

    @property
    def key_null(self) -> int:  # type: ignore[override]
        """The same, as maps of keys to rows count."""
        return self.table.null_row

    @property
    def capture_ineligible_reason(self) -> str | None:
        """Always one: the host must run during a lookup."""
        return f"table {self.table.table.name!r} is dynamic: the host assigns rows to its keys"

    @serialized
    def rows(self, keys: Sequence[Tensor], training: bool) -> list[Tensor]:
        """Return the rows of a batch's keys, given in several vectors; called once a batch.

        Args:
            keys: vectors of int32 or int64.
            training: whether new keys may get rows.
        """
        together = keys[0] if len(keys) == 1 else torch.cat([part.to(torch.int64) for part in keys])
        found = self.table.rows(together, training)
        self.table.read_ahead(found, training)
        return [found] if len(keys) == 1 else list(torch.split(found, [len(part) for part in keys]))

    # Gradients ----------------------------------------------------------------------------------------------

    @serialized
    def prepare(self, lookups: Sequence[StorageLookup], size: int, width: int) -> None:
        """Sort the rows of a lookup that is trained; rows of several lookups are sorted in the step."""
        if not self._pending and len(lookups) == 1:
            self.table.prepare(lookups[0].rows.reshape(-1))

    @serialized
    def add_gradients(self, gradients: RowGradients) -> None:
        """Keep the gradients of a backward pass until the next step."""
        self._pending.append(gradients)
        if len(self._pending) == MANY_WAITING:
            warn_of_lost_updates(self._pending[-1].tables)
        self._summed = None

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return bool(self._pending)

    def waiting_gradients(self) -> Iterator[Tensor]:
        """Yield each flat gradient that waits, once."""
        return distinct_gradients(self._pending)

    @serialized
    def summed_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the touched rows, (U,), rising, and their gradients summed over all that waits, (U, D)."""
        if self._summed is None:
            self._summed = self.table.summed(join_entries([one.entries for one in self._pending]))
        return self._summed

    @serialized
    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients, those of equal rows summed first; 0-dim, float64."""
        norm: Tensor = torch.linalg.vector_norm(self.summed_gradients()[1], dtype=torch.float64)
        return norm.square()

    @serialized
    def discard_gradients(self) -> None:
        """Drop the gradients that wait; the rows of past lookups may be evicted again."""
        self._pending.clear()
        self._summed = None
        self.table.release()

    @serialized
    def step(
        self, lr: float | Tensor, factor: float | Tensor, scale: float | Tensor, gate: Tensor | None = None
    ) -> None:
        """Apply the table's rule to the touched rows, and drop the gradients."""
        if gate is not None:
            raise ConfigError("the rows of a dynamic table come and go on the host: a step of theirs has no gate")
        if self._pending:
            if self._summed is not None:
                rows, sums = self._summed
                entries = Entries(rows, sums.view(-1))
            else:
                entries = join_entries([one.entries for one in self._pending])
            self.table.update(entries, lr, factor=factor, scale=scale)
        self.discard_gradients()

    # Content ------------------------------------------------------------------------------------------------

    def dynamic_table(self, table: str) -> DynamicTable:
        """Return the table."""
        return self.table

    def tables_of(self, rows: Tensor) -> set[str]:
        """Return the name of the table, if there are rows."""
        return set(self.tables) if len(rows) else set()

    def num_rows(self, table: str) -> int:
        """Return the number of keys."""
        return len(self.table)

    def num_steps(self, table: str) -> int:
        """Return the number of updates of the table."""
        return self.table.num_steps

    def table_rows(self, table: str) -> Tensor:
        """Return a view of the rows that have had a key."""
        return self.table.weight[: self.table.index.num_rows]

    def checkpoint_tensors(self, table: str) -> dict[str, Tensor]:
        """Return a copy of the table's content."""
        return state_entries(self.table, "")

    @serialized
    def follow_changes(self) -> None:
        """Note from now on which keys are used, added or changed; what changed before is forgotten."""
        self.table.follow_changes()

    @serialized
    def changed_rows(self, table: str) -> Tensor | None:
        """Return the rows with keys that have changed since `follow_changes`, rising; None: all may have."""
        return self.table.changed_rows()

    def changed_tensors(self, table: str, rows: Tensor) -> dict[str, Tensor]:
        """Return copies of the keys in some rows with all of theirs, and of free rows, counters and admission."""
        found = state_entries(self.table, "", rows)
        live = {name for name in found if name == "free" or name.startswith("admission.")}
        return {name: part.clone() if name in live else part for name, part in found.items()}

    def restore(self, table: str, saved: SavedRows, *, weights_only: bool) -> None:
        """Replace the table's keys and all that belongs to them; `weights_only` starts the count of updates again."""
        self.table.replace(saved.content())
        if weights_only:
            self.table.num_steps = 0

    def state_entries(self, table: str, prefix: str) -> dict[str, Tensor]:
        """Return the table's part of a state_dict: keys, and everything that belongs to them."""
        return state_entries(self.table, prefix)

    def load_entries(
        self, table: str, prefix: str, given: Mapping[str, Tensor], missing_keys: list[str], error_msgs: list[str]
    ) -> set[str]:
        """Replace the table's content, as `nn.Module.load_state_dict` does; return the keys it read."""
        return load_entries(self.table, prefix, given, missing_keys, error_msgs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.table._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
