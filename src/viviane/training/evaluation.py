"""Metrics and predictions over a data set, without changing the state of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config.base import shortened
from viviane.core.errors import ConfigError, SchemaError
from viviane.embedding.module_parts import collections_of
from viviane.metrics import METRICS, AverageLoss, CalibrationHistogram, Metric, MetricName, ScoreCurve, build_metric
from viviane.nn.cross_entropy import IGNORED
from viviane.parallel import Group
from viviane.schema import LabelColumn, Schema
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision

_NUM_BINS = 50


def choose_metrics(schema: Schema, names: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the metrics of a run: the named ones, or those that fit the labels.

    Raises:
        ConfigError: an unknown metric, a metric that fits no label, or a grouped metric without its column.
        SchemaError: the group column is not a one-hot column of the data.
    """
    if isinstance(names, str):
        names = (names,)
    elif names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise ConfigError("metrics must be given by name", value=shortened(names), allowed='"auc", ["auc", "log_loss"]')
    binary = any(label.task == "binary" for label in schema.labels)
    if names is None:
        return ("auc", "log_loss") if binary else ("mean_squared_error",) if schema.labels else ()
    for name in names:
        parsed = MetricName.parse(name)
        kind = parsed.kind  # raises, with the nearest name
        build_metric(name)
        if not binary and not kind.any_label:
            fit = ", ".join(known for known, one in METRICS.items() if one.any_label)
            raise ConfigError("the metric needs a binary label, but the schema has none", value=name, allowed=fit)
        if kind.by_group:
            _check_group(schema, name, parsed.group)
    return tuple(names)


def _check_group(schema: Schema, name: str, group: str | None) -> None:
    known = [column.name for column in schema.one_hot]
    if group is None:
        example = f"append the column after a colon: '{name}:{known[0] if known else 'user'}'"
        raise ConfigError("the metric needs the column of the user or query id", value=name, fix=example)
    if group not in known:
        raise SchemaError("a metric's group column must be one-hot", value=group, where=f"metric {name!r}",
                          allowed=", ".join(known) or "no such column in the schema",
                          fix="let the ETL write the id as a one-hot categorical column")  # fmt: skip


class Evaluation:
    """Accumulates loss, metrics and calibration over batches.

    With several labels a metric is reported as "auc/<label>" for each, and "auc", their mean. Rows without an optional
    label are ignored for that label. Rows whose group id is reserved (missing or unknown) are ignored by grouped
    metrics.

    Args:
        schema: the labels.
        metrics: names.
        warns: whether undefined metrics are worth a warning.
    """

    def __init__(self, schema: Schema, metrics: Sequence[str], *, warns: bool = True) -> None:
        self.labels: tuple[LabelColumn, ...] = schema.labels
        self._first_id = {one.name: schema.reserved.first for one in schema.one_hot if one.num_ids is not None}
        parsed = {name: MetricName.parse(name) for name in metrics}
        self._groups = {name: one.group for name, one in parsed.items() if one.group is not None}
        self._losses = {name: AverageLoss() for name, one in parsed.items() if one.kind.of_loss}
        self._metrics: dict[str, list[tuple[int, str, Metric]]] = {
            name: [
                (i, label.name, build_metric(name))
                for i, label in enumerate(schema.labels)
                if label.task == "binary" or one.kind.any_label
            ]
            for name, one in parsed.items()
            if not one.kind.of_loss
        }
        for parts in self._metrics.values():
            for _, _, metric in parts:
                metric.warns = warns
        self._bins = {
            label.name: (i, CalibrationHistogram(_NUM_BINS))
            for i, label in enumerate(schema.labels)
            if label.task == "binary"
        }
        self._curves = {name: ScoreCurve() for name in self._bins}
        self._names = tuple(metrics)
        self._loss: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self.num_rows = 0

    def update(self, predictions: Tensor, batch: Batch, loss: Tensor) -> None:
        """Add a batch: predictions (B, L), its labels, and its mean loss, weighted by the sum of row weights."""
        weight = batch.size if batch.weight is None else batch.weight.sum(dtype=torch.float64)
        self._loss = self._loss + loss.detach().double() * weight
        self._weight = self._weight + weight
        self.num_rows += batch.size
        for average in self._losses.values():
            average.update_loss(loss, weight)
        present = {i: batch.labels[:, i] >= IGNORED for i, label in enumerate(self.labels) if label.optional}
        for name, parts in self._metrics.items():
            group = self._groups.get(name)
            for i, _, metric in parts:
                self._feed(metric, predictions[:, i], batch, i, present.get(i), group)
        for name, (i, histogram) in self._bins.items():
            keep = present.get(i)
            kept = _kept(predictions[:, i], keep), _kept(batch.labels[:, i], keep)
            histogram.update(*kept)
            self._curves[name].update(*kept)

    def _feed(
        self, metric: Metric, p: Tensor, batch: Batch, label: int, keep: Tensor | None, group: str | None
    ) -> None:
        more: dict[str, Tensor] = {}
        if group is not None:
            ids = batch.one_hot[:, batch.layout.one_hot_index[group]]
            if group in self._first_id:  # raw ids have no reserved values
                known = ids >= self._first_id[group]
                keep = known if keep is None else keep & known
            more = {"groups": _kept(ids, keep)}
        weight = None if batch.weight is None else _kept(batch.weight, keep)
        metric.update(_kept(p, keep), _kept(batch.labels[:, label], keep), weight, **more)

    def pass_over(self) -> None:
        """Count a batch in which this process has no rows."""
        for average in self._losses.values():
            average.update_loss(torch.zeros(()), 0.0)

    def join(self, group: Group) -> Evaluation:
        """Combine the sums of all processes; a collective call."""
        if group.size == 1:
            return self
        sums = torch.tensor([float(self._loss), float(self._weight), self.num_rows], dtype=torch.float64)
        self._loss, self._weight, rows = group.all_reduce(sums).unbind()
        self.num_rows = int(rows)
        for average in self._losses.values():
            average.join(group)
        for parts in self._metrics.values():
            for _, _, metric in parts:
                metric.join(group)
        for name, (_, histogram) in self._bins.items():
            histogram.join(group)
            self._curves[name].join(group)
        return self

    def compute(self) -> dict[str, float]:
        """Return the loss, as "loss", and every metric."""
        weight = float(self._weight)
        result = {"loss": float(self._loss) / weight if weight else float("nan")}
        for name in self._names:
            if name in self._losses:
                result[name] = self._losses[name].compute()
                continue
            parts = self._metrics[name]
            values = [metric.compute() for _, _, metric in parts]
            result[name] = sum(values) / len(values)
            if len(self.labels) > 1:
                result |= {f"{name}/{label}": value for (_, label, _), value in zip(parts, values, strict=True)}
        return result

    def histogram(self, step: int) -> dict[str, Any]:
        """Return calibration bins and curves of each binary label.

        "bins" are those of the first label, "labels" those of each label by name if there are several; "curves" has
        what `ScoreCurve.compute` returns, by label.
        """
        by_label = {name: [asdict(one) for one in bins.compute()] for name, (_, bins) in self._bins.items()}
        first = next(iter(by_label.values()), [])
        curves = {name: curve.compute() for name, curve in self._curves.items()}
        return {"step": step, "bins": first, **({"labels": by_label} if len(by_label) > 1 else {}), "curves": curves}


