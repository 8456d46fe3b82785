"""Requests of one session that are predicted together, each with its own outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from viviane.core.errors import VivianeError
from viviane.serving.errors import RowProblem
from viviane.serving.session import InferenceSession, Scores


@dataclass(frozen=True)
class Prediction:
    """What became of one request.

    Args:
        scores: as `InferenceSession.predict` returns them; NaN in refused rows. None where there is an error.
        problems: the first problem of each refused row.
        error: the request could not be predicted at all.
    """

    scores: Scores | None
    problems: tuple[RowProblem, ...] = ()
    error: BaseException | None = None


def kind_of(rows: Any) -> Any:
    """Return what two requests have in common if their rows can be joined: columns and their types.

    Example:
        >>> kind_of({"item": np.array([3, 4])}) == kind_of({"item": np.array([5])})
        True
        >>> kind_of({"item": np.array([3, 4])}) == kind_of({"item": pa.array([3, None])})
        False
    """
    if isinstance(rows, list):
        return None
    return tuple((name, *_kind_of_column(values)) for name, values in rows.items())


def _kind_of_column(values: Any) -> tuple[Any, ...]:
    if isinstance(values, np.ndarray):
        return values.dtype, values.shape[1:]
    return (values.type,)


def predict_together(session: InferenceSession, requests: Sequence[tuple[Any, int]]) -> list[Prediction]:
    """Predict requests of one kind as one batch; one that cannot be predicted fails alone.

    Args:
        requests: rows (columns by name, or a list of dicts) and how many there are.
    """
    try:
        found = session.try_predict(_joined([rows for rows, _ in requests]))
    except (VivianeError, pa.ArrowException) as error:
        if len(requests) == 1:
            return [Prediction(None, (), error)]
        return [one for request in requests for one in predict_together(session, [request])]
    predictions, first = [], 0
    for _, count in requests:
        after = first + count
        problems = tuple(
            RowProblem(one.row - first, one.column, one.value, one.problem)
            for one in found.problems
            if first <= one.row < after
        )
        predictions.append(Prediction(_part(found.scores, first, after), problems))
        first = after
    return predictions


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    merged: dict[str, Any] = {}
    for name, first in parts[0].items():
        columns = [part[name] for part in parts]
        merged[name] = np.concatenate(columns) if isinstance(first, np.ndarray) else pa.concat_arrays(columns)
    return merged


def _part(scores: Scores, start: int, stop: int) -> Scores:
    if isinstance(scores, dict):
        return {name: values[start:stop] for name, values in scores.items()}
    return scores[start:stop]
