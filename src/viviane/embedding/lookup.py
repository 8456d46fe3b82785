"""Lookups: the plan, computed once for each layout of a batch, and the parts of one batch with forward and backward.

Shapes: B rows of the batch, S places (columns of D in the output) of a part, N entries, W the output's width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from viviane.core.errors import ConfigError
from viviane.embedding.bags import BagPlan, PooledPlan
from viviane.embedding.batch_keys import AnyKeys, Keys
from viviane.embedding.buffers import Buffers, Memory
from viviane.embedding.config import FeatureConfig, TableConfig
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.int8_tables import gather_int8
from viviane.embedding.keys import BagRowMap, RowMap, Violation, Violations, check_key_type
from viviane.embedding.output import OutputColumns
from viviane.embedding.prepared import sources_type
from viviane.embedding.static_lookup import Resolved
from viviane.embedding.storage import Storage
from viviane.embedding.table_storage import RowGradients, StorageLookup, TableStorage
from viviane.ops.capture import is_capturing, refuse_capture
from viviane.ops.dispatch import kernels_serve
from viviane.ops.embedding_bag import entry_bags, entry_sources, gather_rows, pool_rows
from viviane.ops.int8_rows import is_int8
from viviane.ops.key_rows import MOST_BAGS
from viviane.ops.row_update import Entries

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def admitted(parts: Sequence[StorageLookup], training: bool, ahead: bool) -> list[StorageLookup]:
    """Return lookups whose rows are slots where their storage is a cache; rows of one storage get slots together.

    Rows of a lookup that trains nothing are copied aside where they do not fit.

    Args:
        ahead: the lookup comes later, and `settle` says then whether the rows fit.

    Raises:
        CacheFullError: rows that will be trained do not fit.
    """
    together: dict[TableStorage, list[int]] = {}
    for i, part in enumerate(parts):
        if part.storage.in_tiers:
            together.setdefault(part.storage, []).append(i)
    found = list(parts)
    for storage, places in together.items():
        rows = [parts[i].rows.reshape(-1) for i in places]
        there = storage.locate(rows[0] if len(rows) == 1 else torch.cat(rows), training=training, ahead=ahead)
        for i, own in zip(places, torch.split(there.rows, [len(one) for one in rows]), strict=True):
            found[i] = replace(parts[i], rows=own.view(parts[i].rows.shape), lease=there.lease, aside=there.aside)
    return found


def settle(parts: Sequence[StorageLookup]) -> None:
    """Return when it is known that rows that were given slots ahead have them.

    Raises:
        CacheFullError: they have none.
    """
    for part in parts:
        if part.lease is not None:
            part.lease.settle()


def arrive(parts: Sequence[StorageLookup]) -> None:
    """Wait for rows that are on their way to their slots."""
    for part in parts:
        if part.lease is not None:
            part.storage.arrive(part.lease)


def gather(parts: Sequence[StorageLookup], size: int, width: int, buffers: Memory) -> Tensor:
    """Look everything up: (B, W)."""
    out = buffers.take(size, width, parts[0].storage.weight.device)
    for part in parts:
        weight = part.weight
        if is_int8(weight):
            gather_int8(part, weight, out)
        elif part.offsets is None:
            gather_rows(weight, part.rows, out, part.columns, part.weights)
        else:
            pool_rows(weight, part.rows, part.offsets, out, part.columns, part.weights)
    return out


def prepare(parts: Sequence[StorageLookup], size: int, width: int) -> None:
    """Begin the part of the update that needs no gradients, for an output of `size` rows and `width` columns."""
    if not parts or not kernels_serve(parts[0].rows.device):  # on a CPU there is no such part
        return
    together: dict[int, list[StorageLookup]] = {}
    for part in parts:
        if part.tables:
            together.setdefault(id(part.storage), []).append(part)
    for group in together.values():
        group[0].storage.prepare(group, size, width)


def hand_over(parts: Sequence[StorageLookup], gradient: Tensor) -> None:
    """Give the storages the gradient of the output, (B, W), to keep until the next step."""
    size = len(gradient)
    # One tensor for all parts: where parts of a storage are joined, it is recognised and not copied.
    flat, width = flat_rows(gradient)
    for part in parts:
        if part.tables:
            if part.lease is not None:
                part.storage.hold(part.lease)
            part.storage.add_gradients(RowGradients(_entries(part, flat, size, width), part.tables))


def _entries(part: StorageLookup, gradient: Tensor, size: int, width: int) -> Entries:
    """Return what `entries_of` does, from what `prepare` has made where that is known."""
    sources = part.storage.prepared_sources(part, width)
    if sources is None:
        return entries_at(part.rows, part.offsets, part.weights, part.columns, gradient, size, width)
    return _with_sources(part.rows, part.weights, sources, part.columns, gradient, width)


def flat_rows(gradient: Tensor) -> tuple[Tensor, int]:
    """Return a gradient (B, W) as one flat tensor, and how far apart its rows begin there.

    Columns of a wider gradient, such as concatenation gives back, are not copied: the columns between their rows
    belong to others, and entries do not point there.

    Example:
        >>> wide = torch.arange(8.0).view(2, 4)
        >>> flat_rows(wide[:, 1:3])
        (tensor([1., 2., 3., 4., 5., 6.]), 4)
    """
    (size, width), (apart, inside) = gradient.shape, gradient.stride()
    if size > 1 and inside == 1 and apart > width:
        return gradient.as_strided(((size - 1) * apart + width,), (1,)), apart
    return gradient.contiguous().view(-1), width


class Lookup(torch.autograd.Function):
    """The lookup as autograd sees it: backward hands gradients to the storages and returns none.

    A table's gradient never becomes a tensor of the table's size. `anchor` is an empty tensor that requires
    grad, without which autograd would not call backward.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, parts: Sequence[StorageLookup], size: int, width: int, buffers: Memory
    ) -> Tensor:
        """Gather, and keep what to look up for backward."""
        ctx.parts = parts  # type: ignore[attr-defined]
        prepare(parts, size, width)  # first: the sort runs beside the lookup, which memory holds up, not after it
        return gather(parts, size, width, buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Hand the gradients of the touched rows to their storages."""
        hand_over(ctx.parts, grad_outputs[0])
        return None, None, None, None, None


class _WholeTable(torch.autograd.Function):
    """A lookup of every row; it makes nothing ready for the update, which a lookup of a batch next to it does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, part: StorageLookup, size: int, width: int, buffers: Memory
    ) -> Tensor:
        ctx.part = part  # type: ignore[attr-defined]
        return gather([part], size, width, buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hand_over([ctx.part], grad_outputs[0])
        return None, None, None, None, None


def whole_table(storage: Storage, table: str, dtype: torch.dtype, *, trains: bool) -> Tensor:
    """Return all rows of a table, (num_rows, D), each looked up once.

    Args:
        dtype: of the result.
        trains: whether backward keeps the gradients.
    """
    if storage.in_tiers:
        raise ConfigError(
            "a lookup of all rows needs the whole table in memory", where=f"table {table!r}",
            fix="leave it out of embedding_memory",
        )  # fmt: skip
    first, size, device = storage.bases[table], storage.tables[table].num_rows, storage.weight.device
    every = torch.arange(first, first + size, device=device).unsqueeze(1)
    part = StorageLookup(storage, every, None, None, (0,), frozenset({table} if trains else ()))
    if not trains:
        return gather([part], size, storage.dim, Buffers(dtype))
    anchor = torch.empty(0, device=device, requires_grad=True)
    found: Tensor = _WholeTable.apply(anchor, part, size, storage.dim, Buffers(dtype))  # type: ignore[no-untyped-call]
    return found


def entries_of(part: StorageLookup, gradient: Tensor, size: int, width: int) -> Entries:
    """Return a part's rows and their positions in the flat gradient of the output, (B * W,)."""
    return entries_at(part.rows, part.offsets, part.weights, part.columns, gradient, size, width)


def entries_at(
    rows: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    columns: tuple[int, ...],
    gradient: Tensor,
    size: int,
    width: int,
) -> Entries:
    """Return looked-up rows, and the positions of their gradients in the flat gradient of the output, (B * W,)."""
    if offsets is None:
        sources = _sources(size, width, columns, gradient.device)
    elif kernels_serve(gradient.device):
        # Zeros: wrong offsets, which are reported later, leave some unwritten, and the update reads by them.
        sources = torch.zeros(len(rows), dtype=sources_type(size, width), device=gradient.device)
        entry_sources(offsets, columns, size, width, sources)
    else:
        bags = entry_bags(offsets, len(rows))
        sources = _sources(size, width, columns, gradient.device, by_row=False)[bags]
    return _with_sources(rows, weights, sources, columns, gradient, width)


def _with_sources(
    rows: Tensor, weights: Tensor | None, sources: Tensor, columns: tuple[int, ...], gradient: Tensor, width: int
) -> Entries:
    aligned = math.gcd(16, width, *columns)
    return Entries(rows.reshape(-1), gradient, sources, None if weights is None else weights.reshape(-1), aligned)


def _sources(size: int, width: int, columns: tuple[int, ...], device: torch.device, *, by_row: bool = True) -> Tensor:
    """Return where each vector begins in a flat gradient (B * W): by row and place, or by place and row."""
    sources = _kept_sources(size, width, columns, device, by_row)
    if device.type == "cuda" and is_capturing(device):
        _recorded.setdefault((size, width, columns, device, by_row), sources)
    return sources


_recorded: dict[tuple[Any, ...], Tensor] = {}
"""What CUDA graphs read, kept as long as they may be replayed, which is not known."""


@lru_cache(maxsize=32)
def _kept_sources(size: int, width: int, columns: tuple[int, ...], device: torch.device, by_row: bool) -> Tensor:
    """Make the sources; kept, since batches of one size follow one another."""
    refuse_capture(device, "a new size of batch", fix="run an iteration with such a batch before the capture")
    dtype = sources_type(size, width)
    starts = torch.arange(size, dtype=dtype, device=device) * width
    places = torch.tensor(columns, dtype=dtype).to(device)
    both = starts.unsqueeze(1) + places if by_row else places.unsqueeze(1) + starts
    return both.reshape(-1)


def place_features(features: Sequence[FeatureConfig], tables: Mapping[str, AnyTable]) -> dict[str, OutputColumns]:
    """Lay features side by side in their order."""
    places: dict[str, OutputColumns] = {}
    start = 0
    for feature in features:
        dim = tables[feature.table].dim
        places[feature.name] = OutputColumns(start, dim, feature.num_places, feature.combiner == "concat")
        start = places[feature.name].stop
    return places


@dataclass(frozen=True)
class OneHotPlan:
    """All features of one storage with one id a row: columns of the batch's ids, looked up at once."""

    storage: Storage
    tables: tuple[str, ...]
    row_map: RowMap
    places: tuple[int, ...]
    """Column of the output where each feature begins."""

    def part(self, one_hot: Tensor, frozen: frozenset[str], origin: str, out: Tensor | None = None) -> StorageLookup:
        """Resolve a batch's ids (B, F); their rows go to `out`, or to a new tensor."""
        rows = self.row_map(one_hot, origin=origin, out=out)
        moving = self._every - frozen if frozen else self._every
        return StorageLookup(self.storage, rows, None, None, self.places, moving)

    @cached_property
    def _every(self) -> frozenset[str]:
        return frozenset(self.tables)


@dataclass(frozen=True)
class DynamicPlan:
    """All features of one dynamic table: their keys are resolved together, once a batch.

    Args:
        one_hot: names of the features with one id a row.
        columns: of the batch's ids, theirs.
        places: columns of the output where they begin.
        bags: names of the others.
    """

    storage: DynamicStorage
    one_hot: tuple[str, ...]
    columns: tuple[int, ...]
    places: tuple[int, ...]
    bags: tuple[str, ...]

    def resolve(self, keys: Keys, training: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the rows of one-hot features, (B, F), and of each bag, (N,).

        Raises:
            TableFullError: no row is left for a new key.
        """
        parts = [keys.bags[name].values for name in self.bags]
        if self.columns:
            every = self.columns == tuple(range(keys.one_hot.shape[1]))
            parts.append((keys.one_hot if every else keys.one_hot[:, list(self.columns)]).reshape(-1))
        for name, part in zip([*self.bags, *self.one_hot[:1]], parts, strict=True):
            check_key_type(part, name)
        rows = self.storage.rows(parts, training)
        singles = rows.pop().view(-1, len(self.columns)) if self.columns else None
        return singles, dict(zip(self.bags, rows, strict=True))


TablesOf: TypeAlias = Literal["all", "fixed", "dynamic"]


@dataclass(frozen=True)
class LookupPlan:
    """Everything that a kind of batch looks up.

    Args:
        one_hot: features with one id a row, by storage.
        pooled: summed bags, by storage.
        concat: "concat" bags.
        dynamic: how the keys of dynamic tables become rows.
    """

    one_hot: tuple[OneHotPlan, ...]
    pooled: tuple[PooledPlan, ...]
    concat: tuple[BagPlan, ...]
    dynamic: tuple[DynamicPlan, ...]

    def parts(
        self, keys: Keys, frozen: frozenset[str], training: bool, ahead: bool = False, of: TablesOf = "all"
    ) -> tuple[list[StorageLookup], dict[str, Tensor]]:
        """Resolve a batch: its parts, those of dynamic tables last, and the masks of "concat" features.

        Args:
            frozen: tables that do not move.
            training: whether dynamic tables that move may take new keys in.
            ahead: see `admitted`.
            of: the tables whose keys are resolved.
        """
        parts: list[StorageLookup] = []
        masks: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        if of != "dynamic":
            row_buffers = self._row_buffers(keys)
            parts += [
                one.part(keys.one_hot, frozen, keys.origin, row_buffers.get(id(one.storage), _NO_BUFFERS)[0])
                for one in self.one_hot
            ]
            if self.pooled or self.concat:
                parts += self._bag_parts(keys, found, frozen, masks, row_buffers, dynamic=False)
        if of != "fixed" and self.dynamic:
            for table in self.dynamic:
                moving = frozenset(table.storage.tables) - frozen
                singles, bags = table.resolve(keys, training and bool(moving))
                found |= bags
                if singles is not None:
                    parts.append(StorageLookup(table.storage, singles, None, None, table.places, moving))
            parts += self._bag_parts(keys, found, frozen, masks, {}, dynamic=True)
        return admitted(parts, training, ahead), masks

    def _bag_parts(
        self,
        keys: Keys,
        found: Mapping[str, Tensor],
        frozen: frozenset[str],
        masks: dict[str, Tensor],
        row_buffers: Mapping[int, tuple[Tensor, Tensor]],
        *,
        dynamic: bool,
    ) -> list[StorageLookup]:
        """Resolve the bags of fixed or of dynamic tables; the masks of "concat" features go to `masks`."""
        parts = []
        for group in self.pooled:
            storage = group.group[0].storage
            if storage.is_dynamic == dynamic:
                parts.append(group.part(keys, found, frozen, row_buffers.get(id(storage), _NO_BUFFERS)[1]))
        for one in self.concat:
            if one.storage.is_dynamic == dynamic:
                bag = keys.bags[one.feature.name]
                part, masks[one.feature.name] = one.concat(bag, one.rows(keys, found), frozen, keys.origin)
                parts.append(part)
        return parts

    def _row_buffers(self, keys: Keys) -> dict[int, tuple[Tensor, Tensor]]:
        """Return by storage where its rows go, those of bags right behind the others: a sort wants them as one list."""
        row_buffers: dict[int, tuple[Tensor, Tensor]] = {}
        for one in self.one_hot:
            group = next((group for group in self.pooled if group.group[0].storage is one.storage), None)
            count = None if group is None else group.num_rows(keys)
            if count is not None:
                size, features = len(keys.one_hot), len(one.places)
                whole = torch.empty(size * features + count, dtype=one.row_map.row_dtype, device=keys.one_hot.device)
                row_buffers[id(one.storage)] = whole[: size * features].view(size, features), whole[size * features :]
        return row_buffers


_NO_BUFFERS: tuple[None, None] = (None, None)


@dataclass(frozen=True)
class ResolvedAhead:
    """A batch whose lookup comes later: what was resolved, for which tables, and the records of its keys.

    Args:
        batch: the object that will be looked up.
        found: its lookups.
        violations: records of keys out of range, for the check of the batch's own step.
        of: "fixed": dynamic tables are resolved when the batch is looked up.
    """

    batch: AnyKeys
    found: Resolved
    violations: list[Violation]
    of: TablesOf = "all"


def both(fixed: Resolved, dynamic: Resolved) -> Resolved:
    """Return a batch's lookups in tables of fixed size and in dynamic ones together."""
    size, parts, masks = fixed
    return size, parts + dynamic[1], masks | dynamic[2]


@dataclass(frozen=True)
class LookupPlanner:
    """Makes the plan of a kind of batch from a collection's parts."""

    features: Mapping[str, FeatureConfig]
    tables: Mapping[str, AnyTable]
    fixed: Sequence[Storage]
    dynamic: Sequence[DynamicStorage]
    places: Mapping[str, OutputColumns]
    violations: Violations
    device: torch.device

    def plan(self, one_hot: Sequence[str]) -> LookupPlan:
        """Plan batches whose columns `one_hot` have one id a row; a "concat" is laid out as a bag anyway."""
        index = {name: i for i, name in enumerate(one_hot)}
        features = self.features.values()
        concat = tuple(self._bag(f) for f in features if f.combiner == "concat")
        singles, pooled, dynamic = [], [], []
        for storage in self.fixed:
            own, bags = self._summed(storage, index)
            if bags:
                pooled.append(self._pooled(storage, bags))
            if own:
                singles.append(self._one_hot(storage, own, index))
        for table in self.dynamic:
            own, bags = self._summed(table, index)
            if bags:
                pooled.append(PooledPlan(tuple(self._bag(feature) for feature in bags), ()))
            names = {one.name for one in own}
            others = tuple(f.name for f in features if f.table in table.tables and f.name not in names)
            dynamic.append(self._dynamic(table, own, others, index))
        return LookupPlan(tuple(singles), tuple(pooled), concat, tuple(dynamic))

    def _summed(
        self, storage: TableStorage, index: Mapping[str, int]
    ) -> tuple[list[FeatureConfig], list[FeatureConfig]]:
        """Return a storage's features that are summed: those with one id a row, and the others."""
        summed = [f for f in self.features.values() if f.table in storage.tables and f.combiner != "concat"]
        return [f for f in summed if f.name in index], [f for f in summed if f.name not in index]

    def _dynamic(
        self, storage: DynamicStorage, own: Sequence[FeatureConfig], bags: tuple[str, ...], index: Mapping[str, int]
    ) -> DynamicPlan:
        names = tuple(feature.name for feature in own)
        places = tuple(self.places[name].start for name in names)
        return DynamicPlan(storage, names, tuple(index[name] for name in names), places, bags)

    def _one_hot(self, storage: Storage, features: Sequence[FeatureConfig], index: Mapping[str, int]) -> OneHotPlan:
        columns = [index[feature.name] for feature in features]
        picked = None if columns == list(range(len(index))) else columns
        places = tuple(self.places[feature.name].start for feature in features)
        tables = tuple(feature.table for feature in features)
        return OneHotPlan(storage, tables, self._row_map(storage, features, picked), places)

    def _pooled(self, storage: Storage, features: Sequence[FeatureConfig]) -> PooledPlan:
        row_maps = []
        if len(features) > 1:
            parts = [features[i : i + MOST_BAGS] for i in range(0, len(features), MOST_BAGS)]
            row_maps = [BagRowMap(*self._tables(storage, own)) for own in parts]
        return PooledPlan(tuple(self._bag(feature) for feature in features), tuple(row_maps))

    def _bag(self, feature: FeatureConfig) -> BagPlan:
        fixed = next((one for one in self.fixed if feature.table in one.tables), None)
        row_map = None if fixed is None else self._row_map(fixed, [feature])
        storage = fixed or next(one for one in self.dynamic if feature.table in one.tables)
        table, place = self.tables[feature.table], self.places[feature.name]
        return BagPlan(storage, feature, table, row_map, self.violations, place)

    def _row_map(
        self, storage: Storage, features: Sequence[FeatureConfig], columns: Sequence[int] | None = None
    ) -> RowMap:
        return RowMap(*self._tables(storage, features), columns)

    def _tables(
        self, storage: Storage, features: Sequence[FeatureConfig]
    ) -> tuple[list[str], list[TableConfig], list[int], int, Violations, torch.device]:
        """Return what a map of features' keys to rows is made of."""
        tables = [storage.tables[feature.table] for feature in features]
        bases = [storage.key_bases[table.name] for table in tables]
        return [f.name for f in features], tables, bases, storage.key_null, self.violations, self.device