def _kept(column: Tensor, keep: Tensor | None) -> Tensor:
    return column if keep is None else column[keep]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode without autograd; the mode of every submodule is restored afterwards.

    Raises:
        KeyRangeError, DataError: raised at the end for invalid keys that a GPU lookup recorded.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
        for collection in collections_of(module).values():
            collection.check()
    finally:
        for part, training in modes:
            part.training = training


def evaluate(
    module: nn.Module,
    batches: Iterable[Batch],
    objective: Objective,
    evaluation: Evaluation,
    precision: Precision,
    device: torch.device,
) -> Evaluation:
    """Run a module over batches and accumulate its metrics."""
    with evaluating(module):
        for batch in batches:
            there = batch.to(device)
            with precision.context(device):
                output = module(there)
            if not there.size:
                evaluation.pass_over()
                continue  # a short batch: this process took part in the exchange but has no rows
            loss = objective.loss(output, there, training=False)
            evaluation.update(objective.predictions(output, there.size), there, loss)
    return evaluation


def predict(
    module: nn.Module,
    batches: Iterable[Batch],
    num_rows: int,
    objective: Objective,
    precision: Precision,
    device: torch.device,
) -> NDArray[np.float32]:
    """Return predictions (rows, L), in the order of the batches."""
    result: NDArray[np.float32] | None = None
    start = 0
    with evaluating(module):
        for batch in batches:
            with precision.context(device):
                output = module(batch.to(device))
            part = objective.predictions(output, batch.size).float().cpu().numpy()
            if result is None:
                result = np.empty((num_rows, part.shape[1]), dtype=np.float32)
            result[start : start + len(part)] = part
            start += len(part)
    return result[:start] if result is not None else np.empty((0, len(objective.labels)), dtype=np.float32)


def in_order(own: NDArray[np.float32], sizes: Sequence[int], group: Group) -> NDArray[np.float32]:
    """Gather the predictions of all processes, (rows, L), in the order of the batches.

    Args:
        own: predictions for this process's shares of the batches, concatenated.
        sizes: rows of each global batch; rank r has rows B r // n to B (r + 1) // n of a batch of B rows.
    """
    num_columns = max(one[0] for one in group.gather_numbers([own.shape[1] if len(own) else 1]))
    flat = torch.from_numpy(np.ascontiguousarray(own.reshape(-1)))
    parts = [part.numpy().reshape(-1, num_columns) for part in group.gather(flat)]
    result = np.empty((sum(sizes), num_columns), dtype=np.float32)
    taken = [0] * group.size
    start = 0
    for size in sizes:
        for rank, part in enumerate(parts):
            count = size * (rank + 1) // group.size - size * rank // group.size
            result[start : start + count] = part[taken[rank] : taken[rank] + count]
            taken[rank] += count
            start += count
    return result
