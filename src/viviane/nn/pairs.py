"""The first product over pairs of a history's items and a target, without the rows that it is a product of."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer, InitializerName
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size, rows_of, with_rows


class PairInnerProductParameters(Settings):
    """Parameters of `PairInnerProduct`, those of `InnerProduct`; "default" of the weight is its Xavier-normal too."""

    num_output: Size
    weight_init_type: InitializerName = "default"
    bias_init_type: InitializerName = "default"


@LAYERS.register("PairInnerProduct")
class PairInnerProduct(Layer):
    """What `InnerProduct` makes of pairs: y_i = W [h_i, t, h_i - t, h_i * t] + b, the first step of DIN's unit.

        W = [W_1, W_2, W_3, W_4]
        y_i = (W_1 + W_3) h_i + W_4 (h_i * t) + (W_2 - W_3) t + b

    Rows h (L B, n), a sample's L rows together, and their targets t (B, n) -> (L B, num_output). The target's part is
    computed once a sample, and neither its copies nor the rows of 4 n numbers are made.

    Source: Zhou et al. 2018 (Deep Interest Network).

    Example:
        >>> from viviane.nn import RowShape, Rows
        >>> layer = PairInnerProduct([RowShape((4,), Rows(3)), (4,)], num_output=2)
        >>> layer(torch.ones(15, 4), torch.ones(5, 4)).shape
        torch.Size([15, 2])
    """

    Parameters = PairInnerProductParameters
    changes_rows = True

    def build(self, init: Initializer) -> list[Shape]:
        """Create W (num_output, 4 n) and b."""
        settings = cast(PairInnerProductParameters, self.settings)
        shapes = self.in_shapes
        if len(shapes) != 2 or len(shapes[0]) != 1 or tuple(shapes[0]) != tuple(shapes[1]):
            raise self.refuse("rows (L B, n) and targets (B, n)")
        many, one = (rows_of(shape) for shape in shapes)
        if many.of_batch != one.of_batch or many.count % one.count:
            raise self.refuse("a whole number of rows for each target")
        m, self.length = settings.num_output, many.count // one.count
        (self.width,) = shapes[1]
        self.weight = init.weight("weight", (m, 4 * self.width), settings.weight_init_type,
                                  fan_in=4 * self.width, fan_out=m)  # fmt: skip
        if settings.bias_init_type == "default":
            self.bias = init.truncated_normal("bias", (m,), math.sqrt(1 / m))
        else:
            self.bias = init.weight("bias", (m,), settings.bias_init_type, fan_in=0, fan_out=m)
        return [with_rows((m,), many)]

    def forward(self, h: Tensor, t: Tensor) -> Tensor:
        """Return a row for each row of h."""
        first, second, third, fourth = self.weight.chunk(4, 1)
        of_target = F.linear(t, second - third, self.bias)
        rows = h.reshape(-1, self.length, self.width)
        both = torch.cat([rows, rows * t.unsqueeze(1)], 2)
        y = F.linear(both, torch.cat([first + third, fourth], 1))
        return y.add_(of_target.unsqueeze(1)).flatten(0, 1)
