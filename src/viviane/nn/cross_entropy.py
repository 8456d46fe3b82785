"""Cross-entropy of classes and of several binary labels, and squared error; float32 whatever the layers' precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from viviane.core.errors import SchemaError
from viviane.nn.init import Initializer
from viviane.nn.loss import Loss, LossParameters
from viviane.nn.registry import LAYERS, Shape

IGNORED = -0.5
"""A binary label below this is none: the row does not count for it."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean of -log softmax(z)_y over the rows, from the logits so that it cannot overflow.

        loss = sum_b w_b c_{y_b} l_b / sum_b w_b        l_b = -sum_k t_bk log softmax(z_b)_k

    Args:
        logits: (B, C), a number for each class.
        labels: (B,) or (B, 1), the class, 0 to C - 1; or (B, C), the share t_bk of each class.
        weight: (B,) weights of the rows, or None for 1 each. If all are 0 the loss is 0.
        class_weights: weights c_0 ... c_{C-1}; of shares, c_y is their weighted sum.
        label_smoothing: s moves the target t of a class from 0 or 1 to t (1 - s) + s / C.

    Example:
        >>> round(cross_entropy(torch.zeros(2, 2), torch.tensor([0.0, 1.0])).item(), 4)
        0.6931
    """
    z = as_float32(logits)
    are_shares = z.dim() == 2 and z.shape[1] > 1 and labels.shape == z.shape
    target = labels.to(z.dtype) if are_shares else labels.flatten().long()
    if z.dim() != 2 or z.shape[0] != target.shape[0]:
        value = f"{tuple(z.shape)} and {target.shape[0]} labels"
        raise SchemaError("logits (B, C) and one class a row", value=value)
    losses = F.cross_entropy(z, target, reduction="none", label_smoothing=label_smoothing)
    if class_weights is not None:
        of_class = torch.tensor(class_weights, dtype=z.dtype, device=z.device)
        losses = losses * (target @ of_class if are_shares else of_class[target])
    return weighted_mean(losses, weight)


def multi_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    target_weight: Sequence[float] | Tensor,
    weight: Tensor | None = None,
    class_weights: tuple[float, float] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Binary cross-entropy of L labels a row, some of which may be absent.

        loss = sum_b w_b (1 / L) sum_j t_j l_bj / sum_b w_b
        l_bj = -(y log p + (1 - y) log(1 - p)), p = sigmoid(z_bj);  0 where the label is below -0.5

    Absent labels count in the divisor, as in HugeCTR.

    Args:
        logits, labels: (B, L); labels between 0 and 1, or -1 where there is none.
        target_weight: t, the weight of each label, (L,).
        weight: (B,) weights of the rows, or None for 1 each. If all are 0 the loss is 0.
        class_weights: weights of negative and positive labels.
        label_smoothing: s moves y to y (1 - s) + s / 2.

    Example:
        >>> labels = torch.tensor([[1.0, -1.0]])
        >>> round(multi_cross_entropy(torch.zeros(1, 2), labels, [1.0, 5.0]).item(), 4)
        0.3466
    """
    z, y = as_float32(logits), labels.to(as_float32(logits).dtype)
    t = torch.as_tensor(target_weight, dtype=z.dtype, device=z.device)
    if z.dim() != 2 or z.shape != y.shape or t.shape != z.shape[1:]:
        value = f"logits {tuple(z.shape)}, labels {tuple(y.shape)}, {t.numel()} target weights"
        raise SchemaError("one logit and one target weight for each label", value=value)
    present = y >= IGNORED
    y = y.clamp_min(0.0)
    targets = y * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(z, targets, reduction="none")
    if class_weights is not None:
        losses = losses * (class_weights[0] + (class_weights[1] - class_weights[0]) * y)
    return weighted_mean((losses * t * present).mean(1), weight)


def squared_error(outputs: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of (output - y)^2, weighted by the rows' weights and divided by their sum.

    Example:
        >>> squared_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 3.0])).item()
        2.0
    """
    outputs, labels = as_float32(outputs).flatten(), labels.flatten()
    if outputs.shape != labels.shape:
        raise SchemaError("one output per label", value=f"{len(outputs)} outputs, {len(labels)} labels")
    if weight is None:
        return F.mse_loss(outputs, labels.to(outputs.dtype))
    return weighted_mean((outputs - labels).square(), weight)


def as_float32(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def weighted_mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Return sum_b w_b l_b / sum_b w_b of (B,); 0 where all weights are."""
    if weight is None:
        return losses.mean()
    weight = weight.to(losses.dtype)
    return (losses * weight).sum() / weight.sum().clamp_min(torch.finfo(torch.float32).tiny)


