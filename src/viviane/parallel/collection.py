"""An embedding collection whose tables are spread over processes by a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.config.optimizers import AnyOptimizer
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError, DataError, suggest
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
from viviane.embedding.plan import Keys, place_features, read_keys
from viviane.embedding.state import summarize
from viviane.ops.row_update import initial_state, state_shape
from viviane.parallel.content import gather_table, scatter_rows, scatter_table, start_shard
from viviane.parallel.exchange import Assembly, Move, Return, exchange_bags, exchange_singles
from viviane.parallel.group import Group
from viviane.parallel.keys import KeyResolver, PieceRows, Resolved
from viviane.parallel.layout import Piece, part_table, pieces_of
from viviane.parallel.plan import AnyTable, Plan, Shard, check_columns, shards_of
from viviane.parallel.replicas import join_replicas


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
    ) -> None:
        super().__init__()
        self.batch_size, self.hotness = batch_size, dict(hotness or {})
        self.group = group or Group.world()
        self.tables: dict[str, AnyTable] = {table.name: table for table in tables}
        self.features = {feature.name: feature for feature in features}
        self.plan, self.optimizer, self.seed = plan, optimizer, seed
        plan.check(self.tables, self.group.size)
        self._check(features)
        self._device = resolve_device(str(device))
        self._frozen = frozenset(table.name for table in tables if not table.trainable)
        self._places = place_features(features, self.tables)
        self._pieces = pieces_of(self.features, self.tables, self._places, plan)
        self.shards = {name: shards_of(plan.table(name), table) for name, table in self.tables.items()}
        mine = [one for shards in self.shards.values() for one in shards if one.rank == self.group.rank]
        copies = [one for shards in self.shards.values() for one in shards if one.rank is None]
        self.own = self._part(mine, [p for p in self._pieces if p.shard.rank == self.group.rank], output_dtype)
        self.replicas = self._part(copies, [p for p in self._pieces if p.shard.rank is None], output_dtype)
        self._assembly = self._assemble(wire_dtype)
        self._output_dtype = output_dtype
        wide = any(not isinstance(table, TableConfig) or table.num_rows >= 2**31 for table in tables)
        self._row_dtype = torch.int64 if wide else torch.int32
        self._violations = Violations()
        self._routes: dict[tuple[str, ...], _Route] = {}

    def _check(self, features: Sequence[FeatureConfig]) -> None:
        for feature in features:
            if feature.table not in self.tables:
                fix = suggest(feature.table, self.tables)
                raise ConfigError("no such table", where=f"feature {feature.name!r}", value=feature.table, fix=fix)
            if feature.combiner == "concat" and not isinstance(self.tables[feature.table], TableConfig):
                raise ConfigError(
                    "a dynamic table gives no 'concat' over several processes", where=f"feature {feature.name!r}",
                    fix="pool with 'sum' or 'mean', or give the table num_rows",
                )  # fmt: skip
        for name, table in self.tables.items():
            if self.plan.table(name).kind == "column":
                check_columns(name, table.optimizer or self.optimizer)

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

    def _assemble(self, wire: torch.dtype) -> Assembly:
        """Work out the columns of every process's block, and where they go."""
        widths = [0] * (self.group.size + 1)
        moves: list[Move] = []
        written: set[int] = set()
        for piece in self._pieces:
            block = self.group.size if piece.shard.rank is None else piece.shard.rank
            start, stop = widths[block], widths[block] + piece.shard.dim
            widths[block] = stop
            adds = piece.column in written
            written.add(piece.column)
            last = moves[-1] if moves else None
            run = last and last.block == block and last.stop == start and last.adds == adds
            if last and run and last.target + last.stop - last.start == piece.column:
                moves[-1] = Move(block, last.start, stop, last.target, adds)
            else:
                moves.append(Move(block, start, stop, piece.column, adds))
        width = max(place.stop for place in self._places.values())
        return Assembly(tuple(widths[:-1]), tuple(moves), width, wire)

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

    # Lookup -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch | Mapping[str, Bag | Tensor]) -> EmbeddingOutput:
        """Look this process's batch up; all processes call it together.

        Raises:
            KeyRangeError: a key of this batch is out of range in a table with "raise"; on a GPU `check` and `step`
                raise it.
            DataError: the processes' batches differ in which columns are bags or have weights.
        """
        keys = read_keys(batch, self.features, self.device)
        route = self._route(keys.one_hot_names)
        found = route.resolve(keys)
        sizes = self._sizes(keys, found) if self.batch_size is None else self._fixed_sizes(keys, found)
        asked = route.exchange(self.group, found, sizes, self.hotness if self.batch_size is not None else {})
        training = self.training and torch.is_grad_enabled()
        looked_up = self._look_up(self.own, asked, sum(sizes), training)
        local = self._look_up(self.replicas, route.local(found), keys.size, training)
        flat: Tensor = Return.apply(looked_up, local, self.group, self._assembly, sizes)  # type: ignore[no-untyped-call]
        if found.scales:
            factors = torch.ones_like(flat)
            for name, scale in found.scales.items():
                place = self._places[name]
                factors[:, place.start : place.stop] = scale.repeat_interleave(place.dim, 1)
            flat = flat * factors
        return EmbeddingOutput(flat, self._places, found.masks)

    def _route(self, one_hot: tuple[str, ...]) -> _Route:
        if one_hot not in self._routes:
            resolver = KeyResolver(
                self.features, self.tables, one_hot, self._violations, self.device, self._row_dtype
            )  # fmt: skip
            self._routes[one_hot] = _Route(resolver, self._pieces, self.group, self.device)
        return self._routes[one_hot]

    def _sizes(self, keys: Keys, found: Resolved) -> list[int]:
        """Return the rows of every process's batch, after all agreed on the kind of batch."""
        kind = 0
        for i, name in enumerate(self.features):
            bag = found.bags.get(name)
            kind |= (0 if bag is None else 1 if bag.weights is None else 2) << (2 * i)
        numbers = [keys.size] + [kind >> (62 * i) & ((1 << 62) - 1) for i in range(2 * len(self.features) // 62 + 1)]
        every = self.group.gather_numbers(numbers)
        if any(one[1:] != numbers[1:] for one in every):
            raise DataError(
                "the processes' batches are of different kinds",
                fix="give every process the same columns: ids, bags, and weights or none",
            )
        return [one[0] for one in every]

    def _fixed_sizes(self, keys: Keys, found: Resolved) -> list[int]:
        """Return the rows of every process's batch, where they were said beforehand."""
        assert self.batch_size is not None
        if keys.size != self.batch_size:
            raise DataError("the batch has another size than said", value=keys.size, allowed=str(self.batch_size))
        for name, hotness in self.hotness.items():
            if name in found.bags and len(found.bags[name].values) != hotness * keys.size:
                raise DataError(
                    "the bags have another number of ids than said", where=f"feature {name!r}",
                    value=len(found.bags[name].values), allowed=f"{hotness} a row",
                )  # fmt: skip
        return [self.batch_size] * self.group.size

    def _look_up(self, part: EmbeddingCollection | None, batch: Batch | None, size: int, training: bool) -> Tensor:
        if part is None or batch is None:
            # Backward exchanges gradients on every process, so every process's output asks for one.
            empty = torch.empty(size, 0, dtype=self._output_dtype, device=self.device)
            return empty.requires_grad_(training)
        flat: Tensor = part(batch).flat
        return flat if flat.requires_grad or not training else flat.detach().requires_grad_()

    def check(self) -> None:
        """Raise what a GPU found since the last check: a key out of range in a table with "raise"."""
        self._violations.check()

    # Update -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor = 1.0, factor: float = 1.0) -> None:
        """Move rows and state by the gradients of all processes; arguments as of an EmbeddingCollection."""
        self.check()
        if self.replicas is not None:
            join_replicas(self.replicas, self.group)
        for part in self.parts():
            part.step(lr, scale, factor)

    def discard_gradients(self) -> None:
        """Drop the gradients that wait for a step."""
        for part in self.parts():
            part.discard_gradients()

    @torch.no_grad()
    def grad_norm_squared(self) -> Tensor:
        """Return the sum of squares of the waiting gradients of all processes; equal on each, 0-dim, float32."""
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
        bad = {part.features[piece].table for part in self.parts() for piece in part.nonfinite_gradients()}
        return [feature.name for feature in self.features.values() if feature.table in bad]

    def freeze(self, table: str) -> None:
        """Keep a table's rows and state as they are until `unfreeze`; all processes call it."""
        self._frozen |= {self._known(table)}
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
        self._frozen -= {table}

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
            lines.append(summarize(table, self.optimizer, users, rows, name not in self._frozen))
        return lines


class _Route:
    """The way of one kind of batch: which pieces look up single ids, which bags, and on which process."""

    def __init__(self, resolver: KeyResolver, pieces: Sequence[Piece], group: Group, device: torch.device) -> None:
        self.resolve = resolver

        def is_single(piece: Piece) -> bool:
            return (piece.feature.name, piece.place) in resolver.singles

        by_rank = [[p for p in pieces if p.shard.rank == rank] for rank in range(group.size)]
        self._singles = _Singles([[p for p in own if is_single(p)] for own in by_rank], resolver, device)
        self._bags = [[p for p in own if not is_single(p)] for own in by_rank]
        here = [p for p in pieces if p.shard.rank is None]
        self._local_singles = _Singles([[p for p in here if is_single(p)]], resolver, device)
        self._local_bags = [p for p in here if not is_single(p)]
        self._rows = {p: PieceRows([p], device) for own in [*self._bags, self._local_bags] for p in own}
        self._rank = group.rank

    def exchange(self, group: Group, found: Resolved, sizes: Sequence[int], hotness: Mapping[str, int]) -> Batch:
        """Return what all batches ask of this process, as one batch of its pieces; hotness where it is fixed."""
        rows = exchange_singles(group, self._singles.rows(found.singles), self._singles.counts, sizes)
        pieces = [piece for own in self._bags for piece in own]
        bags = [self._bag(piece, found) for piece in pieces]
        weighted = [bag.weights is not None for bag in bags]
        fixed = [hotness.get(piece.feature.name) for piece in pieces]
        counts = [len(own) for own in self._bags]
        taken = exchange_bags(group, bags, counts, sizes, weighted, fixed) if pieces else []
        return _batch(self._singles.pieces[self._rank], rows, self._bags[self._rank], taken)

    def local(self, found: Resolved) -> Batch:
        """Return what this batch asks of replicated tables."""
        bags = [self._bag(piece, found) for piece in self._local_bags]
        return _batch(self._local_singles.pieces[0], self._local_singles.rows(found.singles), self._local_bags, bags)

    def _bag(self, piece: Piece, found: Resolved) -> Bag:
        bag = found.bags[piece.feature.name]
        return Bag(self._rows[piece](bag.values, 0), bag.offsets, bag.weights)


class _Singles:
    """Pieces that look one id a row up, by process."""

    def __init__(self, pieces: Sequence[Sequence[Piece]], resolver: KeyResolver, device: torch.device) -> None:
        self.pieces = pieces
        self.counts = [len(own) for own in pieces]
        every = [piece for own in pieces for piece in own]
        columns = [resolver.singles[piece.feature.name, piece.place] for piece in every]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._rows = PieceRows(every, device) if every else None

    def rows(self, singles: Tensor) -> Tensor:
        """Return the pieces' rows of a batch, (B, P)."""
        if self._rows is None:
            return singles[:, :0]
        return self._rows(singles.index_select(1, self._columns))


def _batch(singles: Sequence[Piece], rows: Tensor, bag_pieces: Sequence[Piece], bags: Sequence[Bag]) -> Batch:
    names, bag_names = tuple(p.name for p in singles), tuple(p.name for p in bag_pieces)
    nothing = torch.empty(rows.shape[0], 0, device=rows.device)
    return Batch(
        Layout((), (), names, bag_names), nothing, nothing, rows, dict(zip(bag_names, bags, strict=True))
    )  # fmt: skip
