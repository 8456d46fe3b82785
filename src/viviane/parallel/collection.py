"""An embedding collection whose tables are spread over processes by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.config.optimizers import AnyOptimizer
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import (
    EmbeddingCollection,
    FeatureConfig,
    TableCollection,
    TableConfig,
    TableState,
    TableSummary,
)
from viviane.embedding.keys import Violations
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.plan import place_features
from viviane.embedding.state import summarize
from viviane.embedding.wide_rows import WideRows
from viviane.ops.capture import is_capturing
from viviane.ops.row_update import initial_state, state_shape
from viviane.parallel.content import gather_table, scatter_rows, scatter_table, start_shard
from viviane.parallel.distinct import DistinctAsked
from viviane.parallel.exchange import Return, assemble
from viviane.parallel.fixed import FixedAsked
from viviane.parallel.group import Group
from viviane.parallel.kept_keys import KeptKeys
from viviane.parallel.layout import Piece, check_features, part_table, pieces_of
from viviane.parallel.plan import AnyTable, Plan, Shard, shards_of
from viviane.parallel.replicas import check_unmixed, join_replicas
from viviane.parallel.route import Asked
from viviane.parallel.routes import AnyAsked, Routes


class ShardedCollection(TableCollection):
    """Embedding tables over several processes: each looks up its own batch, and all of them train the same tables.

    The plan says where which part of a table is. Ids go to the processes that have their rows, pooled vectors come
    back, gradients go the same way; replicated tables are looked up at home, and their gradients are summed over the
    processes before a step. All processes call forward, backward and step together, each with its own rows; gradients
    are those of the sum of their losses.

    Args:
        tables, features, optimizer, seed: as of an EmbeddingCollection; a row begins the same wherever it is.
        plan: where the tables are.
        group: the processes; None takes all that torchrun started.
        device: of this process's parts.
        wire_dtype: type of vectors and gradients between processes.
        batch_size: rows of every process's batch, where they are always so many.
        hotness: ids of every row, by feature, where a feature with bags always has so many. With `batch_size`, and
            `hotness` of all features with bags, sizes are not exchanged: nothing waits for a GPU.
        deduplicate_ids: send each distinct row of a batch once, and pool vectors at home; sizes are always exchanged.

    Example:
        >>> from viviane.config import SGD
        >>> tables = [TableConfig(name="item", num_rows=4, dim=2, init={"type": "constant", "value": 1.0})]
        >>> plan = Plan(world_size=1, tables=[{"table": "item", "kind": "row", "ranks": [0]}])
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
        plan: Plan,
        group: Group | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        hotness: Mapping[str, int] | None = None,
        deduplicate_ids: bool = False,
    ) -> None:
        super().__init__()
        self.fix_sizes(batch_size, hotness)
        self.deduplicate_ids = deduplicate_ids
        self.group = group or Group.world()
        self.tables: dict[str, AnyTable] = {table.name: table for table in tables}
        self.features = {feature.name: feature for feature in features}
        self.plan, self.optimizer, self.seed = plan, optimizer, seed
        plan.check(self.tables, self.group.size)
        check_features(features, self.tables, plan, optimizer, deduplicate_ids)
        self._device = resolve_device(str(device))
        self.frozen = frozenset(table.name for table in tables if not table.trainable)
        self.wire_dtype, self.output_dtype = wire_dtype, output_dtype
        self._places = place_features(features, self.tables)
        self.pieces = pieces_of(self.features, self.tables, self._places, plan)
        self.shards = {name: shards_of(plan.table(name), table) for name, table in self.tables.items()}
        mine = [one for shards in self.shards.values() for one in shards if one.rank == self.group.rank]
        copies = [one for shards in self.shards.values() for one in shards if one.rank is None]
        self.own = self._part(mine, [p for p in self.pieces if p.shard.rank == self.group.rank], wire_dtype)
        self.replicas = self._part(copies, [p for p in self.pieces if p.shard.rank is None], output_dtype)
        width = max(place.stop for place in self._places.values())
        self._assembly = assemble(self.pieces, self.group.size, width, wire_dtype)
        wide = any(not isinstance(table, TableConfig) or table.num_rows >= 2**31 for table in tables)
        self.routes = Routes(self, torch.int64 if wide else torch.int32)
        self.violations = Violations()
        self._kept_keys = KeptKeys[AnyAsked]()
        self._stream: torch.cuda.Stream | None = None
        self._own_waiting: list[Callable[[], None]] = []
        self._replicas_waiting: list[Callable[[], None]] = []

    def _part(
        self, shards: Sequence[Shard], pieces: Sequence[Piece], output_dtype: torch.dtype
    ) -> EmbeddingCollection | None:
        """Build the collection of some shards; one feature for each piece."""
        used = {piece.shard for piece in pieces}
        tables = [part_table(shard, self.tables[shard.table]) for shard in shards if shard in used]
        if not tables:
            return None
        features = [
            FeatureConfig(name=piece.name, table=piece.shard.table, combiner="sum") for piece in pieces
        ]  # fmt: skip
        part = EmbeddingCollection(
            tables, features, self.optimizer, device=self.device, seed=self.seed, output_dtype=output_dtype
        )
        for shard in shards:
            if shard in used:
                start_shard(part, shard, self.tables[shard.table], self.seed)
        return part

    @property
    def device(self) -> torch.device:
        """Where this process's parts are."""
        return self._device

    @property
    def width(self) -> int:
        """Columns of the flat output."""
        return self._assembly.width

    def parts(self) -> list[EmbeddingCollection]:
        """Return the collections of this process: of its own shards, and of replicated tables."""
        return [part for part in (self.own, self.replicas) if part is not None]

    def fix_sizes(self, batch_size: int | None, hotness: Mapping[str, int] | None = None) -> None:
        """Say beforehand what training batches look like, on all processes alike; they may differ again after `None`.

        Then nothing in forward, backward and step waits for a GPU, and a CUDA graph can record them, as long as every
        feature is one-hot or has a `hotness`, no bag has weights, and no table is dynamic. Outside of training sizes
        are exchanged all the same. Keys out of range are raised by `check`, not by `step`.

        Args:
            batch_size: rows of every process's batch; None: any.
            hotness: ids of every row, by feature with bags.
        """
        self.batch_size, self.hotness = batch_size, dict(hotness or {})

    # Lookup -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Mapping[str, Bag | Tensor] | AnyAsked) -> EmbeddingOutput:
        """Look this process's batch up, or one that was distributed; all processes call it together.

        Raises:
            KeyRangeError: a key of this batch is out of range in a table with "raise"; on a GPU `check` and `step`
                raise it.
            DataError: the processes' batches differ in which columns are bags or have weights.
        """
        asked = self._asked(batch)
        asked.take(self.device)
        self._finish()
        training = self.training and torch.is_grad_enabled()
        if training and self.group.size > 1:
            check_unmixed(self.replicas, joined=isinstance(asked, FixedAsked))
        if isinstance(asked, FixedAsked):
            flat = asked.route.look_up(asked, training=training)
            if training and self.gradient_watch is not None:
                flat.register_hook(self.gradient_watch)  # type: ignore[no-untyped-call]
            return EmbeddingOutput(flat, self._places, asked.masks, asked.wide)
        size = asked.size if isinstance(asked, DistinctAsked) else asked.sizes[self.group.rank]
        local = self._look_up(self.replicas, asked.local, size, training)
        if isinstance(asked, DistinctAsked):
            flat = asked.route.look_up(asked, local, training=training)
        else:
            looked_up = self._look_up(self.own, asked.asked, sum(asked.sizes), training)
            flat = Return.apply(looked_up, local, self.group, self._assembly, asked.sizes)  # type: ignore[no-untyped-call]
        if asked.scales:
            factors = torch.ones_like(flat)
            for name, scale in asked.scales.items():
                place = self._places[name]
                factors[:, place.start : place.stop] = scale.repeat_interleave(place.dim, 1)
            flat = flat * factors
        return EmbeddingOutput(flat, self._places, asked.masks)

    def begin(self, batch: Batch | Mapping[str, Bag | Tensor] | AnyAsked) -> AnyAsked:
        """Begin a lookup; `forward` takes what is returned in the batch's place, and waits for the vectors.

        What runs between the two, such as layers that need no embeddings, runs beside the exchange where sizes are
        fixed. All processes call it together; tables must not move between it and its `forward`.
        """
        asked = self._asked(batch)
        asked.take(self.device)
        if isinstance(asked, FixedAsked):
            asked.route.begin(asked, training=self.training and torch.is_grad_enabled())
        return asked

    def room_of(self, asked: AnyAsked) -> WideRows | None:
        """Return the rows that a lookup under way writes columns of, where there is room beside them."""
        begun = asked.begun if isinstance(asked, FixedAsked) else None
        return None if begun is None else begun.wide

    def _asked(self, batch: Batch | Mapping[str, Bag | Tensor] | AnyAsked) -> AnyAsked:
        if isinstance(batch, Asked | FixedAsked | DistinctAsked):
            return batch
        return self._kept_keys.take(batch) or self.routes.ask(batch)

    @property
    def resolves_ahead(self) -> bool:
        """Whether ids go straight to their owners; over NCCL exchanges follow one another, in one order everywhere."""
        return self.routes.has_peers

    def resolve_ahead(self, batch: Batch) -> None:
        """Resolve a batch's keys and write ids to the processes that have their rows, for this very object's lookup.

        It is what a lookup needs no weights for, recorded in a CUDA graph of its own; see `settle_rows`.
        """
        self._kept_keys.keep(batch, self.routes.ask(batch, ahead=True))

    def end_ahead(self) -> bool:
        """Drop what was resolved ahead and not looked up; returns whether a lookup took it."""
        return self._kept_keys.end()

    def settle_rows(self) -> None:
        """Make all that a step still needs of the batch, which may be written to beside the step then."""
        self._finish(replicas=False)
        for part in self.parts():
            part.settle_rows()

    def distribute(self, batch: Batch | Mapping[str, Bag | Tensor]) -> AnyAsked:
        """Resolve a batch's keys and exchange ids ahead; `forward` takes what is returned in the batch's place.

        On a GPU it runs on a stream of its own, beside what the current one does; where sizes vary, the host waits for
        that stream alone. All processes call it together. Between it and its `forward` tables may move, and are read
        as they are then.
        """
        if self.device.type != "cuda" or is_capturing(self.device):
            return self.routes.ask(batch)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            asked = self.routes.ask(batch)
            asked.ready = self._stream.record_event()
        return asked

    def _look_up(self, part: EmbeddingCollection | None, batch: Batch | None, size: int, training: bool) -> Tensor:
        if part is None or batch is None:
            # Backward exchanges gradients on every process, so every process's output asks for one.
            empty = torch.empty(size, 0, dtype=self.output_dtype, device=self.device)
            return empty.requires_grad_(training)
        flat: Tensor = part(batch).flat
        return flat if flat.requires_grad or not training else flat.detach().requires_grad_()

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise"."""
        self.violations.check()

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
        self._finish(replicas=False)
        moving = []
        if self.own is not None:
            moving.append(self.own.begin_step(lr, scale, factor, gate))
        self._finish()
        if self.replicas is not None:
            join_replicas(self.replicas, self.group)
            moving.append(self.replicas.begin_step(lr, scale, factor, gate))
        for finish in moving:
            finish()

    def wait_for(self, own: Callable[[], None], replicas: Sequence[Callable[[], None]]) -> None:
        """Keep what a step has to wait for: gradients on their way to this process's shards, and sums under way."""
        self._own_waiting.append(own)
        self._replicas_waiting += replicas

    def _finish(self, *, replicas: bool = True) -> None:
        """Wait for gradients that are under way."""
        for waiting in (self._own_waiting, self._replicas_waiting if replicas else []):
            for finish in waiting:
                finish()
            waiting.clear()

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        self._own_waiting.clear()
        self._replicas_waiting.clear()
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

    def state_shapes(self, table: str) -> dict[str, tuple[bool, torch.dtype]]:
        """Return the tensors of a table, whether each has a number for every column, and their types."""
        settings = self.tables[table]
        rule = (settings.optimizer or self.optimizer) if settings.trainable else None
        shapes = {"weight": (True, settings.torch_dtype)}
        one = torch.empty(1, settings.dim, device="meta")
        if rule is not None:
            shapes |= {n: (len(state_shape(n, one, rule)) == 2, torch.float32) for n in initial_state(rule)}
        return shapes

    # Content ------------------------------------------------------------------------------------------------

    def _known(self, table: str) -> str:
        if table not in self.tables:
            raise ConfigError("no such table in the collection", value=table, fix=suggest(table, self.tables))
        return table

    def export_table(self, table: str, *, copy: bool = True) -> TableState:
        """Return a whole table on every process: rows and optimizer state; all processes call it together.

        It is put together from all shards, so it is a copy whatever `copy` says.
        """
        return gather_table(self, self._known(table))

    def import_table(self, table: str, content: TableState) -> None:
        """Replace a whole table by the same content on every process; see `EmbeddingCollection.import_table`."""
        scatter_table(self, self._known(table), content)

    def copy_rows(self, table: str, rows: Tensor) -> None:
        """Replace a table's rows, (num_rows, dim), the same on every process, and leave optimizer state alone."""
        scatter_rows(self, self._known(table), rows)

    def summary(self) -> list[TableSummary]:
        """Return what a model's summary says of each table; rows of a dynamic table are those of this process."""
        lines = []
        for name, table in self.tables.items():
            users = tuple(feature.name for feature in self.features.values() if feature.table == name)
            rows = table.num_rows if isinstance(table, TableConfig) else sum(len(x) for x in self.local_rows(name))
            lines.append(summarize(table, self.optimizer, users, rows, name not in self.frozen))
        return lines
