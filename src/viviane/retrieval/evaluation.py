"""Metrics of rankings over a complete catalogue, without the items that a user has seen.

For row b with wanted items W_b, usually one, r_w is the rank, from 0, of w among all items that the user
has not seen; equal scores count half, so that the order of items does not matter.

    HR@k       fraction of rows with some r_w < k
    recall@k   mean over rows of |{w: r_w < k}| / |W_b|
    NDCG@k     mean over rows of DCG / IDCG,  DCG = sum over r_w < k of 1 / log2(r_w + 2),
               IDCG = sum over i < min(k, |W_b|) of 1 / log2(i + 2)
    MRR        mean over rows of 1 / (1 + min r_w)
    coverage@k fraction of the catalogue's items that are among the first k of some row

With one wanted item recall@k is HR@k. Nothing is sampled: metrics over sampled candidates order models differently
(Krichene and Rendle 2020, "On Sampled Metrics for Item Recommendation").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError, NumericsError, SchemaError
from viviane.core.tensors import check_tensor, float_array
from viviane.core.whole_numbers import whole_numbers
from viviane.retrieval.histories import Histories, Ids
from viviane.schema import RESERVED

_MOST_SCORES = 1 << 25  # maximum scores per batch


class CatalogueMetrics:
    """Accumulates ranks over batches.

    Args:
        num_items: N, the ids from 0 to N - 1.
        k: list lengths.
        first_item: ids below it are reserved.

    Example:
        >>> metrics = CatalogueMetrics(6, k=[1, 2])
        >>> scores = torch.tensor([[0.0, 0.0, 0.0, 0.9, 0.8, 0.7]])
        >>> metrics.add_scores(scores, Histories.of([[4]]), seen=Histories.of([[3]]))
        >>> metrics.compute()["hr@1"], metrics.compute()["coverage@2"]
        (1.0, 0.6666666666666666)
    """

    def __init__(self, num_items: int, k: Sequence[int] = (10,), *, first_item: int = RESERVED.first) -> None:
        if not k or min(k) < 1:
            raise ConfigError("list lengths must be positive", where="k", value=list(k))
        if num_items <= first_item:
            raise ConfigError("the catalogue has no items", value=num_items, allowed=f"more than {first_item} ids")
        self.num_items = num_items
        self.first_item = first_item
        self.k = tuple(sorted(set(k)))
        self._ranks: list[NDArray[np.float64]] = []
        self._row_of: list[Ids] = []
        self._num_rows = 0
        self._covered = {one: np.zeros(num_items, dtype=bool) for one in self.k}

    def add_scores(self, scores: Tensor, wanted: Histories, seen: Histories | None = None) -> None:
        """Add a batch's scores of all items, (B, N); they are modified.

        Args:
            scores: scores on any device.
            wanted: the items to find.
            seen: items to exclude, except wanted ones.

        Raises:
            NumericsError: a score is NaN. SchemaError: a wanted item is not in the catalogue.
        """
        if scores.shape != (len(wanted), self.num_items):
            allowed = f"({len(wanted)}, {self.num_items})"
            raise SchemaError("there must be one score per row and item", value=tuple(scores.shape), allowed=allowed)
        row, item = self._checked(wanted)
        if bool(scores.isnan().any()):
            raise NumericsError("scores are NaN", where=f"rows {self._num_rows} to {self._num_rows + len(wanted)}")
        rows, items = (torch.from_numpy(one).to(scores.device) for one in (row, item))
        own = scores[rows, items].clone()
        scores[:, : self.first_item] = -torch.inf
        if seen is not None:
            known = (seen.values >= self.first_item) & (seen.values < self.num_items)
            at = (torch.from_numpy(one[known]).to(scores.device) for one in (seen.row_of, seen.values))
            scores[tuple(at)] = -torch.inf
            scores[rows, items] = own
        # -inf marks excluded items; an item with this score ranks after all candidates.
        ranks = torch.empty(len(rows), dtype=torch.float64, device=scores.device)
        step = max(1, _MOST_SCORES // self.num_items)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            others, mine = scores[rows[part]], own[part].unsqueeze(1)
            equal = (others == mine).sum(1) - 1
            ranks[part] = (others > mine).sum(1).double() + equal.double() / 2
        self._keep(row, ranks.cpu().numpy(), len(wanted))
        most = min(self.k[-1], self.num_items)
        best = scores.topk(most, 1)
        chosen = torch.where(best.values > -torch.inf, best.indices, -1).cpu().numpy()
        self._cover(chosen)

    def add_lists(self, lists: NDArray[np.integer], wanted: Histories) -> None:
        """Add recommended items, (B, K), best first, -1 for none; items beyond K count as not found.

        Raises:
            ConfigError: the lists are shorter than the largest k and the catalogue is not exhausted.
        """
        ids = whole_numbers(lists, np.int64, "recommended items")
        if ids.ndim != 2 or len(ids) != len(wanted):
            raise SchemaError("there must be one list per row", value=ids.shape, allowed=f"({len(wanted)}, K)")
        if ids.shape[1] < min(self.k[-1], self.num_items - self.first_item):
            raise ConfigError("the lists are shorter than k", value=ids.shape[1], allowed=f"at least {self.k[-1]}")
        row, item = self._checked(wanted)
        hit = ids[row] == item[:, None]
        ranks = np.where(hit.any(1), hit.argmax(1), np.inf).astype(np.float64)
        self._keep(row, ranks, len(wanted))
        self._cover(ids)

    def _checked(self, wanted: Histories) -> tuple[Ids, Ids]:
        row, item = wanted.row_of, wanted.values
        wrong = (item < self.first_item) | (item >= self.num_items)
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            allowed = f"{self.first_item} to {self.num_items - 1}"
            where = f"row {self._num_rows + int(row[place])}"
            raise SchemaError(
                "a wanted item is not in the catalogue", where=where, value=int(item[place]), allowed=allowed
            )
        if (wanted.lengths == 0).any():
            where = f"row {self._num_rows + int(np.flatnonzero(wanted.lengths == 0)[0])}"
            raise SchemaError("a row has no wanted item", where=where, fix="remove the row")
        return row, item

    def _keep(self, row: Ids, ranks: NDArray[np.float64], num_rows: int) -> None:
        self._ranks.append(ranks)
        self._row_of.append(row + self._num_rows)
        self._num_rows += num_rows

    def _cover(self, lists: Ids) -> None:
        for one in self.k:
            shown = lists[:, :one]
            self._covered[one][shown[shown >= 0]] = True

    def ranks(self) -> NDArray[np.float64]:
        """Return the rank of each wanted item, in the order of addition; infinite if it was in no list."""
        return np.concatenate(self._ranks) if self._ranks else np.empty(0)

    def compute(self) -> dict[str, float]:
        """Return the metrics by name, such as "hr@10", "recall@10", "ndcg@10", "mrr", "coverage@10".

        Raises:
            ConfigError: no rows were added.
        """
        if not self._num_rows:
            raise ConfigError("there are no rows to evaluate")
        ranks, row = self.ranks(), np.concatenate(self._row_of)
        counts = np.bincount(row, minlength=self._num_rows)
        best = np.full(self._num_rows, np.inf)
        np.minimum.at(best, row, ranks)
        found: dict[str, float] = {}
        for k in self.k:
            inside = ranks < k
            gains = np.bincount(row, np.where(inside, 1 / np.log2(np.where(inside, ranks, 0) + 2), 0), self._num_rows)
            gain = [1 / math.log2(i + 2) for i in range(k)]
            ideal = np.concatenate([[1.0], np.cumsum(gain)])[np.minimum(counts, k)]
            found[f"hr@{k}"] = float((best < k).mean())
            found[f"recall@{k}"] = float((np.bincount(row, inside, self._num_rows) / counts).mean())
            found[f"ndcg@{k}"] = float((gains / ideal).mean())
            found[f"coverage@{k}"] = float(self._covered[k].sum() / (self.num_items - self.first_item))
        found["mrr"] = float((1 / (1 + best)).mean())
        return found


def _vectors(values: Any, what: str, device: torch.device | str) -> Tensor:
    """Return vectors as float32 on a device, those of a GPU without a copy through the host."""
    if isinstance(values, Tensor):
        check_tensor(values, what, SchemaError)
        found = values.detach()
    else:
        found = torch.from_numpy(float_array(values, what, SchemaError))
    if found.dim() != 2 or not len(found):
        raise SchemaError(f"{what} must be a matrix", value=tuple(found.shape), allowed="(n, d), n from 1")
    return found.to(device=device, dtype=torch.float32)


def evaluate_vectors(
    users: NDArray[np.float32] | Tensor,
    items: NDArray[np.float32] | Tensor,
    wanted: Histories,
    *,
    seen: Histories | None = None,
    k: Sequence[int] = (10,),
    device: torch.device | str = "cpu",
    first_item: int = RESERVED.first,
) -> dict[str, float]:
    """Rank all items by u . v for each user, exactly, in batches of bounded memory.

    Args:
        users: (B, d).
        items: (N, d), row i belongs to item i.
        wanted: the items to find.
        seen: items that each user has seen, which are excluded.
        k: list lengths.
        device: device for the computation.
        first_item: ids below it are reserved.

    Example:
        >>> axes = np.eye(5, dtype=np.float32)
        >>> evaluate_vectors(axes[[4]], axes, Histories.of([[4]]), k=[1])["ndcg@1"]
        1.0
    """
    u, v = _vectors(users, "vectors of users", device), _vectors(items, "vectors of items", device)
    if u.shape[1] != v.shape[1] or len(u) != len(wanted):
        shapes = f"{tuple(u.shape)}, {tuple(v.shape)}, {len(wanted)}"
        raise SchemaError("users, items and wanted do not fit", value=shapes, allowed="(B, d), (N, d), B histories")
    metrics = CatalogueMetrics(len(v), k, first_item=first_item)
    step = max(1, _MOST_SCORES // len(v))
    for first in range(0, len(u), step):
        rows = slice(first, first + step)
        part = None if seen is None else seen.take(rows)
        metrics.add_scores(u[rows] @ v.T, wanted.take(rows), part)
    return metrics.compute()
