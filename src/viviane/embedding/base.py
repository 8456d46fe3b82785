"""The contract of a collection: what training uses of embedding tables, in one process or sharded over several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from viviane.batch import Bag, Batch
from viviane.config.optimizers import AnyOptimizer
from viviane.embedding.batch_keys import AnyKeys
from viviane.embedding.buffers import Buffers, Margins
from viviane.embedding.config import FeatureConfig
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.state import TableState, TableSummary
from viviane.embedding.static_lookup import Resolved
from viviane.embedding.storage import Storage
from viviane.embedding.table_storage import TableStorage

Handover: TypeAlias = Callable[[Tensor], None]
"""Takes the gradient (B, W) of a lookup."""


class TableCollection(nn.Module, ABC):
    """Embedding tables, the features that look them up, and the optimizer that moves them.

    An `EmbeddingCollection` has its tables in this process; a `ShardedCollection` has them over all processes of a
    group, which call `forward`, `step`, `grad_norm_squared`, `export_table`, `import_table` and `copy_rows` together.

    Attributes:
        tables, features: settings by name.
        optimizer: the rule of tables that have none of their own.
    """

    tables: dict[str, AnyTable]
    features: dict[str, FeatureConfig]
    optimizer: AnyOptimizer
    gradient_watch: Callable[[Tensor], None] | None = None
    """Called in backward with the gradient of the flat output, before storages take it over."""
    margins: Margins | None = None
    """Columns to leave free beside the flat output, where that serves; it is a view of wider rows then."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tables are."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of the flat output."""

    @abstractmethod
    def forward(self, batch: Batch | Mapping[str, Bag | Tensor]) -> EmbeddingOutput:
        """Look a batch up."""

    def look_up_apart(self, batch: Batch | Mapping[str, Bag | Tensor]) -> tuple[Tensor, Handover | None]:
        """Look a batch up in training, apart from the caller's autograd.

        Returns:
            the vectors (B, W), and what takes their gradient, to be called once before `step`; None: no table moves.
        """
        with torch.enable_grad():
            flat = self.forward(batch).flat
        return flat.detach(), flat.backward if flat.requires_grad else None

    @abstractmethod
    def settle_rows(self) -> None:
        """Make all that a step still needs of the batch, which may be written to beside the step then."""

    # Update -------------------------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise"."""

    @abstractmethod
    def key_records(self) -> list[Tensor]:
        """Return the records, (3,), int64, that recorded lookups write: the first number is 0 until a key is wrong."""

    @abstractmethod
    def step(
        self, lr: float | Tensor, scale: float | Tensor = 1.0, factor: float | Tensor = 1.0, gate: Tensor | None = None
    ) -> None:
        """Check, move the touched rows and their state unless the gate is 0, and drop the gradients."""

    @abstractmethod
    def begin_step(
        self, lr: float | Tensor, scale: float | Tensor, factor: float | Tensor, gate: Tensor | None
    ) -> Callable[[], None]:
        """Do what `step` does, without its check, under `torch.no_grad`.

        Call what is returned: it waits for updates that run concurrently.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""

    @abstractmethod
    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients of all processes; 0-dim, float32."""

    @abstractmethod
    def nonfinite_gradients(self) -> list[str]:
        """Return the features whose tables have NaN or infinite gradients waiting in this process."""

    @abstractmethod
    def freeze(self, table: str) -> None:
        """Keep a table's rows and state as they are until `unfreeze`."""

    @abstractmethod
    def unfreeze(self, table: str) -> None:
        """Let a frozen table move again."""

    # Content ------------------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self) -> Sequence[LocalCollection]:
        """Return the collections that hold the tables, or shards of them, in this process."""

    def all_storages(self) -> list[TableStorage]:
        """Return the storages of this process: one for each width and type, one for each dynamic table."""
        return [storage for part in self.parts() for storage in part.all_storages()]

    def local_rows(self, table: str) -> list[Tensor]:
        """Return views of the rows that this process has of a table in memory, each (rows, columns)."""
        return [part.rows_in_memory(table) for part in self.parts() if table in part.tables]

    @abstractmethod
    def export_table(self, table: str, *, copy: bool = True) -> TableState:
        """Return a whole table's rows and optimizer state."""

    @abstractmethod
    def import_table(self, table: str, content: TableState) -> None:
        """Replace a whole table's rows and optimizer state."""

    @abstractmethod
    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a whole table's rows, (num_rows, dim), and leave its optimizer state alone."""

    @abstractmethod
    def summary(self) -> list[TableSummary]:
        """Return the rows of each table for the summary of a model."""


class LocalCollection(TableCollection):
    """A collection whose tables, or shards of tables, are all in this process."""

    @property
    @abstractmethod
    def output_dtype(self) -> torch.dtype:
        """The type of the output."""

    @property
    @abstractmethod
    def output_buffers(self) -> Buffers:
        """Where outputs are allocated."""

    @property
    @abstractmethod
    def frozen(self) -> frozenset[str]:
        """Names of the tables that do not move."""

    @abstractmethod
    def resolve(self, batch: AnyKeys, training: bool) -> Resolved:
        """Find the rows of a batch's keys.

        Returns:
            the number of rows of the batch, the lookups, and the masks of "concat" features.
        """

    @property
    @abstractmethod
    def resolves_before_replay(self) -> bool:
        """Whether the host begins the lookups of a captured step before its replay."""

    @abstractmethod
    def resolved_for_replay(self, batch: Batch) -> Resolved:
        """Return a batch's lookups for a replay; the current stream waits for their rows."""

    @abstractmethod
    def provide(self, batch: Batch, found: Resolved) -> None:
        """Let the next lookup of a batch be this one."""

    @abstractmethod
    def forget_ahead(self, batch: AnyKeys) -> None:
        """Release a batch that was resolved ahead, if it was not looked up."""

    @abstractmethod
    def fixed_storages(self) -> list[Storage]:
        """Return the storages of tables of fixed size: the first ones of `all_storages`."""

    @abstractmethod
    def dynamic_storages(self) -> list[DynamicStorage]:
        """Return the storages of dynamic tables: the others of `all_storages`."""

    @abstractmethod
    def dynamic_table(self, table: str) -> DynamicTable:
        """Return a dynamic table; see `EmbeddingCollection.dynamic_table`."""

    def rows_in_memory(self, table: str) -> Tensor:
        """Return a view of the rows of a table that are in memory, (rows, columns)."""
        return self.table_rows(table)

    @abstractmethod
    def table_rows(self, table: str) -> Tensor:
        """Return a view of a table's rows, (rows, columns)."""
