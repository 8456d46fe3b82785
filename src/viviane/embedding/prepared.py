"""The part of an update that needs no gradients, computed in parallel with forward and backward.

Shapes: B rows of the batch, W columns of the output, N entries of all parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from viviane.embedding.table_storage import StorageLookup, join_weights
from viviane.ops.embedding_bag import entry_sources
from viviane.ops.row_update import Entries


@dataclass(frozen=True)
class Prepared:
    """The lookups of one storage as one list of entries.

    Args:
        parts: the lookups.
        rows: of all of them, (N,).
        sources: (N,), the positions of their gradients if its rows begin `apart` from one another; None before they are
            placed, and where there is one part without bags, whose sources are kept from batch to batch.
        weights: (N,), or None for ones.
        size: B.
        width: W.
        apart: W, or more where the gradient is columns of a wider one.
    """

    parts: tuple[StorageLookup, ...]
    rows: Tensor
    sources: Tensor | None
    weights: Tensor | None
    size: int
    width: int
    apart: int

    def placed(self) -> Prepared:
        """Return what has the sources, too."""
        if len(self.parts) == 1 and self.parts[0].offsets is None:
            return self
        return replace(self, sources=_sources(self.parts, len(self.rows), self.size, self.apart))

    def at(self, apart: int) -> Prepared:
        """Return what holds for a gradient whose rows begin this far from one another."""
        if self.sources is None or self.apart == apart or self.size <= 1:
            return self
        return replace(self, sources=_sources(self.parts, len(self.rows), self.size, apart), apart=apart)

    def sources_of(self, part: StorageLookup) -> Tensor | None:
        """Return the sources of a part; None where it is not one of these."""
        start = 0
        for own in self.parts:
            stop = start + own.rows.numel()
            if own is part:
                return None if self.sources is None else self.sources[start:stop]
            start = stop
        return None

    def join(self, waiting: Sequence[Entries]) -> Entries | None:
        """Return the entries of all parts, where these are what waits, in this order, with one gradient."""
        start = 0
        if len(waiting) != len(self.parts) or self.sources is None:
            return None
        for one, part in zip(waiting, self.parts, strict=True):
            own = self.sources[start : start + part.rows.numel()]
            is_one = one.gradients is waiting[0].gradients
            if not is_one or not is_same_list(one.rows, part.rows) or not is_same_list(one.sources, own):
                return None
            start += len(own)
        aligned = min(one.aligned for one in waiting)
        return Entries(self.rows, waiting[0].gradients, self.sources, self.weights, aligned)


def prepare_entries(parts: Sequence[StorageLookup], size: int, width: int, apart: int) -> Prepared:
    """Join lookups, without their sources; arguments as of `Prepared`."""
    rows = [part.rows.reshape(-1) for part in parts]
    weights = join_weights([part.weights for part in parts], rows)
    return Prepared(tuple(parts), _join_rows(rows), None, weights, size, width, apart)


def _join_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return lists of rows as one, without a copy where they follow one another already."""
    first, end = rows[0], rows[0].data_ptr()
    for one in rows:
        if one.data_ptr() != end or one.dtype != first.dtype or not one.is_contiguous() or not _share(one, first):
            return torch.cat(list(rows))
        end += one.nbytes
    return first.as_strided((sum(map(len, rows)),), (1,))


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def sources_type(size: int, apart: int) -> torch.dtype:
    """Return the type of places in a gradient of `size` rows that begin `apart` from one another.

    Example:
        >>> sources_type(2**20, 2**10), sources_type(2**20, 2**11)
        (torch.int32, torch.int64)
    """
    return torch.int32 if size * apart < 2**31 else torch.int64


def _sources(parts: Sequence[StorageLookup], count: int, size: int, apart: int) -> Tensor:
    # Zeros: wrong offsets, which are reported later, leave some unwritten, and the update reads by them.
    sources = torch.zeros(count, dtype=sources_type(size, apart), device=parts[0].rows.device)
    start = 0
    for part in parts:
        stop = start + part.rows.numel()
        entry_sources(part.offsets, part.columns, size, apart, sources[start:stop])
        start = stop
    return sources


def is_same_list(one: Tensor | None, other: Tensor) -> bool:
    """Whether two lists are one in memory, which both keep."""
    return one is not None and one.data_ptr() == other.data_ptr() and one.numel() == other.numel()
