"""Ranking metrics: NDCG over all rows, and metrics that compare the rows of one group, such as a user or a query.

They store 8 bytes per row, and 8 more for its group (4 for weights), until they are computed. Groups may occur in any
order and span batches.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError, DataError, NumericsError
from viviane.core.logging import get_logger
from viviane.core.whole_numbers import whole_numbers
from viviane.metrics.auc import Doubles, Floats, check_finite, joined_weights, ordered_bits
from viviane.metrics.given import columns, flat, flat_rows
from viviane.metrics.group_rows import exchange_groups
from viviane.metrics.order import Groups, are_binary, in_order, places_in, starts_of
from viviane.metrics.registry import GROUPED, METRICS, Metric, Processes

_log = get_logger("metrics")


def _ids(groups: Any, count: int) -> Tensor:
    found = flat(groups, "groups")
    if len(found) != count:
        raise DataError("predictions and groups differ in number", value=f"{count} and {len(found)}")
    if found.is_floating_point() and not bool((found == found.floor()).all()):  # NaN is no group either
        raise DataError("groups must be whole numbers", value=found[found != found.floor()][0].item())
    return found.long().clone()


class StoredRows(Metric):
    """Stores scores, labels, weights and groups."""

    def __init__(self, k: int | None = None) -> None:
        if k is not None and (not isinstance(k, int | np.integer) or isinstance(k, bool) or not 0 < k < 2**63):
            raise ConfigError("not a number of rows", where=f"{type(self).__name__}, k", value=k,
                              allowed="None, or a whole number from 1")  # fmt: skip
        self.k = None if k is None else int(k)
        self.reset()

    def reset(self) -> None:
        """Discard all rows."""
        self._parts: list[tuple[Tensor, ...]] = []
        self._joined: tuple[float, float] | None = None

    def update(
        self, predictions: Tensor, labels: Tensor, weight: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add a batch: predictions (B,), labels (B,), weights (B,) or None, and the group of each row, (B,) ids."""
        p, y, w = flat_rows(predictions, labels, weight)
        if groups is None and self.by_group:
            raise ConfigError(
                "the metric needs the group of each row",
                where=type(self).__name__,
                fix="pass groups= to update; in training, name the column, as in 'gauc:user'",
            )
        ids = torch.zeros(0, dtype=torch.int64) if groups is None else _ids(groups, len(p))
        weights = torch.zeros(0) if w is None else w.float().clone()
        self._parts.append((p.float().clone(), y.float().clone(), weights, ids))

    def join(self, processes: Processes) -> None:
        """Redistribute complete groups over the processes, and sum over the groups of all processes.

        Rows are sent to the process that the hash of their group selects. Without groups there is one list of all rows,
        which every process gathers.
        """
        p, y, w, ids = self._columns()
        weighted, count = (max(one) for one in zip(*processes.gather_numbers([int(len(w) > 0), len(p)]), strict=True))
        if weighted and not len(w):
            w = np.ones(len(p), np.float32)
        if not self.by_group:
            _log.info("%s: every process gathers all rows, about %d each", type(self).__name__, count)
            y_all, p_all = (torch.cat(processes.gather(torch.from_numpy(one))) for one in (y, p))
            w_all = torch.cat(processes.gather(torch.from_numpy(w)))
            self._parts = [(p_all, y_all, w_all, torch.zeros(0, dtype=torch.int64))]
            return
        kept = exchange_groups(processes, ids, [p, y, w] if weighted else [p, y])
        bad = [rank for rank, one in enumerate(processes.gather_numbers([int(np.isfinite(p).all())])) if not one[0]]
        if bad:
            raise NumericsError("a prediction is not finite", where=f"rows of rank {bad[0]}")
        groups, (p, y, *rest) = kept
        own = self.sums(groups, p, y, rest[0] if weighted else None) if len(p) else (0.0, 0.0)
        every = torch.cat(processes.gather(torch.tensor(own, dtype=torch.float64))).view(-1, 2).sum(0)
        self._joined = float(every[0]), float(every[1])

    def _columns(self) -> tuple[Floats, Floats, Floats, Groups]:
        """Return scores, labels, weights and groups of all rows; the last two may be empty."""
        parts = self._parts or [(torch.zeros(0),) * 3 + (torch.zeros(0, dtype=torch.int64),)]
        scores, labels, weights, groups = zip(*parts, strict=True)
        own = joined_weights(
            scores, [w if len(w) or not len(p) else None for p, w in zip(scores, weights, strict=True)]
        )
        p, y, ids = (torch.cat(columns).cpu().numpy() for columns in (scores, labels, groups))
        return p, y, np.empty(0, np.float32) if own is None else own.cpu().numpy(), ids

    def compute(self) -> float:
        """Return the mean over groups."""
        if self._joined is None:
            p, y, w, ids = self._columns()
            if not len(p):
                return math.nan
            check_finite(p)
            total, weight = self.sums(ids if len(ids) else np.zeros(len(p), np.int64), p, y, w if len(w) else None)
        else:
            total, weight = self._joined
        return total / weight if weight else math.nan

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the weighted sum of the groups' metrics, and the sum of their weights."""
        raise TypeError(f"{type(self).__name__} does not define sums")


