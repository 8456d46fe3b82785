"""Fully connected layers with the activation built in, by HugeCTR's older names."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.linear import ActivationName, InnerProduct, InnerProductParameters
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size


class FusedInnerProductParameters(InnerProductParameters):
    """Parameters of `FusedInnerProduct`, besides those of `InnerProduct`.

    Args:
        act_type: "relu" or "none".
        pos_type: the position of the layer in a chain of its kind. It changes no number; HugeCTR lets only the
            "tail" of a chain go without the activation, and so does this layer.
    """

    act_type: ActivationName = "relu"
    pos_type: Literal["head", "body", "tail", "isolated", "none"] = "none"

    @model_validator(mode="after")
    def _check(self) -> FusedInnerProductParameters:
        if self.act_type == "none" and self.pos_type != "tail":
            raise ValueError("act_type 'none' needs pos_type 'tail'; InnerProduct is the layer without activation")
        return self


@LAYERS.register("FusedInnerProduct")
class FusedInnerProduct(InnerProduct):
    """One fully connected layer and its activation: y = max(x W^T + b, 0), (B, k) -> (B, n).

    Weights begin as those of `InnerProduct`. HugeCTR's layer ran in fp16 alone and, by `pos_type`, passed mask and
    gradient buffers to the next one as extra tensors; here there is one output, and any precision.

    Example:
        >>> import torch
        >>> layer = FusedInnerProduct([(3,)], num_output=2)
        >>> bool((layer(torch.randn(4, 3)) >= 0).all())
        True
    """

    Parameters = FusedInnerProductParameters

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        y = super().forward(x)
        return F.relu(y) if cast(FusedInnerProductParameters, self.settings).act_type == "relu" else y


class GroupFusedInnerProductParameters(Settings):
    """Parameters of `GroupFusedInnerProduct`.

    Args:
        num_outputs: width of each layer.
        last_act_type: activation of the last layer; all others have ReLU.
    """

    num_outputs: tuple[Size, ...] = Field(min_length=1)
    last_act_type: ActivationName = "relu"


@LAYERS.register("GroupFusedInnerProduct")
class GroupFusedInnerProduct(Layer):
    """A chain of `FusedInnerProduct`: h_{l+1} = max(h_l W_l^T + b_l, 0), (B, k) -> (B, num_outputs[-1]).

    It is what HugeCTR's GroupDenseLayer made. `MLP` is the newer layer for the same job, with other initial values.

    Example:
        >>> import torch
        >>> GroupFusedInnerProduct([(3,)], num_outputs=(8, 1), last_act_type="none")(torch.randn(4, 3)).shape
        torch.Size([4, 1])
    """

    Parameters = GroupFusedInnerProductParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create the chain."""
        settings = cast(GroupFusedInnerProductParameters, self.settings)
        shape = self.one_input(1)
        self.layers = nn.ModuleList()
        last = len(settings.num_outputs) - 1
        for index, width in enumerate(settings.num_outputs):
            act = settings.last_act_type if index == last else "relu"
            own = Initializer(init.seed, f"{init.layer}.{index}", init.most_bytes)
            parameters = FusedInnerProductParameters(num_output=width, act_type=act, pos_type="tail")
            self.layers.append(FusedInnerProduct([shape], parameters, init=own, name=f"{self.name}.{index}"))
            shape = (width,)
        return [shape]

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's activations."""
        for layer in self.layers:
            x = layer(x)
        return x
