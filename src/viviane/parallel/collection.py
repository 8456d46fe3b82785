"""An embedding collection whose tables are sharded over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.core.renamed import renamed_method
from viviane.embedding import (
    CacheSettings,
    FeatureConfig,
    TableConfig,
    TableState,
    TableSummary,
)
from viviane.embedding.buffers import WideRows
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.state import summarize
from viviane.ops.capture import is_capturing
from viviane.parallel.batches_ahead import BatchesAhead
from viviane.parallel.content import gather_table, scatter_rows, scatter_table
from viviane.parallel.distributed_input import DistributedInput
from viviane.parallel.exchanges import Exchanges
from viviane.parallel.group import Group
from viviane.parallel.keys import KeptKeys
from viviane.parallel.plan import AnyTable, ShardingPlan
from viviane.parallel.replicas import check_unmixed, join_replicas
from viviane.parallel.sharded_tables import ShardedTables


class ShardedCollection(ShardedTables):
    """Embedding tables over several processes: each looks up its own batch, and all of them train the same tables.

    The sharding plan assigns shards of tables to ranks. input_dist sends ids to the ranks that hold their rows,
    output_dist returns pooled vectors, grad_dist sends their gradients; replicated tables are looked up locally, and
    their gradients are summed over the ranks before a step. forward, backward and step are collective; each rank passes
    its local batch, and gradients are those of the sum of the losses.

    Args:
        tables, features, optimizer, seed: as of an EmbeddingCollection; a row's initial value does not depend on its
            rank.
        plan: the sharding plan.
        group: the process group; None takes all ranks that torchrun started.
        device: of this rank's shards.
        wire_dtype: type of vectors and gradients in transit.
        batch_size: rows of every rank's local batch, if constant.
        hotness: number of ids in every row, by feature with bags, if constant. With `batch_size`, and `hotness` of all
            features with bags, shapes are static: sizes are not exchanged and nothing waits for a GPU.
        cache: memory of this process for its shards of tables, as of an EmbeddingCollection; replicated tables are
            whole in memory. Batches then have dynamic shapes.
        deduplicate_ids: send each distinct row of a batch once and pool vectors locally; sizes are always exchanged.

    Example:
        >>> from viviane.config import SGD
        >>> tables = [TableConfig(name="item", num_rows=4, dim=2, init={"type": "constant", "value": 1.0})]
        >>> plan = ShardingPlan(world_size=1, tables=[{"table": "item", "kind": "row", "ranks": [0]}])
        >>> emb = ShardedCollection(tables, [FeatureConfig(name="seen", table="item")], SGD(), plan=plan)
        >>> out = emb({"seen": Bag.from_lists([[0, 0], [], [3]])})
        >>> out.flat.sum().backward(); emb.step(lr=0.25)
        >>> emb.export_table("item").weight.tolist()
        [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [0.75, 0.75]]
    """

    def __init__(
        self,
        tables: Sequence[AnyTable],
        features: Sequence[FeatureConfig],
        optimizer: AnyOptimizer,
        *,
        plan: ShardingPlan,
        group: Group | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        hotness: Mapping[str, int] | None = None,
        deduplicate_ids: bool = False,
        cache: CacheSettings | None = None,
    ) -> None:
        super().__init__(
            tables, features, optimizer, plan=plan, group=group, device=device, seed=seed, output_dtype=output_dtype,
            wire_dtype=wire_dtype, batch_size=batch_size, hotness=hotness, deduplicate_ids=deduplicate_ids,
            cache=cache,
        )  # fmt: skip
        self.exchanges = Exchanges(self)
        self.batches_ahead = BatchesAhead(self, self.exchanges)
        """Batches that wait for their step, where shards are in tiers."""
        self._kept_keys = KeptKeys[DistributedInput]()
        self._stream: torch.cuda.Stream | None = None

    # Lookup -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Mapping[str, Bag | Tensor] | DistributedInput) -> EmbeddingOutput:
        """Look up the local batch, or the result of `distribute` or `begin`. Collective.

        Raises:
            KeyRangeError: a key of this batch is out of range in a table with "raise"; on a GPU `check` and `step`
                raise it.
            DataError: the processes' batches differ in which columns are bags or have weights.
        """
        inputs = self._distributed(batch)
        inputs.take(self.device)
        self._finish()
        training = self.training and torch.is_grad_enabled()
        if training and self.group.size > 1:
            check_unmixed(self.replicas, joined=inputs.joins_replicas)
        flat = inputs.lookup(training=training)
        if training and self.gradient_watch is not None:
            flat.register_hook(self.gradient_watch)  # type: ignore[no-untyped-call]
        return EmbeddingOutput(flat, self.places, inputs.masks, inputs.wide)

    def begin(self, batch: Batch | Mapping[str, Bag | Tensor] | DistributedInput) -> DistributedInput:
        """Start a lookup; pass the result to `forward` in place of the batch, which waits for the vectors.

        With static shapes the exchange overlaps with what runs between the two calls, such as layers that need no
        embeddings. Collective; tables must not be updated between `begin` and its `forward`.
        """
        inputs = self._distributed(batch)
        inputs.take(self.device)
        inputs.begin(training=self.training and torch.is_grad_enabled())
        return inputs

    room_of = renamed_method("room_of", "wide_rows_of")

    def wide_rows_of(self, inputs: DistributedInput) -> WideRows | None:
        """Return the wider rows that a lookup in flight writes columns of, if the output has margins."""
        return inputs.wide_in_flight

    def _distributed(self, batch: Batch | Mapping[str, Bag | Tensor] | DistributedInput) -> DistributedInput:
        if isinstance(batch, DistributedInput):
            return batch
        known = self._kept_keys.take(batch) or self.batches_ahead.take(batch)
        return known or self.exchanges.input_dist(batch)

    @property
    def resolves_ahead(self) -> bool:
        """Whether ids can be sent ahead: through peer memory only, since NCCL needs one order of collectives."""
        return self.exchanges.has_peers

    def resolve_ahead(self, batch: Batch) -> None:
        """Resolve the keys of a batch and run its input_dist, for the next lookup of the same batch object.

        This part of a lookup needs no weights and is captured in a CUDA graph of its own; see `settle_rows`.
        """
        self._kept_keys.keep(batch, self.exchanges.input_dist(batch, ahead=True))

    def end_ahead(self) -> bool:
        """Drop keys that were resolved ahead; return whether a lookup used them."""
        return self._kept_keys.end()

    def settle_rows(self) -> None:
        """Compute everything that the step needs of the batch, whose memory may then be overwritten during the step."""
        self._finish(replicas=False)
        for part in self.parts():
            part.settle_rows()

    def distribute(self, batch: Batch | Mapping[str, Bag | Tensor]) -> DistributedInput:
        """Resolve the keys of a batch and run its input_dist ahead; pass the result to `forward` in place of the batch.

        On a GPU it runs on a stream of its own and overlaps with the current stream; with dynamic shapes the host waits
        for that stream only. Collective. Tables may be updated between it and its `forward`, which reads the new rows.
        """
        if self.device.type != "cuda" or is_capturing(self.device):
            return self.exchanges.input_dist(batch)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            inputs = self.exchanges.input_dist(batch)
            inputs.ready = self._stream.record_event()
        return inputs

    def key_records(self) -> list[Tensor]:
        """Return the records that recorded lookups write; see `EmbeddingCollection.key_records`."""
        return self.violations.lasting_records()

    # Update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, lr: float | Tensor, scale: float | Tensor = 1.0, factor: float | Tensor = 1.0, gate: Tensor | None = None
    ) -> None:
        """Move rows and state by the gradients of all processes; arguments as of an EmbeddingCollection."""
        if self.batch_size is None or self.device.type == "cpu":
            self.check()
        self.begin_step(lr, scale, factor, gate)()

    def begin_step(
        self, lr: float | Tensor, scale: float | Tensor, factor: float | Tensor, gate: Tensor | None
    ) -> Callable[[], None]:
        """Do what `step` does, without its check, under `torch.no_grad`; see `TableCollection.begin_step`."""
        self._finish(replicas=False)
        moving = []
        if self.own is not None:
            moving.append(self.own.begin_step(lr, scale, factor, gate))
        self._finish()
        if self.replicas is not None:
            join_replicas(self.replicas, self.group)
            moving.append(self.replicas.begin_step(lr, scale, factor, gate))

        def finish() -> None:
            for one in moving:
                one()

        return finish

    def _finish(self, *, replicas: bool = True) -> None:
        """Wait for gradients that are in progress."""
        for waiting in (self.own_waiting, self.replicas_waiting if replicas else []):
            for finish in waiting:
                finish()
            waiting.clear()

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        self.own_waiting.clear()
        self.replicas_waiting.clear()
        for part in self.parts():
            part.discard_gradients()

    @torch.no_grad()
    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients of all processes; equal on each, 0-dim, float32."""
        self._finish()
        if self.replicas is not None:
            join_replicas(self.replicas, self.group)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.own is not None:
            total += self.own.grad_norm_squared()
        self.group.all_reduce(total)
        if self.replicas is not None:
            total += self.replicas.grad_norm_squared()
        return total.to(torch.float32)

    def nonfinite_gradients(self) -> list[str]:
        """Return the features whose tables have NaN or infinite gradients waiting in this process."""
        self._finish()
        bad = {part.features[piece].table for part in self.parts() for piece in part.nonfinite_gradients()}
        return [feature.name for feature in self.features.values() if feature.table in bad]

    def freeze(self, table: str) -> None:
        """Keep a table's rows and state as they are until `unfreeze`; all processes call it."""
        self.frozen |= {self._known(table)}
        for part in self.parts():
            if table in part.tables:
                part.freeze(table)

    def unfreeze(self, table: str) -> None:
        """Let a frozen table move again; all processes call it."""
        if not self.tables[self._known(table)].trainable:
            raise ConfigError("the table has no optimizer state", value=table, fix="build it with trainable=True")
        for part in self.parts():
            if table in part.tables:
                part.unfreeze(table)
        self.frozen -= {table}

    # Content ------------------------------------------------------------------------------------------------

    def _known(self, table: str) -> str:
        if table not in self.tables:
            raise ConfigError("no such table in the collection", value=table, fix=suggest(table, self.tables))
        return table

    def export_table(self, table: str, *, copy: bool = True) -> TableState:
        """Return a whole table on every process: rows and optimizer state; all processes call it together.

        It is assembled from all shards, so it is always a copy.
        """
        return gather_table(self, self._known(table))

    def import_table(self, table: str, content: TableState) -> None:
        """Replace a whole table by the same content on every process; see `EmbeddingCollection.import_table`."""
        scatter_table(self, self._known(table), content)

    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a table's rows, (num_rows, dim), the same on every process, and leave optimizer state alone."""
        scatter_rows(self, self._known(table), rows)

    def summary(self) -> list[TableSummary]:
        """Return the rows of each table for the summary; those of a dynamic table are local to this process."""
        lines = []
        for name, table in self.tables.items():
            users = tuple(feature.name for feature in self.features.values() if feature.table == name)
            rows = table.num_rows if isinstance(table, TableConfig) else sum(len(x) for x in self.local_rows(name))
            lines.append(summarize(table, self.optimizer, users, rows, name not in self.frozen))
        return lines
