"""The loss and the predictions of a module's output.

Shapes: B rows, L labels of the schema, in its order, W columns of the module's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, cast

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.config import Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.core.logging import get_logger
from viviane.core.ranges import timed_as
from viviane.nn.cross_entropy import IGNORED, MeanSquaredErrorLoss
from viviane.nn.loss import Loss, LossParameters
from viviane.nn.losses import BinaryCrossEntropyLoss, regularization_loss
from viviane.ops.probabilities import probabilities, write_probabilities
from viviane.schema import Schema

_log = get_logger("training")
LossFunction: TypeAlias = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class LossTerm:
    """One loss of a model, with its output columns and its labels.

    Args:
        loss: the loss; its parameters include weight and regularizer.
        columns: start and stop of its columns in the module's output.
        labels: indices of its labels in the schema.
    """

    loss: Loss
    columns: tuple[int, int]
    labels: tuple[int, ...]

    @property
    def parameters(self) -> LossParameters:
        """Weight and regularizer."""
        return cast(LossParameters, self.loss.settings)

    @cached_property
    def weight(self) -> float:
        """The factor of this loss in the sum."""
        return self.parameters.loss_weight


def terms_of(schema: Schema) -> list[LossTerm]:
    """Return one loss per label: binary cross-entropy, or squared error for regression."""
    terms = []
    for i, label in enumerate(schema.labels):
        kind = BinaryCrossEntropyLoss if label.task == "binary" else MeanSquaredErrorLoss
        terms.append(LossTerm(kind([(1,), (1,)]), (i, i + 1), (i,)))
    return terms


class Objective:
    """The loss of a batch: the weighted sum of its terms, by default one per label with equal weights,

        binary      binary_cross_entropy(logit, y), with class weights and label smoothing in training
        regression  mean of (output - y)^2

    all weighted by the batch's sample weights, divided by their sum. A row without an optional label is ignored
    for that label.

    Args:
        schema: the labels and their tasks.
        solver: class weights and label smoothing.
        loss: a function (logits (B, W), batch) -> scalar, instead of the above.
        terms: the losses of a graph, instead of one per label.

    Example:
        >>> schema = Schema(labels=[{"name": "y", "task": "regression"}], dense=[{"name": "x"}])
        >>> batch = Batch.from_columns(schema, {"y": [1.0, 3.0], "x": [0.0, 0.0]})
        >>> Objective(schema, Solver()).loss(torch.tensor([1.0, 1.0]), batch).item()
        2.0
    """

    def __init__(
        self,
        schema: Schema,
        solver: Solver,
        loss: LossFunction | None = None,
        terms: Sequence[LossTerm] | None = None,
    ) -> None:
        self.labels = schema.labels
        self.class_weights = solver.class_weights
        self.label_smoothing = solver.label_smoothing
        self._has_optional = any(label.optional for label in schema.labels)
        self._has_warned = False
        self._shift = 0.0
        """Value that class weights add to logits, if predictions subtract it."""
        if solver.class_weights is not None and solver.correct_class_weights:
            self._shift = math.log(solver.class_weights[1] / solver.class_weights[0])
        self.own_loss = loss
        self.terms = terms_of(schema) if terms is None else list(terms)
        self.width = max((term.columns[1] for term in self.terms), default=1)
        self.penalties = [
            (term.parameters.regularizer_type, term.parameters.lambda_ * term.parameters.loss_weight)
            for term in self.terms
            if term.parameters.use_regularizer
        ]
        """Type and factor of each penalty on dense weights."""
        self._one_sigmoid = all(
            isinstance(term.loss, BinaryCrossEntropyLoss) and term.labels == (i,) and term.columns == (i, i + 1)
            for i, term in enumerate(self.terms)
        )
        if not self.labels and loss is None:
            raise SchemaError("the schema has no label to train on", fix="add labels to the schema, or pass loss=")
        reshaping = self.class_weights is not None or self.label_smoothing > 0
        if reshaping and (loss is not None or not any(label.task == "binary" for label in self.labels)):
            raise ConfigError(
                "class_weights and label_smoothing need the built-in loss of a binary label",
                value="a custom loss" if loss is not None else "no binary label",
                fix="remove them from the solver",
            )

    @property
    def num_terms(self) -> int:
        """Number of terms of the loss, each with its own divisor."""
        return 1 if self.own_loss is not None else len(self.terms)

    def to(self, device: torch.device) -> None:
        """Move tensors of the losses, such as target weights, to a device."""
        for term in self.terms:
            term.loss.to(device)

    def logits(self, output: object, num_rows: int) -> Tensor:
        """Return a module's output as (B, W), float32.

        Raises:
            SchemaError: the module returned something else.
        """
        return self._checked(output, num_rows).float()

    def _checked(self, output: object, num_rows: int) -> Tensor:
        """Return the output in its own type, which a kernel may widen."""
        width = self.width
        allowed = f"a tensor ({num_rows}, {width})" + (f" or ({num_rows},)" if width == 1 else "")
        if not isinstance(output, Tensor):
            raise SchemaError("the module must return its logits", value=type(output).__name__, allowed=allowed)
        if output.dim() == 1 and width == 1:
            output = output.unsqueeze(1)
        right = output.dim() == 2 and output.shape[0] == num_rows
        if not right or (output.shape[1] != width and self.own_loss is None):
            raise SchemaError("the module's output has another shape", value=tuple(output.shape), allowed=allowed)
        return output

    @timed_as("loss")
    def loss(
        self, output: object, batch: Batch, *, training: bool = True, shares: Sequence[Tensor | float] | None = None
    ) -> Tensor:
        """Return the loss of a batch; outside training, class weights and label smoothing are ignored.

        Args:
            shares: factors of the terms: the share of this batch in the global batch; None: 1.
        """
        logits = self._checked(output, batch.size)
        if self.own_loss is not None:
            own = self.own_loss(logits.float(), batch)
            return own if shares is None else own * shares[0]
        if training and self.class_weights is not None:
            self._warn_of_class_weights()
        if batch.labels.shape[1] != len(self.labels):
            raise SchemaError("the batch has no labels", where=batch.origin, fix="use predict for rows without labels")
        if not training and self._shift and self._one_sigmoid:
            logits = logits - self._shift
        weights = self.class_weights if training else None
        smoothing = self.label_smoothing if training else 0.0
        parts = [self._part(term, logits, batch, weights, smoothing) for term in self.terms]
        if shares is not None:
            parts = [part * share for part, share in zip(parts, shares, strict=True)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def divisors(self, batch: Batch) -> list[Tensor] | None:
        """Return the divisor of each term's mean, 0-dim, float64; None if all divide by the number of rows."""
        terms: Sequence[LossTerm | None] = [None] if self.own_loss is not None else self.terms
        if batch.weight is None and not any(self._may_be_absent(term) for term in terms):
            return None
        found = []
        for term in terms:
            one = torch.ones(batch.size, device=batch.labels.device) if batch.weight is None else batch.weight
            if term is not None and self._may_be_absent(term):
                one = one * (_columns(batch.labels, term.labels)[:, 0] >= IGNORED)
            found.append(one.sum(dtype=torch.float64))
        return found

    def _may_be_absent(self, term: LossTerm | None) -> bool:
        return term is not None and not term.loss.takes_absent and any(self.labels[i].optional for i in term.labels)

    def _part(
        self,
        term: LossTerm,
        logits: Tensor,
        batch: Batch,
        class_weights: tuple[float, float] | None,
        label_smoothing: float,
    ) -> Tensor:
        z, y = logits[:, slice(*term.columns)], _columns(batch.labels, term.labels)
        if not isinstance(term.loss, BinaryCrossEntropyLoss):  # its kernel widens them
            z = z.float()
        weight = batch.weight
        if self._has_optional and self._may_be_absent(term):
            present = (y[:, 0] >= IGNORED).float()
            weight = present if weight is None else weight * present
            y = y.clamp_min(0.0)
        value = term.loss.mean_loss(z, y, weight, class_weights, label_smoothing)
        return value if term.weight == 1.0 else value * term.weight

    def penalty(self, weights: Iterable[Tensor], batch_size: int) -> Tensor | None:
        """Return the sum of the losses' penalties on dense weights, or None if there are none."""
        if not self.penalties:
            return None
        weights = list(weights)
        if not weights:
            raise ConfigError("a regularizer needs dense weights, but the model has none", fix="remove use_regularizer")
        parts = [regularization_loss(weights, kind, strength, batch_size) for kind, strength in self.penalties]
        return torch.stack(parts).sum()

    def predictions(self, output: object, num_rows: int) -> Tensor:
        """Return (B, L): probabilities of binary labels, the output itself of regression labels.

        Class weights (c0, c1) multiply the odds of predictions by c1 / c0; with the solver's
        `correct_class_weights` predictions are divided by it again.
        """
        logits = self._checked(output, num_rows)
        if self.own_loss is not None and logits.shape[1] != self.width:
            return probabilities(logits)
        if self._one_sigmoid:
            return probabilities(logits, self._shift)
        logits = logits.float()
        result = logits.new_empty(num_rows, len(self.labels))
        for term in self.terms:
            part = term.loss.predictions(logits[:, slice(*term.columns)])
            for j, label in enumerate(term.labels):
                weighted = self._shift and self.labels[label].task == "binary"
                result[:, label] = torch.sigmoid(torch.logit(part[:, j]) - self._shift) if weighted else part[:, j]
        return result

    @property
    def sigmoid_shift(self) -> float | None:
        """What s is, where predictions are 1 / (1 + e^(s - z)) of the logits one by one, (B, L); else None."""
        return self._shift if self._one_sigmoid and self.own_loss is None else None

    def write_predictions(self, output: object, out: Tensor, records: Sequence[Tensor], flag: Tensor | None) -> None:
        """Write the result of `predictions`, (B, L), float32, to `out`, and to `flag` whether a record is set.

        Args:
            records, flag: see `viviane.ops.probabilities.write_probabilities`.
        """
        logits = self._checked(output, len(out))
        if self._one_sigmoid and self.own_loss is None:
            write_probabilities(logits, out, self._shift, records, flag)
            return
        torch.add(self.predictions(output, len(out)), 0, out=out)
        if flag is not None:
            write_probabilities(logits.new_zeros(1), torch.empty_like(out[0, :1]), 0.0, records, flag)

    def _warn_of_class_weights(self) -> None:
        """Warn if class weights keep predictions from being probabilities of the data."""
        weights = self.class_weights
        if self._has_warned or weights is None or weights[0] == weights[1] or self._shift:
            return
        self._has_warned = True
        factor = "infinity" if not weights[0] else f"{weights[1] / weights[0]:g}"
        _log.warning(
            "class_weights %s multiply the odds of all predictions by %s, so their sum is not the expected number of "
            "positives; set correct_class_weights=True to correct evaluation and predictions",
            list(weights), factor,
        )  # fmt: skip


def _columns(labels: Tensor, places: tuple[int, ...]) -> Tensor:
    first = places[0]
    if places == tuple(range(first, first + len(places))):
        return labels[:, first : first + len(places)]
    return torch.stack([labels[:, i] for i in places], 1)  # an index list would be copied to the GPU in every call