def ndcg(groups: Groups, scores: Floats, labels: Floats, k: int | None = None) -> float:
    """Mean over groups of DCG / ideal DCG, with linear gains; rows of equal score share their discounts equally.

        DCG = sum over rank r = 1 ... k of label_r / log2(r + 1)

    Groups whose labels are all 0 have no ideal DCG and are ignored.

    Args:
        groups: (n,) ids. scores: (n,). labels: (n,), 0 or more. k: number of ranks that count; None: all.

    Returns:
        A value from 0 to 1, NaN if no group has a label above 0.

    Example:
        >>> ndcg(np.zeros(2, np.int64), np.float32([0.9, 0.1]), np.float32([1, 0]))
        1.0
    """
    groups, scores, labels = columns(groups=whole_numbers(groups, np.int64, "groups"), scores=scores, labels=labels)
    total, count = _ndcg_sums(groups, scores, labels, k)
    return total / count if count else math.nan


def _ndcg_sums(groups: Groups, scores: Floats, labels: Floats, k: int | None) -> tuple[float, float]:
    """Return the sum over groups with an ideal DCG, and their number."""
    group, key, label = in_order(groups, scores, labels, best_first=True)
    starts = starts_of(group)
    dcg = _dcg(group, key, label, starts, k)
    if are_binary(label):  # the ideal list has all positive rows first
        positives = np.add.reduceat(label, starts).astype(np.int64)
        summed = np.append(0.0, np.cumsum(1.0 / np.log2(np.arange(positives.max()) + 2.0)))
        ideal = summed[positives if k is None else np.minimum(positives, k)]
    else:
        group, key, label = in_order(groups, labels, labels, best_first=True)
        ideal = _dcg(group, key, label, starts, k)
    has = ideal > 0
    return float((dcg[has] / ideal[has]).sum()), float(has.sum())


def _dcg(group: Groups, key: Groups, label: Doubles, starts: NDArray[np.intp], k: int | None) -> Doubles:
    """Return the DCG of each group of sorted rows."""
    places = places_in(starts, len(group))
    discount = 1.0 / np.log2(places + 2.0)
    if k is not None:
        discount[places >= k] = 0.0
    ties = starts_of(group, key)
    lengths = np.diff(np.append(ties, len(group)))
    shared = np.add.reduceat(label, ties) / lengths * np.add.reduceat(discount, ties)
    return np.asarray(np.add.reduceat(shared, np.searchsorted(ties, starts)), dtype=np.float64)


@METRICS.register("ndcg")
class Ndcg(StoredRows):
    """NDCG of all rows as one list, as in HugeCTR (see `ndcg`). Sample weights are ignored.

    "ndcg@10:user" is the usual NDCG: the mean over users of the NDCG of their ten best rows.

    Example:
        >>> metric = Ndcg()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.0, 1.0, 0.0]))
        >>> round(metric.compute(), 4)  # 1 / log2(3)
        0.6309
    """

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the sum of NDCGs, and the number of groups."""
        return _ndcg_sums(groups, scores, labels, self.k)


@GROUPED.register("ndcg")
class GroupNdcg(Ndcg):
    """Mean over groups of NDCG@k (see `ndcg`): "ndcg@10:user", or "ndcg:user" for complete lists.

    Source: Jarvelin and Kekalainen 2002.
    """

    by_group: ClassVar[bool] = True


class _FirstPositive(StoredRows):
    by_group: ClassVar[bool] = True

    def first_places(self, groups: Groups, scores: Floats, labels: Floats) -> NDArray[np.int64]:
        """Return the rank, from 0, of the best positive row of each group that has one.

        Among equal scores negative rows rank first, so that constant scores gain nothing.
        """
        group, _, label = in_order(groups, scores, (labels >= 0.5).astype(np.float32), best_first=True)
        hit = label > 0
        places = places_in(starts_of(group), len(group))[hit]
        return places[starts_of(group[hit])] if len(places) else places


@GROUPED.register("hit_rate")
class GroupHitRate(_FirstPositive):
    """Fraction of groups with a positive row among their k best, of those that have one: "hit_rate@10:user".

    Among equal scores negative rows rank first. Sample weights are ignored.

    Example:
        >>> metric = GroupHitRate(k=1)
        >>> metric.update(torch.tensor([0.9, 0.1, 0.3]), torch.tensor([0.0, 1.0, 1.0]), groups=torch.tensor([7, 7, 8]))
        >>> metric.compute()
        0.5
    """

    def __init__(self, k: int | None = None) -> None:
        if k is None:
            raise ConfigError("a hit rate by group needs a number of rows", fix="add one, as in 'hit_rate@10:user'")
        super().__init__(k)

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the number of groups with a hit, and of groups."""
        assert self.k is not None
        places = self.first_places(groups, scores, labels)
        return float((places < self.k).sum()), float(len(places))


