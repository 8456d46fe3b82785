"""The layout of batches with static shapes: id columns, exchanged blocks and lookups by storage.

Shapes: n ranks, B rows of every local batch, G = n B, C_r ids of a row that rank r looks up, W_r columns of its
vectors, W columns of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from viviane.embedding import EmbeddingCollection, Storage
from viviane.ops.wire_blocks import Columns, PooledPiece, Segment, Segments, Source
from viviane.parallel.feature_shards import FeatureShard
from viviane.parallel.group import Group


@dataclass(frozen=True)
class RowLocation:
    """Location of a feature shard's rows in the collection that holds them: storage, first row, zero row."""

    storage: int
    base: int
    null_row: int


@dataclass(frozen=True)
class StoragePart:
    """The lookups of a batch in one storage of this rank.

    Args:
        storage: the storage.
        first, stop: its columns among all id columns of this rank.
        pieces: id columns, from 0, and output column of each feature shard.
        targets: for each id column, the column of its vector; equal for the columns of one feature shard.
        owners: for each id column, its feature.
        tables: names of the tables that are looked up.
    """

    storage: Storage
    first: int
    stop: int
    pieces: tuple[PooledPiece, ...]
    targets: tuple[int, ...]
    owners: tuple[str, ...]
    tables: frozenset[str]

    @property
    def is_single(self) -> bool:
        """Whether every feature shard has one id in each row."""
        return len(self.pieces) == len(self.targets)


@dataclass(frozen=True)
class StaticLayout:
    """The layout of one kind of batch.

    Args:
        counts: C_r of every rank, then of every local storage.
        widths: W_r of every rank.
        columns: how rows of whole tables are packed into blocks of ids.
        parts: for every rank, the number of id columns of each of its storages.
        segments: how blocks of vectors are assembled into the output.
        owners: for each segment, its feature.
        own: lookups in the storages of this rank's shards.
        direct: the same, with vectors written directly into the output of the rank that needs them.
        local: lookups in the storages of replicated tables, written directly into the output.
        dtype: of ids in transit.
    """

    counts: tuple[int, ...]
    widths: tuple[int, ...]
    columns: Columns
    parts: tuple[tuple[int, ...], ...]
    segments: Segments
    owners: tuple[str, ...]
    own: tuple[StoragePart, ...]
    direct: tuple[StoragePart, ...]
    local: tuple[StoragePart, ...]
    dtype: torch.dtype


def row_locations(pieces: Sequence[FeatureShard], part: EmbeddingCollection | None) -> list[RowLocation]:
    """Return the location of the rows of each feature shard of a rank."""
    found = []
    for piece in pieces:
        assert part is not None
        for i, storage in enumerate(part.fixed_storages()):
            if piece.shard.table in storage.bases:
                found.append(RowLocation(i, storage.bases[piece.shard.table], storage.null_row))
    return found


def lay_out(
    group: Group,
    pieces: Sequence[FeatureShard],
    ids: Mapping[str, range],
    size: int,
    own: EmbeddingCollection | None,
    replicas: EmbeddingCollection | None,
    device: torch.device,
) -> StaticLayout:
    """Compute the layout of one kind of batch. Collective.

    Args:
        pieces: the feature shards of all features.
        ids: for each feature, its columns in the matrix of rows of whole tables.
        size: B.
        own, replicas: the collections of this rank.
    """
    by_rank = [[p for p in pieces if p.shard.rank == rank] for rank in range(group.size)]
    here = [p for p in pieces if p.shard.rank is None]
    gathered = group.gather_data([[h.storage, h.base, h.null_row] for h in row_locations(by_rank[group.rank], own)])
    where = [[RowLocation(*one) for one in every] for every in gathered]
    local_places = row_locations(here, replicas)
    lines: list[list[int]] = []
    counts: list[int] = []
    mine: tuple[StoragePart, ...] = ()
    direct: tuple[StoragePart, ...] = ()
    lengths: list[tuple[int, ...]] = []
    for rank in range(group.size):
        parts = _block(lines, size * sum(counts), by_rank[rank], where[rank], ids)
        counts.append(parts[-1][2] if parts else 0)
        lengths.append(tuple(stop - first for _, first, stop in parts))
        if rank == group.rank and own is not None:
            inputs, places = by_rank[rank], where[rank]
            mine = tuple(_part(own, inputs, places, one, ids, _starts(inputs)) for one in parts)
            direct = tuple(_part(own, inputs, places, one, ids, [piece.column for piece in inputs]) for one in parts)
    local = []
    for number in sorted({one.storage for one in local_places}):
        chosen = [i for i, one in enumerate(local_places) if one.storage == number]
        some, homes_of = [here[i] for i in chosen], [local_places[i] for i in chosen]
        parts = _block(lines, size * sum(counts), some, homes_of, ids)
        counts.append(parts[-1][2])
        assert replicas is not None
        local.append(_part(replicas, some, homes_of, parts[0], ids, [piece.column for piece in some]))
    widths = [sum(piece.shard.dim for piece in one) for one in by_rank]
    items, owners = _segments(by_rank, widths, size, {piece.column for piece in here})
    biggest = max([one.null_row for every in [*where, local_places] for one in every], default=0)
    return StaticLayout(
        tuple(counts), tuple(widths), Columns(lines, device), tuple(lengths), Segments(items, device), owners, mine,
        direct, tuple(local), torch.int32 if biggest + 2 < 2**31 else torch.int64,
    )  # fmt: skip


