"""Element-wise layers and reductions."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.ops.linear import linear, reason


class DropoutParameters(Settings):
    """Parameters of `Dropout`: dropout_rate is the share of elements set to zero."""

    dropout_rate: float = Field(default=0.5, gt=0, lt=1)


@LAYERS.register("Dropout")
class Dropout(Layer):
    """Set elements to zero with probability p and scale the others by 1 / (1 - p), in training only.

    Example:
        >>> Dropout([(4,)], dropout_rate=0.1).eval().out_shapes
        [(4,)]
    """

    Parameters = DropoutParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the thinned tensor."""
        return F.dropout(x, cast(DropoutParameters, self.settings).dropout_rate, self.training)


@LAYERS.register("ReLU")
class ReLU(Layer):
    """max(x, 0).

    Example:
        >>> import torch
        >>> ReLU([(2,)])(torch.tensor([[-1.0, 2.0]])).tolist()
        [[0.0, 2.0]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        return F.relu(x)


class LeakyReLUParameters(Settings):
    """Parameters of `LeakyReLU`: slope multiplies what lies below 0."""

    slope: float = Field(default=0.01, ge=0)


@LAYERS.register("LeakyReLU")
class LeakyReLU(Layer):
    """x where x > 0, else slope x.

    Source: Maas et al. 2013, "Rectifier Nonlinearities Improve Neural Network Acoustic Models".

    Example:
        >>> import torch
        >>> LeakyReLU([(2,)], slope=0.5)(torch.tensor([[-1.0, 2.0]])).tolist()
        [[-0.5, 2.0]]
    """

    Parameters = LeakyReLUParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        return F.leaky_relu(x, cast(LeakyReLUParameters, self.settings).slope)


class ELUParameters(Settings):
    """Parameters of `ELU`."""

    elu_alpha: float = 1.0


@LAYERS.register("ELU")
class ELU(Layer):
    """x where x > 0, else alpha (exp(x) - 1).

    Example:
        >>> import torch
        >>> round(ELU([(1,)])(torch.tensor([[-1.0]])).item(), 4)
        -0.6321
    """

    Parameters = ELUParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        return F.elu(x, cast(ELUParameters, self.settings).elu_alpha)


@LAYERS.register("Sigmoid")
class Sigmoid(Layer):
    """1 / (1 + exp(-x)).

    Example:
        >>> import torch
        >>> Sigmoid([(1,)])(torch.zeros(1, 1)).item()
        0.5
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        return x.sigmoid()


@LAYERS.register("SiLU")
class SiLU(Layer):
    """x / (1 + exp(-x)).

    Source: Elfwing et al. 2018, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation".

    Example:
        >>> import torch
        >>> round(SiLU([(1,)])(torch.ones(1, 1)).item(), 4)
        0.7311
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        return F.silu(x)


@LAYERS.register("Add")
class Add(Layer):
    """Sum of equally shaped inputs.

    Example:
        >>> import torch
        >>> Add([(1,), (1,)])(torch.ones(1, 1), torch.ones(1, 1)).item()
        2.0
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the shapes are equal."""
        if len(self.in_shapes) < 2 or len(set(self.in_shapes)) != 1:
            raise self.refuse("two or more inputs of one shape")
        return [self.in_shapes[0]]

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return the sum."""
        for other in others:
            first = first + other
        return first


@LAYERS.register("Sub")
class Sub(Layer):
    """Difference a - b of two equally shaped inputs.

    Example:
        >>> import torch
        >>> Sub([(1,), (1,)])(torch.ones(1, 1), torch.full((1, 1), 3.0)).item()
        -2.0
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the shapes are equal."""
        if len(self.in_shapes) != 2 or self.in_shapes[0] != self.in_shapes[1]:
            raise self.refuse("two inputs of one shape")
        return [self.in_shapes[0]]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a - b."""
        return a - b


class ReduceParameters(Settings):
    """Parameters of `ReduceSum` and `ReduceMean`: axis counts from the batch dimension, which is 0."""

    axis: int = Field(default=1, ge=1)


class _Reduce(Layer):
    Parameters = ReduceParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Return the shape with the axis kept at length 1."""
        shape, axis = self.one_input(), cast(ReduceParameters, self.settings).axis
        if axis > len(shape):
            raise self.refuse(f"an input that has axis {axis}")
        return [(*shape[: axis - 1], 1, *shape[axis:])]


@LAYERS.register("ReduceSum")
class ReduceSum(_Reduce):
    """Sum over one axis, which stays with length 1.

    Example:
        >>> import torch
        >>> ReduceSum([(3,)])(torch.ones(2, 3)).tolist()
        [[3.0], [3.0]]
    """

    @property
    def sums_rows(self) -> bool:
        """Whether each row, (B, k), becomes one number."""
        return len(self.in_shapes[0]) == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the sums."""
        if self.sums_rows and reason(x, x) is None:
            return linear(x, x.new_ones(1, x.shape[1]), None)  # whose order does not depend on the batch
        return x.sum(cast(ReduceParameters, self.settings).axis, keepdim=True)


@LAYERS.register("ReduceMean")
class ReduceMean(_Reduce):
    """Mean over one axis, which stays with length 1.

    Example:
        >>> import torch
        >>> ReduceMean([(2,)])(torch.tensor([[1.0, 3.0]])).tolist()
        [[2.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        return x.mean(cast(ReduceParameters, self.settings).axis, keepdim=True)