@LAYERS.register("CrossEntropyLoss")
class CrossEntropyLoss(Loss):
    """Cross-entropy of a softmax over two classes: logits (B, 2) and the class (B, 1), 0 or 1 -> a number.

    Its prediction is the probability of class 1. With a label for each class, (B, 2), the labels are the classes'
    shares, and both probabilities are predicted. By itself it takes any number of classes, (B, C) with (B, 1) or
    (B, C); a model's labels are binary.

    Example:
        >>> loss = CrossEntropyLoss([(2,), (1,)])
        >>> round(loss(torch.zeros(3, 2), torch.ones(3, 1)).item(), 4)
        0.6931
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that there is a logit for each class, and one label or one for each class."""
        shapes = self.in_shapes
        if len(shapes) != 2 or len(shapes[0]) != 1 or shapes[0][0] < 2 or shapes[1] not in ((1,), (), shapes[0]):
            raise self.refuse("a logit (B, 2) and a label (B, 1) or (B, 2)")
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
        return cross_entropy(output, label, weight, class_weights, label_smoothing)

    def predictions(self, output: Tensor) -> Tensor:
        """Return (B, 1), the probability of class 1; of more classes or a label for each, all of them, (B, C)."""
        shares = as_float32(output).softmax(1)
        return shares[:, 1:] if shares.shape[1] == 2 and self.in_shapes[1] != self.in_shapes[0] else shares


class MultiCrossEntropyLossParameters(LossParameters):
    """Parameters of `MultiCrossEntropyLoss`: target_weight_vec has a weight for each label; None is 1 each."""

    target_weight_vec: tuple[float, ...] | None = Field(default=None, min_length=1)


@LAYERS.register("MultiCrossEntropyLoss")
class MultiCrossEntropyLoss(Loss):
    """Binary cross-entropy of L labels at once: logits (B, L) and labels (B, L) -> a number.

    A label of -1 is absent (see `multi_cross_entropy`).

    Example:
        >>> loss = MultiCrossEntropyLoss([(2,), (2,)], target_weight_vec=(1.0, 0.0))
        >>> round(loss(torch.zeros(3, 2), torch.ones(3, 2)).item(), 4)
        0.3466
    """

    Parameters = MultiCrossEntropyLossParameters
    takes_absent: ClassVar[bool] = True

    def build(self, init: Initializer) -> list[Shape]:
        """Check that logits, labels and target weights are as many."""
        shapes = self.in_shapes
        if len(shapes) != 2 or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            raise self.refuse("logits (B, L) and labels (B, L)")
        (width,) = shapes[0]
        given = cast(MultiCrossEntropyLossParameters, self.settings).target_weight_vec
        if given is not None and len(given) != width:
            raise self.refuse(f"as many target weights as labels, not {len(given)}")
        self.register_buffer("target_weight", torch.tensor(given or (1.0,) * width), persistent=False)
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
        target_weight = cast(Tensor, self.target_weight)
        return multi_cross_entropy(output, label, target_weight, weight, class_weights, label_smoothing)


@LAYERS.register("MeanSquaredErrorLoss")
class MeanSquaredErrorLoss(Loss):
    """Mean squared error of (output, label): (B, 1) and (B, 1) -> a number. Viviane's own, for regression labels.

    Example:
        >>> MeanSquaredErrorLoss([(1,), (1,)])(torch.zeros(2, 1), torch.full((2, 1), 3.0)).item()
        9.0
    """

    task: ClassVar[Literal["binary", "regression"]] = "regression"

    def build(self, init: Initializer) -> list[Shape]:
        """Check that there is one output per label."""
        if len(self.in_shapes) != 2 or any(shape not in ((1,), ()) for shape in self.in_shapes):
            raise self.refuse("an output (B, 1) and a label (B, 1)")
        return [()]

    def mean_loss(
        self,
        output: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        class_weights: tuple[float, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss of a batch; class weights and smoothing are for binary labels and are left out."""
        return squared_error(output, label, weight)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the output itself."""
        return output
