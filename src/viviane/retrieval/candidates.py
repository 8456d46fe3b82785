"""Candidates for users, and the interface of their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError, MachineError
from viviane.core.machine import free_memory
from viviane.retrieval.histories import Histories, Ids
from viviane.schema import RESERVED

NO_ITEM = -1
_CELL_BYTES: Final = 48  # of an item in a list: an id of 8 bytes and a score of 4, in four copies
_SMALL_BYTES: Final = 256 << 20  # up to here the free memory is not read
_MOST_BYTES: Final = 1 << 46  # refused even where the free memory is unknown


@dataclass(frozen=True)
class Candidates:
    """Items for each row, best first.

    Args:
        items: (B, K), `NO_ITEM` if there are fewer.
        scores: (B, K), descending, minus infinity if there are fewer.
    """

    items: Ids
    scores: NDArray[np.float32]

    def first(self, count: int) -> Candidates:
        """Return the best candidates, (B, count), padded if there are fewer.

        Example:
            >>> Candidates(np.array([[5, 3]]), np.array([[2.0, 1.0]], dtype=np.float32)).first(3).items.tolist()
            [[5, 3, -1]]
        """
        missing = max(0, count - self.items.shape[1])
        items = np.pad(self.items[:, :count], ((0, 0), (0, missing)), constant_values=NO_ITEM)
        scores = np.pad(self.scores[:, :count], ((0, 0), (0, missing)), constant_values=-np.inf)
        return Candidates(items, scores)


def check_count(count: object, what: str, *, rows: int = 1, where: str = "k") -> None:
    """Refuse a number of items that is no whole number of at least 1, or whose lists do not fit into memory.

    Args:
        count: items of a list.
        what: the items, for the message.
        rows: lists.
        where: name of the argument, for the message.

    Raises:
        ConfigError: it is no whole number of at least 1.
        MachineError: `rows` lists of so many items need more than the free memory.
    """
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"the number of {what} must be positive", where=where, value=count)
    check_fits(int(count) * rows * _CELL_BYTES, f"{rows:,} lists of {count:,} {what}")


def check_catalogue(num_items: object) -> None:
    """Refuse a number of ids whose counts do not fit into memory, or that leaves none for items.

    Raises:
        ConfigError: it is no whole number above the reserved ids.
        MachineError: the counts need more than the free memory.
    """
    is_whole = isinstance(num_items, int | np.integer) and not isinstance(num_items, bool)
    if not is_whole or num_items <= RESERVED.first:  # type: ignore[operator]
        raise ConfigError("the catalogue has no items", value=num_items, allowed=f"more than {RESERVED.first} ids")
    check_fits(int(num_items) * _CELL_BYTES, f"a catalogue of {num_items:,} items")  # type: ignore[call-overload]


def check_fits(num_bytes: int, what: str) -> None:
    """Refuse what needs more than the free memory; the system may end a process that takes it nevertheless.

    Raises:
        MachineError: with the bytes that are free.
    """
    free = free_memory() if num_bytes > _SMALL_BYTES else None
    if num_bytes > _MOST_BYTES or (free is not None and num_bytes > free):
        raise MachineError(
            "out of memory", where=what, value=f"{num_bytes:,} bytes are needed",
            allowed=f"{_MOST_BYTES if free is None else free:,} bytes",
            fix="ask for fewer items, or for fewer rows at once",
        )  # fmt: skip


class CandidateSource(Protocol):
    """Finds candidates: nearest neighbours of a user's vector, co-purchased items, popular items."""

    name: str
    """Prefix of the names of its features: "<name>_score", "<name>_rank"."""
    num_items: int
    """N; item ids are below it."""

    def candidates(self, histories: Histories, k: int, rows: Any = None) -> Candidates:
        """Return the best k items for each row, without those of its history.

        Args:
            histories: histories of the users.
            k: number of candidates.
            rows: more columns of the same rows, by name, for sources that read them.
        """
        ...

    def score(self, histories: Histories, items: Ids, rows: Any = None) -> NDArray[np.float32]:
        """Return this source's scores of given items, (B, K), by which `candidates` ranks; 0 for `NO_ITEM`."""
        ...


def best_of_scores(scores: Tensor, k: int, seen: Histories | None, *, first_item: int = RESERVED.first) -> Candidates:
    """Return the best k of dense scores (B, N), which are modified; minus infinity excludes an item.

    Equal scores are ordered by ascending id, so that results do not depend on the device or the library.

    Example:
        >>> best_of_scores(torch.tensor([[9.0, 9.0, 9.0, 1.0, 2.0, 2.0]]), 2, Histories.of([[4]])).items.tolist()
        [[5, 3]]
    """
    if k < 1:
        raise ConfigError("the number of candidates must be positive", where="k", value=k)
    scores[:, :first_item] = -torch.inf
    if seen is not None:
        known = (seen.values >= first_item) & (seen.values < scores.shape[1])
        at = (torch.from_numpy(one[known]).to(scores.device) for one in (seen.row_of, seen.values))
        scores[tuple(at)] = -torch.inf
    count = min(k, scores.shape[1])
    values, items = scores.topk(count, 1)
    return in_order(items.cpu().numpy(), values.float().cpu().numpy()).first(k)


def in_order(items: Ids, scores: NDArray[np.float32]) -> Candidates:
    """Sort candidates by descending score, then ascending id; scores of minus infinity become `NO_ITEM`."""
    order = np.lexsort((items, -scores), axis=1)
    items, scores = np.take_along_axis(items, order, 1), np.take_along_axis(scores, order, 1)
    none = np.isneginf(scores) | (items < 0)
    return Candidates(np.where(none, NO_ITEM, items), np.where(none, -np.inf, scores).astype(np.float32))


def drop_seen(found: Candidates, seen: Histories) -> Candidates:
    """Return candidates without seen items and duplicates, in the same order.

    Example:
        >>> made = Candidates(np.array([[5, 3, 5]]), np.array([[2.0, 1.0, 0.5]], dtype=np.float32))
        >>> drop_seen(made, Histories.of([[3]])).items.tolist()
        [[5, -1, -1]]
    """
    place, known = np.unique(found.items, return_inverse=True)  # ids may be of any size, and their products overflow
    among = np.searchsorted(place, seen.values).clip(0, max(0, len(place) - 1))
    is_found = place[among] == seen.values if len(place) else np.zeros(len(among), dtype=bool)
    keys = np.arange(len(found.items))[:, None] * len(place) + known.reshape(found.items.shape)
    out = np.isin(keys, (seen.row_of * len(place) + among)[is_found]) | (found.items < 0)
    _, first = np.unique(keys, return_index=True)
    repeated = np.ones(keys.size, dtype=bool)
    repeated[first] = False
    out |= repeated.reshape(keys.shape)
    order = np.argsort(out, axis=1, kind="stable")
    items = np.take_along_axis(np.where(out, NO_ITEM, found.items), order, 1)
    scores = np.take_along_axis(np.where(out, -np.inf, found.scores), order, 1)
    return Candidates(items, scores.astype(np.float32))