@METRICS.register("mrr")
@GROUPED.register("mrr")
class Mrr(_FirstPositive):
    """Mean reciprocal rank: mean over groups with a positive row of 1 / rank of the best one, "mrr:user".

    "mrr@10:user" counts ranks beyond 10 as 0. Among equal scores negative rows rank first. Sample weights are
    ignored.

    Source: Voorhees 1999.

    Example:
        >>> metric = Mrr()
        >>> metric.update(torch.tensor([0.9, 0.1, 0.3]), torch.tensor([0.0, 1.0, 1.0]), groups=torch.tensor([7, 7, 8]))
        >>> metric.compute()
        0.75
    """

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the sum of reciprocal ranks, and the number of groups."""
        places = self.first_places(groups, scores, labels)
        reciprocal = 1.0 / (places + 1.0)
        return float(np.where(places < (self.k or len(groups)), reciprocal, 0.0).sum()), float(len(places))


@METRICS.register("gauc")
@GROUPED.register("gauc")
class Gauc(StoredRows):
    """AUC within each group, averaged with the groups' weights: "gauc:user".

        GAUC = sum_g n_g AUC_g / sum_g n_g        n_g the rows (or their sample weight) of group g

    over the groups that have both labels; ties count one half, as in `roc_auc`.

    Source: Zhu et al. 2017; Zhou et al. 2018 (Deep Interest Network).

    Example:
        >>> metric = Gauc()
        >>> scores, labels = torch.tensor([0.2, 0.1, 0.9, 0.8]), torch.tensor([1.0, 0.0, 0.0, 1.0])
        >>> metric.update(scores, labels, groups=torch.tensor([1, 1, 2, 2]))
        >>> metric.compute()
        0.5
    """

    by_group: ClassVar[bool] = True

    def __init__(self, k: int | None = None) -> None:
        if k is not None:
            raise ConfigError("gauc uses complete groups", value=f"gauc@{k}", fix="remove the number: 'gauc:user'")
        super().__init__()

    def sums(self, groups: Groups, scores: Floats, labels: Floats, weights: Floats | None) -> tuple[float, float]:
        """Return the sum of AUCs times their groups' weights, and of those weights."""
        if weights is None:
            group, key, positive = in_order(groups, scores, labels, best_first=False)
            weight = np.ones_like(positive)
        else:
            key = ordered_bits(scores)
            order = np.lexsort((key, groups))
            group, key, weight = groups[order], key[order], weights[order].astype(np.float64)
            positive = weight * labels[order]
        ties, starts = starts_of(group, key), starts_of(group)
        first_tie = np.searchsorted(ties, starts)
        p, n = np.add.reduceat(positive, ties), np.add.reduceat(weight - positive, ties)
        negatives = np.add.reduceat(n, first_tie)
        above_other_groups = np.repeat(np.cumsum(negatives) - negatives, np.diff(np.append(first_tie, len(ties))))
        below = np.cumsum(n) - n - above_other_groups
        won = np.add.reduceat(p * (below + n / 2), first_tie)
        positives, size = np.add.reduceat(p, first_tie), np.add.reduceat(weight, starts)
        both = (positives > 0) & (negatives > 0)
        auc = won[both] / (positives[both] * negatives[both])
        return float((auc * size[both]).sum()), float(size[both].sum())
