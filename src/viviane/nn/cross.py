"""Feature crosses: DCN's cross layers, factorisation machines, products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer, InitializerName
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import MAX_SIZE, Size
from viviane.ops.cross_layers import cross_layers
from viviane.ops.pair_sums import pair_sums


class MultiCrossParameters(Settings):
    """Parameters of `MultiCross`.

    Args:
        num_layers: number of cross layers.
        projection_dim: 0 is DCN v1; k > 0 is DCN v2 with rank k.
        full_rank: DCN v2 with a whole (n, n) matrix; leave projection_dim at 0.
    """

    num_layers: int = Field(default=1, ge=1, le=10_000)
    projection_dim: int = Field(default=0, ge=0, le=MAX_SIZE)
    full_rank: bool = False
    weight_init_type: InitializerName = "default"
    bias_init_type: InitializerName = "default"

    @model_validator(mode="after")
    def _check(self) -> MultiCrossParameters:
        if self.full_rank and self.projection_dim:
            raise ValueError("choose one of full_rank and projection_dim")
        return self


@LAYERS.register("MultiCross")
class MultiCross(Layer):
    """Cross layers of the Deep & Cross Network, (B, n) -> (B, n).

        v1         x_{l+1} = x_0 (x_l . w_l) + b_l + x_l            w, b (n)
        v2, rank k x_{l+1} = x_0 * (V_l (U_l x_l) + b_l) + x_l      U (k, n), V (n, k), b (n)
        v2, full   x_{l+1} = x_0 * (W_l x_l + b_l) + x_l            W (n, n), b (n)

    Weights are Xavier-normal, biases 0. On a GPU v2 does its element-wise work inside the matrix products, see
    `viviane.ops.cross_layers`. All layers of v1 together read x_0 twice and write the output once.

    Source: Wang et al. 2017 (v1), Wang et al. 2021 (v2).

    Example:
        >>> layer = MultiCross([(3,)], MultiCrossParameters(num_layers=2))
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 3])
    """

    Parameters = MultiCrossParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create each layer's weights."""
        settings = cast(MultiCrossParameters, self.settings)
        (n,) = self.one_input(1)
        k, kind = settings.projection_dim, settings.weight_init_type
        self.weights = nn.ParameterList()
        self.projections = nn.ParameterList()
        self.biases = nn.ParameterList()
        for i in range(settings.num_layers):
            if k:
                self.projections.append(init.weight(f"{i}.projection", (k, n), kind, fan_in=n, fan_out=k))
                self.weights.append(init.weight(f"{i}.weight", (n, k), kind, fan_in=k, fan_out=n))
            elif settings.full_rank:
                self.weights.append(init.weight(f"{i}.weight", (n, n), kind, fan_in=n, fan_out=n))
            else:
                self.weights.append(init.weight(f"{i}.weight", (n,), kind, fan_in=n, fan_out=1))
            if settings.bias_init_type == "default":
                self.biases.append(init.constant((n,)))
            else:
                self.biases.append(init.weight(f"{i}.bias", (n,), settings.bias_init_type, fan_in=0, fan_out=n))
        return [(n,)]

    def weights_to_pack(self) -> list[Tensor]:
        """Return W_l or V_l, U_l and b_l of version 2."""
        settings = cast(MultiCrossParameters, self.settings)
        if not settings.projection_dim and not settings.full_rank:
            return []
        return [*self.weights, *self.projections, *self.biases]

    def forward(self, x: Tensor) -> Tensor:
        """Return the last cross layer's output."""
        settings = cast(MultiCrossParameters, self.settings)
        if settings.projection_dim or settings.full_rank:
            projections = list(self.projections) if settings.projection_dim else None
            return cross_layers(x, projections, list(self.weights), list(self.biases))
        return _cross_vectors(x, list(self.weights), list(self.biases))


def _cross_vectors(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Return v1's x_L = a_L x_0 + c_L, where a_{l+1} = a_l + x_l . w_l, and c_l = b_0 + ... + b_{l-1} has no sample.

    x_l . w_l = a_l (x_0 . w_l) + c_l . w_l: one product with all w_l and one pass over the samples are enough.
    """
    products = F.linear(x, torch.stack(list(weights))).to(x.dtype)  # (B, L)
    scales, shift = 1 + products[:, 0], biases[0]  # a_l (B), c_l (n)
    for place in range(1, len(weights)):
        scales = torch.addcmul(scales + shift @ weights[place], scales, products[:, place])
        shift = shift + biases[place]
    return torch.addcmul(shift, x, scales.unsqueeze(1))


class FmOrder2Parameters(Settings):
    """Parameters of `FmOrder2`: out_dim is the width d of one embedding."""

    out_dim: Size


@LAYERS.register("FmOrder2")
class FmOrder2(Layer):
    """Second-order part of a factorisation machine: y = ((sum_i e_i)^2 - sum_i e_i^2) / 2.

    (B, s d) or (B, s, d) -> (B, d); the sum of y over d is the sum of all pairwise dot products.

    Source: Rendle 2010; Guo et al. 2017 (DeepFM).

    Example:
        >>> layer = FmOrder2([(2, 2)], FmOrder2Parameters(out_dim=2))
        >>> layer(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist()
        [[3.0, 8.0]]
    """

    Parameters = FmOrder2Parameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the input is a whole number of embeddings."""
        d = cast(FmOrder2Parameters, self.settings).out_dim
        shape = self.one_input(1, 2)
        if shape[-1] % d if len(shape) == 1 else shape[-1] != d:
            raise self.refuse(f"(B, s * {d}) or (B, s, {d})")
        return [(d,)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the pairwise products, summed over pairs."""
        d = self.out_shapes[0][0]
        e = x.view(x.shape[0], math.prod(self.in_shapes[0]) // d, d)  # (B, s, d)
        return pair_sums(e)


class WeightMultiplyParameters(Settings):
    """Parameters of `WeightMultiply`: weight_dims is [s, d]."""

    weight_dims: tuple[Size, Size]
    weight_init_type: InitializerName = "default"


@LAYERS.register("WeightMultiply")
class WeightMultiply(Layer):
    """Turn each of s numbers into a vector: y[b, i, :] = x[b, i] W[i, :], (B, s) -> (B, s d).

    W is Xavier-uniform by default.

    Example:
        >>> layer = WeightMultiply([(3,)], WeightMultiplyParameters(weight_dims=(3, 4)))
        >>> layer(torch.ones(2, 3)).shape
        torch.Size([2, 12])
    """

    Parameters = WeightMultiplyParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create W (s, d)."""
        settings = cast(WeightMultiplyParameters, self.settings)
        s, d = settings.weight_dims
        if self.one_input(1) != (s,):
            raise self.refuse(f"(B, {s}), the first of weight_dims")
        kind = "xavier_uniform" if settings.weight_init_type == "default" else settings.weight_init_type
        self.weight = init.weight("weight", (s, d), kind, fan_in=s, fan_out=d)
        return [(s * d,)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled rows of W, side by side."""
        return (x.unsqueeze(2) * self.weight).flatten(1)


@LAYERS.register("ElementwiseMultiply")
class ElementwiseMultiply(Layer):
    """Product of equally shaped inputs, element by element.

    Example:
        >>> layer = ElementwiseMultiply([(2,), (2,)])
        >>> layer(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
        [[3.0, 8.0]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the shapes are equal."""
        if len(self.in_shapes) < 2 or len(set(self.in_shapes)) != 1:
            raise self.refuse("two or more inputs of one shape")
        return [self.in_shapes[0]]

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return the product."""
        for other in others:
            first = first * other
        return first
