"""Layers for histories: the GRU, and the reshapes with which Deep Interest Networks pair history and target."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.core.errors import SchemaError
from viviane.nn.init import Initializer, InitializerName
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size, rows_of, with_rows


class GRUParameters(Settings):
    """Parameters of `GRU`.

    Args:
        num_output: n, the width of the state.
        SeqLength: L, the number of steps; needed where the input is flat.
        vector_size: v, the width of one step; needed where the input is flat.
        batchsize: refuse batches of another size, as HugeCTR's buffers do; None takes any.
        weight_init_type, bias_init_type: "default" is U(-1 / sqrt(n), 1 / sqrt(n)).
    """

    num_output: Size
    SeqLength: Size | None = None
    vector_size: Size | None = None
    batchsize: Size | None = None
    weight_init_type: InitializerName = "default"
    bias_init_type: InitializerName = "default"


@LAYERS.register("GRU")
class GRU(Layer):
    """One layer of gated recurrent units, from the state h_0 = 0, all steps' states returned.

        r_t = sigmoid(W_r x_t + b_r + U_r h_{t-1})
        z_t = sigmoid(W_z x_t + b_z + U_z h_{t-1})
        c_t = tanh(W_c x_t + b_c + r_t * (U_c h_{t-1}))
        h_t = (1 - z_t) * c_t + z_t * h_{t-1}

    (B, L, v) -> (B, L, n), or flat, (B, L v) -> (B, L n). One bias, on the input side, as in HugeCTR's cuDNN GRU.
    HugeCTR lays its whole batch out in one row, (1, B L v); here a sample is a row. On the CPU float16 is computed
    in float32.

    Source: Cho et al. 2014.

    Example:
        >>> GRU([(5, 3)], num_output=4)(torch.randn(2, 5, 3)).shape
        torch.Size([2, 5, 4])
    """

    Parameters = GRUParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create W (3 n, v), U (3 n, n) and b (3 n), rows in the order r, z, c."""
        settings = cast(GRUParameters, self.settings)
        shape = self.one_input(1, 2)
        length, width = shape if len(shape) == 2 else (settings.SeqLength or 0, settings.vector_size or 0)
        wrong = settings.SeqLength not in (None, length) or settings.vector_size not in (None, width)
        if wrong or not length or math.prod(shape) != length * width:
            raise self.refuse("(B, SeqLength, vector_size), or (B, SeqLength * vector_size) with both given")
        n, self.steps = settings.num_output, (length, width)
        self.weight = self._draw(init, "weight", (3 * n, width), n)
        self.recurrent = self._draw(init, "recurrent", (3 * n, n), n)
        self.bias = self._draw(init, "bias", (3 * n,), n)
        self.register_buffer("no_bias", torch.zeros(3 * n), persistent=False)  # of the recurrent side
        return [(length, n) if len(shape) == 2 else (length * n,)]

    def _draw(self, init: Initializer, name: str, shape: tuple[int, ...], n: int) -> torch.nn.Parameter:
        settings = cast(GRUParameters, self.settings)
        kind = settings.bias_init_type if name == "bias" else settings.weight_init_type
        if kind == "default":
            return init.uniform(name, shape, math.sqrt(1 / n))
        return init.weight(name, shape, kind, fan_in=shape[-1] if len(shape) == 2 else 0, fan_out=n)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states.

        Raises:
            SchemaError: the batch has another size than `batchsize`.
        """
        settings = cast(GRUParameters, self.settings)
        if settings.batchsize not in (None, x.shape[0]):
            raise SchemaError("the batch has another size than the layer", where=f"layer {self.name!r}",
                              value=x.shape[0], allowed=str(settings.batchsize), fix="leave batchsize out")  # fmt: skip
        steps = x.view(x.shape[0], *self.steps)
        dtype = torch.float32 if x.dtype == torch.float16 and x.device.type == "cpu" else x.dtype
        weights = [one.to(dtype) for one in (self.weight, self.recurrent, self.bias, cast(Tensor, self.no_bias))]
        start = torch.zeros(1, x.shape[0], settings.num_output, dtype=dtype, device=x.device)
        # cuDNN wants its weights and two biases in one block, and warns at each call; torch's own kernels do not.
        own_kernels = torch.backends.cudnn.flags(enabled=False) if x.is_cuda else nullcontext()
        with torch.autocast(x.device.type, enabled=False), own_kernels:
            states, _ = torch.gru(steps.to(dtype), start, weights, True, 1, 0.0, self.training, False, True)
        return states.to(x.dtype).reshape(x.shape[0], *self.out_shapes[0])


class ScaleParameters(Settings):
    """Parameters of `Scale`: axis 0 repeats elements, axis 1 repeats rows; factor is the number of copies."""

    axis: int = Field(default=1, ge=0, le=1)
    factor: Size = 1


@LAYERS.register("Scale")
class Scale(Layer):
    """Repeat: along axis 0 each element, (B, n) -> (B, n factor); along axis 1 each row, (B, n) -> (factor B, n).

    Axis 1 pairs a target item with the rows of its history that come out of `FusedReshapeConcat`. The gradient is
    the sum over the copies; HugeCTR takes the first copy's alone, which is not the derivative.

    Example:
        >>> Scale([(2,)], axis=0, factor=2)(torch.tensor([[1.0, 2.0]])).tolist()
        [[1.0, 1.0, 2.0, 2.0]]
        >>> Scale([(2,)], axis=1, factor=2)(torch.tensor([[1.0, 2.0]])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """

    Parameters = ScaleParameters
    changes_rows = True

    def build(self, init: Initializer) -> list[Shape]:
        """Return the longer shape, or the same shape with more rows."""
        settings = cast(ScaleParameters, self.settings)
        (n,) = shape = self.one_input(1)
        if settings.axis == 0:
            return [with_rows((n * settings.factor,), rows_of(shape))]
        return [with_rows(shape, rows_of(shape).times(settings.factor))]

    def forward(self, x: Tensor) -> Tensor:
        """Return the copies."""
        settings = cast(ScaleParameters, self.settings)
        (batch, n), factor = x.shape, settings.factor
        if settings.axis == 0:
            return x.unsqueeze(2).expand(batch, n, factor).reshape(batch, n * factor)
        return x.unsqueeze(1).expand(batch, factor, n).reshape(batch * factor, n)


class _ReshapeConcat(Layer):
    changes_rows = True

    def slots_and_width(self, least: int) -> tuple[int, int]:
        """Return s and the joint width of the inputs (B, s, d_i)."""
        shapes = self.in_shapes
        self.same_rows()
        fits = shapes and all(len(shape) == 2 for shape in shapes) and len({shape[0] for shape in shapes}) == 1
        if not fits or shapes[0][0] < least:
            raise self.refuse(f"inputs (B, s, d) of one number of slots s, at least {least}")
        return shapes[0][0], sum(shape[1] for shape in shapes)


@LAYERS.register("FusedReshapeConcat")
class FusedReshapeConcat(_ReshapeConcat):
    """Split sequences into history and target, the inputs side by side.

    Inputs (B, s, d_i), D = sum d_i, give two tensors: the first s - 1 slots as rows of their own, ((s - 1) B, D),
    a sample's rows together and in order; and the last slot, (B, D).

    Source: Zhou et al. 2018 (Deep Interest Network).

    Example:
        >>> layer = FusedReshapeConcat([(3, 2), (3, 1)])
        >>> history, target = layer(torch.zeros(4, 3, 2), torch.ones(4, 3, 1))
        >>> tuple(history.shape), tuple(target.shape)
        ((8, 3), (4, 3))
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Return the shapes of history and target."""
        slots, width = self.slots_and_width(2)
        rows = self.same_rows()
        return [with_rows((width,), rows.times(slots - 1)), with_rows((width,), rows)]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return history and target."""
        z = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 2)  # (B, s, D)
        return z[:, :-1].flatten(0, 1), z[:, -1]


@LAYERS.register("FusedReshapeConcatGeneral")
class FusedReshapeConcatGeneral(_ReshapeConcat):
    """Put sequences side by side and make every slot a row: inputs (B, s, d_i) -> (s B, sum d_i).

    Example:
        >>> FusedReshapeConcatGeneral([(3, 2), (3, 1)])(torch.zeros(4, 3, 2), torch.ones(4, 3, 1)).shape
        torch.Size([12, 3])
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Return the joint width, with s times the rows."""
        slots, width = self.slots_and_width(1)
        return [with_rows((width,), self.same_rows().times(slots))]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return a row for every slot."""
        return (inputs[0] if len(inputs) == 1 else torch.cat(inputs, 2)).flatten(0, 1)
