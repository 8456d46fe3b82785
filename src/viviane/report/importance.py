"""Permutation importance: how much worse a model predicts when the values of one column are shuffled between rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, DataError
from viviane.core.files import write_json_atomic
from viviane.data import Dataset
from viviane.metrics import roc_auc
from viviane.model import Model

IMPORTANCE_FILE: Final = "importance.json"
_BATCH: Final = 2048


@dataclass(frozen=True)
class FeatureImportance:
    """What shuffling one column costs.

    Args:
        name: of the column.
        log_loss: mean increase of the log loss over the repeats.
        auc: mean decrease of the AUC; NaN where a class has no rows.
    """

    name: str
    log_loss: float
    auc: float


@dataclass(frozen=True)
class Importance:
    """Importance of each column, the most important one first.

    Args:
        label: the binary label.
        rows, repeats: rows that were shuffled, and how often.
        log_loss, auc: of the rows as they are.
        features: by falling increase of the log loss.
    """

    label: str
    rows: int
    repeats: int
    log_loss: float
    auc: float
    features: tuple[FeatureImportance, ...]

    def save(self, run_folder: str | Path) -> Path:
        """Write importance.json into a run folder, where `write_report` finds it."""
        file = Path(run_folder) / IMPORTANCE_FILE
        data = asdict(self)
        values = [data, *data["features"]]
        for one in values:
            one["auc"] = None if np.isnan(one["auc"]) else one["auc"]
        write_json_atomic(file, data)
        return file


def permutation_importance(
    model: Model,
    data: Dataset,
    *,
    label: str | None = None,
    rows: int = 5_000,
    repeats: int = 1,
    seed: int = 0,
    seconds: float | None = None,
) -> Importance:
    """Shuffle each column of held-out rows and measure the increase of the log loss.

    A column that carries the same information as another one gets too little: the model still reads the other.

    Args:
        model: a trained model.
        data: rows that it was not trained on, with labels.
        label: a binary label; None takes the first one.
        rows: number of rows, from the start of the data.
        repeats: shuffles of each column, whose mean is taken.
        seed: of the shuffles.
        seconds: take fewer rows if predicting them for all columns would take longer than this.

    Raises:
        ConfigError: the model has no binary label, or not this one. DataError: the data has no rows.
    """
    for name, value in (("rows", rows), ("repeats", repeats)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError("not a number of times", where=name, value=value, allowed="1 or more")
    place, name = _label(model, label)
    batch = _first_rows(data, rows)
    columns = _columns(batch)
    start = perf_counter()
    before = _predict(model, batch)[:, place]
    spent = perf_counter() - start
    if seconds is not None and spent * len(columns) * repeats > seconds:
        kept = max(int(batch.size * seconds / (spent * len(columns) * repeats)), min(200, batch.size))
        batch = _taken(batch, torch.arange(kept))
        before = before[:kept]
    y = batch.label(name).numpy()
    chance = np.random.default_rng(seed)
    loss, auc = _log_loss(y, before), _auc(y, before)
    found = []
    for column in columns:
        losses, aucs = [], []
        for _ in range(repeats):
            order = torch.from_numpy(chance.permutation(batch.size))
            p = _predict(model, _shuffled(batch, column, order))[:, place]
            losses.append(_log_loss(y, p) - loss)
            aucs.append(auc - _auc(y, p))
        found.append(FeatureImportance(column, float(np.mean(losses)), float(np.mean(aucs))))
    found.sort(key=lambda one: -one.log_loss)
    return Importance(name, batch.size, repeats, loss, auc, tuple(found))


def _label(model: Model, wanted: str | None) -> tuple[int, str]:
    """Return place and name of the label."""
    names = [one.name for one in model.schema.labels]
    binary = [one.name for one in model.schema.labels if one.task == "binary"]
    if not binary or (wanted is not None and wanted not in binary):
        raise ConfigError(
            "permutation importance needs a binary label", value=wanted, allowed=", ".join(binary) or "none here"
        )
    chosen = wanted or binary[0]
    return names.index(chosen), chosen


def _first_rows(data: Dataset, rows: int) -> Batch:
    with data.reader(rows, shuffle=False, max_batches=1) as reader:
        for batch in reader:
            return batch
    raise DataError("there are no rows", where=str(data.path))


def _columns(batch: Batch) -> list[str]:
    layout = batch.layout
    return [*(name for name, _ in layout.dense), *layout.one_hot, *layout.bags]


def _shuffled(batch: Batch, name: str, order: Tensor) -> Batch:
    """Return the batch with the values of one column in another order."""
    layout = batch.layout
    if name in layout.dense_slice:
        dense = batch.dense.clone()
        dense[:, layout.dense_slice[name]] = batch.dense[order][:, layout.dense_slice[name]]
        return replace(batch, dense=dense)
    if name in layout.one_hot_index:
        ids = batch.one_hot.clone()
        ids[:, layout.one_hot_index[name]] = batch.one_hot[order, layout.one_hot_index[name]]
        return replace(batch, one_hot=ids)
    return replace(batch, bags={**batch.bags, name: _reordered(batch.bags[name], order)})


def _reordered(bag: Bag, order: Tensor) -> Bag:
    """Return the bags of other rows."""
    lengths = bag.lengths.long()[order]
    offsets = torch.zeros(len(order) + 1, dtype=bag.offsets.dtype)
    offsets[1:] = lengths.cumsum(0)
    starts = bag.offsets.long()[:-1][order]
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1].long(), lengths)
    place = torch.repeat_interleave(starts, lengths) + within
    return Bag(bag.values[place], offsets, None if bag.weights is None else bag.weights[place])


def _taken(batch: Batch, rows: Tensor) -> Batch:
    return replace(
        batch, labels=batch.labels[rows], dense=batch.dense[rows], one_hot=batch.one_hot[rows],
        bags={name: _reordered(bag, rows) for name, bag in batch.bags.items()},
        weight=None if batch.weight is None else batch.weight[rows],
    )  # fmt: skip


def _parts(batch: Batch) -> Iterator[Batch]:
    for start in range(0, batch.size, _BATCH):
        yield _taken(batch, torch.arange(start, min(start + _BATCH, batch.size)))


def _predict(model: Model, batch: Batch) -> NDArray[np.float64]:
    return np.concatenate(list(model.predict_batches(_parts(batch)))).astype(np.float64)


def _log_loss(y: NDArray[Any], p: NDArray[np.float64]) -> float:
    known = y >= 0  # an absent optional label is below 0
    inside = np.clip(p[known], 1e-7, 1 - 1e-7)
    return float(-np.mean(np.where(y[known] > 0.5, np.log(inside), np.log1p(-inside))))


def _auc(y: NDArray[Any], p: NDArray[np.float64]) -> float:
    known = y >= 0
    return roc_auc(p[known].astype(np.float32), y[known].astype(np.float32))
