"""Losses and regularisers, computed in float32 whatever the layers' precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from viviane.core.errors import SchemaError
from viviane.nn.init import Initializer
from viviane.nn.loss import Loss
from viviane.nn.registry import LAYERS, Shape
from viviane.ops.logistic_loss import logistic_loss


def binary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    class_weights: tuple[float, float] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean of -(y log p + (1 - y) log(1 - p)), p = sigmoid(logit), from the logit so that it cannot overflow.

        loss = sum_b w_b l_b / sum_b w_b        w_b = weight_b (c_0 (1 - y_b) + c_1 y_b)

    The class weights multiply the loss and not the divisor, so that they change the balance of the classes. On a GPU
    loss and gradient come from one kernel, see `viviane.ops.logistic_loss`.

    Args:
        logits, labels: (B,) or (B, 1); labels between 0 and 1.
        weight: (B,) weights of the rows, or None for 1 each. If all are 0 the loss is 0.
        class_weights: weights c_0, c_1 of negative and positive rows.
        label_smoothing: s moves y to y (1 - s) + s / 2.

    Example:
        >>> round(binary_cross_entropy(torch.zeros(2), torch.tensor([0.0, 1.0])).item(), 4)
        0.6931
    """
    logits, labels = logits.flatten(), labels.flatten()
    if logits.shape != labels.shape:
        raise SchemaError("one logit per label", value=f"{len(logits)} logits, {len(labels)} labels")
    if logits.dtype == torch.float64:
        logits = logits.float()
    weight = None if weight is None else weight.flatten()
    return logistic_loss(logits, labels, weight, class_weights or (1.0, 1.0), label_smoothing)


def regularization_loss(
    weights: Iterable[Tensor], kind: Literal["L1", "L2"], strength: float, batch_size: int
) -> Tensor:
    """Penalty on dense weights: L1 (strength / B) sum |w|, L2 (strength / 2 B) sum w^2, B the batch size.

    Example:
        >>> regularization_loss([torch.tensor([3.0, -4.0])], "L2", 1.0, 5).item()
        2.5
    """
    weights = list(weights)
    if kind == "L1":
        return torch.stack([w.abs().sum() for w in weights]).sum() * (strength / batch_size)
    return torch.stack([w.square().sum() for w in weights]).sum() * (strength / (2 * batch_size))


@LAYERS.register("BinaryCrossEntropyLoss")
class BinaryCrossEntropyLoss(Loss):
    """Binary cross-entropy of (logit, label): (B, 1) and (B, 1) -> a number; the sigmoid is inside.

    Example:
        >>> loss = BinaryCrossEntropyLoss([(1,), (1,)])
        >>> round(loss(torch.zeros(2, 1), torch.ones(2, 1)).item(), 4)
        0.6931
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that there is one logit per label."""
        if len(self.in_shapes) != 2 or any(shape not in ((1,), ()) for shape in self.in_shapes):
            raise self.refuse("a logit (B, 1) and a label (B, 1)")
        return [()]

    def mean_loss(
        self,
        output: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        class_weights: tuple[float, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss of a batch."""
        return binary_cross_entropy(output, label, weight, class_weights, label_smoothing)
