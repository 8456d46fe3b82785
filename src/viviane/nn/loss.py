"""What all losses have in common: weight and regularizer, and the questions that training asks of a loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.registry import Layer


class LossParameters(Settings):
    """Parameters of every loss.

    Args:
        loss_weight: multiplies the loss and its penalty, and so their gradients, in a model's sum of losses.
        use_regularizer: add a penalty on all dense weights (see `regularization_loss`) while training.
        regularizer_type: "L1" or "L2".
        lambda_: strength of the penalty; "lambda" in JSON, and `lambda_` in Python, whose keyword "lambda" is.
    """

    model_config = ConfigDict(populate_by_name=True)

    loss_weight: float = Field(default=1.0, ge=0)
    use_regularizer: bool = False
    regularizer_type: Literal["L1", "L2"] = "L1"
    lambda_: float = Field(default=0.0, ge=0, alias="lambda")

    @model_validator(mode="after")
    def _check_regularizer(self) -> LossParameters:
        if self.lambda_ and not self.use_regularizer:
            raise ValueError("lambda needs use_regularizer=True")
        return self


class Loss(Layer):
    """Base of the losses: outputs (B, W) and labels (B, L) -> a number, computed in float32 (float64 for float64).

    A loss that is called by itself is the plain mean; `loss_weight` and the regularizer belong to the training of a
    whole model and are applied there.
    """

    Parameters = LossParameters
    task: ClassVar[Literal["binary", "regression"]] = "binary"
    """The kind of labels it takes."""
    takes_absent: ClassVar[bool] = False
    """Whether labels of -1 are absent to it; for other losses the rows without a label get the weight 0."""

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.mean_loss(output, label)

    def mean_loss(
        self,
        output: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        class_weights: tuple[float, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss of a batch.

        Args:
            output: (B, W).
            label: (B, L).
            weight: (B,) weights of the rows, or None for 1 each; the mean is divided by their sum.
            class_weights: weights of negative and positive labels, of binary labels.
            label_smoothing: s moves a binary label y to y (1 - s) + s / 2.
        """
        raise TypeError(f"{type(self).__name__} does not define mean_loss")

    def predictions(self, output: Tensor) -> Tensor:
        """Return (B, L): the probability that a binary label is 1, or a regression's output."""
        return output.sigmoid()