def _starts(pieces: Sequence[FeatureShard]) -> list[int]:
    """Return the first column of each feature shard's vector among those of its rank."""
    found, start = [], 0
    for piece in pieces:
        found.append(start)
        start += piece.shard.dim
    return found


def _columns_of(piece: FeatureShard, ids: Mapping[str, range]) -> list[int | None]:
    """Return the id columns of a feature shard; None: a position of a "concat" that is always empty."""
    span = ids[piece.feature.name]
    if not piece.is_single:
        return list(span)
    return [span[piece.place] if piece.place < len(span) else None]


def _block(
    lines: list[list[int]],
    start: int,
    pieces: Sequence[FeatureShard],
    places: Sequence[RowLocation],
    ids: Mapping[str, range],
) -> list[tuple[int, int, int]]:
    """Append the columns of one block, by storage; return each storage's index, first column and end."""
    order = sorted(range(len(pieces)), key=lambda i: places[i].storage)
    width = sum(len(_columns_of(piece, ids)) for piece in pieces)
    parts: list[tuple[int, int, int]] = []
    at = 0
    for i in order:
        piece, location = pieces[i], places[i]
        first, shard = at, piece.shard
        for column in _columns_of(piece, ids):
            high = 0 if column is None else shard.high
            low = 0 if column is None else shard.low
            lines.append(
                [
                    column or 0,
                    start + at,
                    width,
                    low,
                    high,
                    shard.stride,
                    shard.offset,
                    location.base,
                    location.null_row,
                ]
            )
            at += 1
        if parts and parts[-1][0] == location.storage:
            parts[-1] = (location.storage, parts[-1][1], at)
        else:
            parts.append((location.storage, first, at))
    return parts


def _part(
    collection: EmbeddingCollection,
    pieces: Sequence[FeatureShard],
    places: Sequence[RowLocation],
    part: tuple[int, int, int],
    ids: Mapping[str, range],
    starts: Sequence[int],
) -> StoragePart:
    number, first, stop = part
    found: list[PooledPiece] = []
    targets: list[int] = []
    owners: list[str] = []
    for i, piece in enumerate(pieces):
        if places[i].storage != number:
            continue
        count = len(_columns_of(piece, ids))
        found.append(PooledPiece(len(targets), count, starts[i]))
        targets += [starts[i]] * count
        owners += [piece.feature.name] * count
    storage = collection.fixed_storages()[number]
    tables = frozenset(p.shard.table for p, location in zip(pieces, places, strict=True) if location.storage == number)
    return StoragePart(storage, first, stop, tuple(found), tuple(targets), tuple(owners), tables)


def _segments(
    by_rank: Sequence[Sequence[FeatureShard]], widths: Sequence[int], size: int, filled: set[int]
) -> tuple[list[Segment], tuple[str, ...]]:
    """Return the segments of the output that other ranks send, and their features."""
    sources: dict[tuple[int, int, str], list[Source]] = {}
    block = 0
    for pieces, width in zip(by_rank, widths, strict=True):
        for piece, start in zip(pieces, _starts(pieces), strict=True):
            key = (piece.column, piece.shard.dim, piece.feature.name)
            sources.setdefault(key, []).append(Source(block + start, width))
        block += size * width
    items = [Segment(at, dim, tuple(own), at in filled) for (at, dim, _), own in sources.items()]
    return items, tuple(name for _, _, name in sources)
