"""Counts of positives and negatives by score: the ROC curve and the precision-recall curve of a report."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from viviane.core.errors import NumericsError
from viviane.metrics.given import flat_rows
from viviane.metrics.registry import Processes

_EDGE: Final = 16.0  # logits beyond it share the outermost bins
_MOST_POINTS: Final = 200


class ScoreCurve:
    """Rows in bins of equal width of the logit ln(p / (1 - p)), so that rare labels are resolved as well as others.

    Example:
        >>> curve = ScoreCurve()
        >>> curve.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        >>> found = curve.compute()
        >>> found["positives"], found["rows"], found["roc"]
        (2.0, 4, [[0.0, 0.0], [0.0, 0.5], [0.5, 0.5], [0.5, 1.0], [1.0, 1.0]])
    """

    def __init__(self, num_bins: int = 2048) -> None:
        self._sums = torch.zeros(2, num_bins, dtype=torch.float64)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add a batch of probabilities (B,) and labels (B,)."""
        p, y, _ = flat_rows(predictions, labels)
        p, y = p.double(), y.double()
        if not bool(torch.isfinite(p).all()):
            raise NumericsError("a prediction is not finite", where=type(self).__name__)
        num_bins = self._sums.shape[1]
        place = ((torch.logit(p, eps=1e-9) + _EDGE) / (2 * _EDGE) * num_bins).long().clamp(0, num_bins - 1)
        sums = torch.zeros(2, num_bins, dtype=torch.float64, device=p.device)
        self._sums = self._sums.to(p.device) + sums.index_add_(1, place, torch.stack([y, torch.ones_like(y)]))

    def join(self, processes: Processes) -> None:
        """Add the rows of all processes."""
        self._sums = processes.all_reduce(self._sums.cpu())

    def compute(self) -> dict[str, Any]:
        """Return "positives", "rows", "roc" and "pr"; a curve is empty where one of the two classes has no row.

        "roc" has points [share of the negatives above a threshold, share of the positives above it]; "pr" has points
        [recall, precision]. Both begin at the highest scores.
        """
        sums = self._sums.cpu()
        kept = sums[:, sums[1] > 0].flip(1).cumsum(1)  # from the highest score down
        positives, rows = (float(one[-1]) if kept.shape[1] else 0.0 for one in kept)
        found: dict[str, Any] = {"positives": positives, "rows": round(rows), "roc": [], "pr": []}
        if positives <= 0 or rows - positives <= 0:
            return found
        recall, precision = kept[0] / positives, kept[0] / kept[1]
        false_share = (kept[1] - kept[0]) / (rows - positives)
        found["roc"] = [[0.0, 0.0], *_thinned(false_share, recall)]
        found["pr"] = _thinned(recall, precision)
        return found


def _thinned(x: Tensor, y: Tensor) -> list[list[float]]:
    """Return at most `_MOST_POINTS` points, evenly along the curve, with its ends."""
    way = torch.cat([torch.zeros(1, dtype=x.dtype), (x.diff().abs() + y.diff().abs()).cumsum(0)])
    wanted = torch.linspace(0.0, float(way[-1]), _MOST_POINTS, dtype=way.dtype)
    last = len(way) - 1
    kept = sorted({0, last, *torch.searchsorted(way, wanted).clamp_(max=last).tolist()})
    return [[round(a, 6), round(b, 6)] for a, b in zip(x[kept].tolist(), y[kept].tolist(), strict=True)]
