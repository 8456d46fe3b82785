"""Fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, cast

from pydantic import Field, model_validator
from torch import Tensor, nn

from viviane.config.base import Settings
from viviane.nn.init import Initializer, InitializerName
from viviane.nn.norm import check_variance
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size
from viviane.ops.linear import linear
from viviane.ops.mlp import mlp, reason

ActivationName = Literal["relu", "none"]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether any of some modules has hooks, which an operator that computes several of them would not call.

    Example:
        >>> has_hooks([nn.ReLU()])
        False
    """
    return any(getattr(one, hooks) for one in modules for hooks in HOOKS)


class InnerProductParameters(Settings):
    """Parameters of `InnerProduct`."""

    num_output: Size
    weight_init_type: InitializerName = "default"
    bias_init_type: InitializerName = "default"


@LAYERS.register("InnerProduct")
class InnerProduct(Layer):
    """One fully connected layer: y = x W^T + b, on the last dimension.

    (B, k) -> (B, n) or (B, s, k) -> (B, s, n). By default W is Xavier-normal, variance 2 / (k + n), and b normal
    with deviation sqrt(1 / n), cut at two deviations.

    Example:
        >>> import torch
        >>> layer = InnerProduct([(3,)], InnerProductParameters(num_output=2))
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 2])
    """

    Parameters = InnerProductParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create W (n, k) and b (n)."""
        settings = cast(InnerProductParameters, self.settings)
        *front, k = self.one_input(1, 2)
        n = settings.num_output
        self.weight = init.weight("weight", (n, k), settings.weight_init_type, fan_in=k, fan_out=n)
        if settings.bias_init_type == "default":
            self.bias = init.truncated_normal("bias", (n,), math.sqrt(1 / n))
        else:
            self.bias = init.weight("bias", (n,), settings.bias_init_type, fan_in=0, fan_out=n)
        return [(*front, n)]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return linear(x, self.weight, self.bias)


class MLPParameters(Settings):
    """Parameters of `MLP`.

    Args:
        num_outputs: width of each layer.
        act_type: activation after every layer; `activations`, one name per layer, overrides it.
        use_bias: whether layers have a bias; `biases`, one flag per layer, overrides it.
        weight_init_type, bias_init_type: "default" is U(-sqrt(1/k), sqrt(1/k)), k the layer's input width.
        dropout: share of activations set to zero after each activation, in training.
        batch_norm, layer_norm: normalise between the product and its activation.
    """

    num_outputs: tuple[Size, ...] = Field(min_length=1)
    act_type: ActivationName = "relu"
    activations: tuple[ActivationName, ...] | None = None
    use_bias: bool = True
    biases: tuple[bool, ...] | None = None
    weight_init_type: InitializerName = "default"
    bias_init_type: InitializerName = "default"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    batch_norm: bool = False
    layer_norm: bool = False

    @model_validator(mode="after")
    def _check(self) -> MLPParameters:
        for name in ("activations", "biases"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.num_outputs):
                raise ValueError(f"{name} has {len(given)} entries, num_outputs has {len(self.num_outputs)}")
        if self.batch_norm and self.layer_norm:
            raise ValueError("choose one of batch_norm and layer_norm")
        return self


@LAYERS.register("MLP")
class MLP(Layer):
    """Fully connected layers one after another: h_{l+1} = dropout(act(norm(h_l W_l^T + b_l))).

    (B, k) -> (B, num_outputs[-1]). Normalisation and dropout are Viviane's additions to HugeCTR's MLP; a layer
    whose activation is "none" is an output: neither is applied to it.

    All layers are one operator (`viviane.ops.mlp`): on a GPU bias, ReLU and their gradients are part of the matrix
    products, on the CPU they overwrite what the products wrote. `unfused` says when the modules in `layers` are called
    one by one instead.

    Example:
        >>> import torch
        >>> mlp = MLP([(13,)], MLPParameters(num_outputs=(64, 16)))
        >>> mlp(torch.ones(2, 13)).shape
        torch.Size([2, 16])
    """

    Parameters = MLPParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create the chain of torch modules."""
        settings = cast(MLPParameters, self.settings)
        (width,) = self.one_input(1)
        count = len(settings.num_outputs)
        activations = settings.activations or (settings.act_type,) * count
        biases = settings.biases or (settings.use_bias,) * count
        steps: list[nn.Module] = []
        for index, (n, act, bias) in enumerate(zip(settings.num_outputs, activations, biases, strict=True)):
            steps.append(self._linear(init, index, width, n, bias))
            if act == "relu":
                if settings.batch_norm:
                    steps.append(nn.BatchNorm1d(n))
                if settings.layer_norm:
                    steps.append(nn.LayerNorm(n))
                steps.append(nn.ReLU())
                if settings.dropout:
                    steps.append(nn.Dropout(settings.dropout))
            width = n
        self.layers = nn.Sequential(*steps)
        self._relu = [act == "relu" for act in activations]
        return [(width,)]

    def _linear(self, init: Initializer, index: int, k: int, n: int, bias: bool) -> nn.Linear:
        settings = cast(MLPParameters, self.settings)
        linear = nn.Linear(k, n, bias=bias, device="meta")  # our own values follow
        bound = math.sqrt(1 / k)
        if settings.weight_init_type == "default":
            linear.weight = init.uniform(f"{index}.weight", (n, k), bound)
        else:
            linear.weight = init.weight(f"{index}.weight", (n, k), settings.weight_init_type, fan_in=k, fan_out=n)
        if bias and settings.bias_init_type == "default":
            linear.bias = init.uniform(f"{index}.bias", (n,), bound)
        elif bias:
            linear.bias = init.weight(f"{index}.bias", (n,), settings.bias_init_type, fan_in=0, fan_out=n)
        return linear

    def unfused(self, x: Tensor) -> str | None:
        """Return why layers are called one by one on an input, or None if one operator computes them all.

        Example:
            >>> import torch
            >>> MLP([(13,)], MLPParameters(num_outputs=(4,), batch_norm=True)).unfused(torch.ones(2, 13))
            'there is a normalisation between a product and its activation'
        """
        return self._unfused(x, *self._weights())

    def _unfused(self, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> str | None:
        settings = cast(MLPParameters, self.settings)
        if settings.batch_norm or settings.layer_norm:
            return "there is a normalisation between a product and its activation"
        if settings.dropout and self.training:
            return "dropout draws new zeros after each activation"
        if has_hooks(self.layers):
            return "a hook listens to one of the layers"
        return reason(x, weights, biases)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's activations."""
        weights, biases = self._weights()
        if self._unfused(x, weights, biases) is None:
            return mlp(x, weights, biases, self._relu, is_fit=True)
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm1d):
                check_variance(layer, x, self.name)
        return cast(Tensor, self.layers(x))

    def weights_to_pack(self) -> list[Tensor]:
        """Return weights, then biases, where one operator may compute all layers."""
        settings = cast(MLPParameters, self.settings)
        weights, biases = self._weights()
        own = [bias for bias in biases if bias is not None]
        apart = settings.batch_norm or settings.layer_norm or settings.dropout or len(own) < len(weights)
        return [] if apart else [*weights, *own]

    def chain(self) -> tuple[list[Tensor], list[Tensor | None], list[bool]]:
        """Return weights, biases and whether a ReLU follows, of each layer, as `viviane.ops.mlp` takes them.

        Example:
            >>> MLP([(13,)], MLPParameters(num_outputs=(4, 1), activations=("relu", "none"))).chain()[2]
            [True, False]
        """
        return *self._weights(), self._relu

    def _weights(self) -> tuple[list[Tensor], list[Tensor | None]]:
        linears = [step for step in self.layers if isinstance(step, nn.Linear)]
        return [one.weight for one in linears], [one.bias for one in linears]
