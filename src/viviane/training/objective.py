"""From a module's output to the loss, and to predictions.

Shapes: B rows, L labels of the schema, in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.batch import Batch
from viviane.config import Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.nn.losses import binary_cross_entropy
from viviane.schema import Schema

LossFunction: TypeAlias = Callable[[Tensor, Batch], Tensor]


class Objective:
    """The loss of a batch: the sum over labels, each counted equally, of

        binary      binary_cross_entropy(logit, y), with class weights and label smoothing while training
        regression  mean of (output - y)^2

    both weighted by the batch's sample weights, divided by their sum.

    Args:
        schema: names the labels and their tasks.
        solver: class weights and label smoothing.
        loss: a function (logits (B, L), batch) -> a number, instead of the above.

    Example:
        >>> schema = Schema(labels=[{"name": "y", "task": "regression"}], dense=[{"name": "x"}])
        >>> batch = Batch.from_columns(schema, {"y": [1.0, 3.0], "x": [0.0, 0.0]})
        >>> Objective(schema, Solver()).loss(torch.tensor([1.0, 1.0]), batch).item()
        2.0
    """

    def __init__(self, schema: Schema, solver: Solver, loss: LossFunction | None = None) -> None:
        self.labels = schema.labels
        self.class_weights = solver.class_weights
        self.label_smoothing = solver.label_smoothing
        self.own_loss = loss
        if not self.labels and loss is None:
            raise SchemaError("the schema has no label to train on", fix="add labels to the schema, or pass loss=")
        reshaping = self.class_weights is not None or self.label_smoothing > 0
        if reshaping and (loss is not None or not any(label.task == "binary" for label in self.labels)):
            raise ConfigError(
                "class_weights and label_smoothing belong to the built-in loss of binary labels",
                value="a loss of your own" if loss is not None else "no binary label",
                fix="leave them out of the solver",
            )

    def logits(self, output: object, num_rows: int) -> Tensor:
        """Return a module's output as (B, L), float32.

        Raises:
            SchemaError: the module returned something else.
        """
        width = max(1, len(self.labels))
        allowed = f"a tensor ({num_rows}, {width})" + (f" or ({num_rows},)" if width == 1 else "")
        if not isinstance(output, Tensor):
            raise SchemaError("the module must return its logits", value=type(output).__name__, allowed=allowed)
        if output.dim() == 1 and width == 1:
            output = output.unsqueeze(1)
        right = output.dim() == 2 and output.shape[0] == num_rows
        if not right or (output.shape[1] != width and self.own_loss is None):
            raise SchemaError("the module's output has another shape", value=tuple(output.shape), allowed=allowed)
        return output.float()

    def loss(self, output: object, batch: Batch, *, training: bool = True) -> Tensor:
        """Return the loss of a batch; outside training, class weights and label smoothing are left out."""
        logits = self.logits(output, batch.size)
        if self.own_loss is not None:
            return self.own_loss(logits, batch)
        if batch.labels.shape[1] != len(self.labels):
            raise SchemaError("the batch has no labels", where=batch.origin, fix="use predict for rows without labels")
        weights = self.class_weights if training else None
        smoothing = self.label_smoothing if training else 0.0
        parts = []
        for i, label in enumerate(self.labels):
            z, y = logits[:, i], batch.labels[:, i]
            if label.task == "binary":
                parts.append(binary_cross_entropy(z, y, batch.weight, weights, smoothing))
            else:
                parts.append(_squared_error(z, y, batch.weight))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def predictions(self, output: object, num_rows: int) -> Tensor:
        """Return (B, L): probabilities of binary labels, the output itself of regression labels."""
        logits = self.logits(output, num_rows)
        if all(label.task == "binary" for label in self.labels):
            return logits.sigmoid()
        columns = [
            logits[:, i].sigmoid() if label.task == "binary" else logits[:, i] for i, label in enumerate(self.labels)
        ]
        return torch.stack(columns, 1)


def _squared_error(output: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return F.mse_loss(output, labels)
    errors = (output - labels).square() * weight
    return errors.sum() / weight.sum().clamp_min(torch.finfo(torch.float32).tiny)
