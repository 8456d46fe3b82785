"""Layers that rearrange: concatenate, reshape, slice."""

from __future__ import annotations

import math
from typing import cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Rows, Size, rows_of, with_rows


class ConcatParameters(Settings):
    """Parameters of `Concat`: axis counts from the batch dimension, which is 0."""

    axis: int = Field(default=1, ge=1)


@LAYERS.register("Concat")
class Concat(Layer):
    """Join inputs along one axis: (B, n1), (B, n2) -> (B, n1 + n2); (B, s, d) inputs along axis 1 or 2.

    Example:
        >>> Concat([(2,), (3,)]).out_shapes
        [(5,)]
    """

    Parameters = ConcatParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the other axes agree."""
        axis = cast(ConcatParameters, self.settings).axis - 1
        shapes = self.in_shapes
        if not shapes or any(len(shape) != len(shapes[0]) or axis >= len(shape) for shape in shapes):
            raise self.refuse(f"inputs of one rank that have axis {axis + 1}")
        rest = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        if len(rest) != 1:
            raise self.refuse(f"inputs that differ in axis {axis + 1} only")
        first = shapes[0]
        return [(*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the joined tensor."""
        return torch.cat(inputs, cast(ConcatParameters, self.settings).axis)


class ReshapeParameters(Settings):
    """Parameters of `Reshape`; give exactly one form.

    Args:
        leading_dim: the last dimension of the result. A row of n leading_dim numbers gives n rows.
        time_step: with leading_dim: (B, time_step, leading_dim).
        selected: slots to keep of a (B, s, d) input: (B, len(selected) * d). HugeCTR writes it as selected=True
            and `selected_slots`.
        selected_slots: the slots, beside selected=True.
        shape: the result's shape without the batch; one entry may be -1.
    """

    leading_dim: Size | None = None
    time_step: Size | None = None
    selected: bool | tuple[int, ...] | None = None
    selected_slots: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def slots(self) -> tuple[int, ...] | None:
        """The slots to keep, however they were written."""
        return self.selected_slots if isinstance(self.selected, bool) else self.selected

    @model_validator(mode="after")
    def _check(self) -> ReshapeParameters:
        if sum(form is not None for form in (self.leading_dim, self.slots, self.shape)) != 1:
            raise ValueError("give exactly one of leading_dim, selected and shape")
        if self.time_step is not None and self.leading_dim is None:
            raise ValueError("time_step needs leading_dim")
        if (self.selected is True) != (self.selected_slots is not None):
            raise ValueError("selected=True and selected_slots belong together")
        return self


@LAYERS.register("Reshape")
class Reshape(Layer):
    """Give a tensor another shape.

        leading_dim n              (B, ...) -> (B, n); a sample of r n numbers becomes r rows, (r B, n), and r rows
                                   of a sample may become one again
        leading_dim n, time_step t (B, ...) -> (B, t, n)
        selected                   (B, s, d) -> (B, len(selected) d), the named slots
        shape                      (B, ...) -> (B, *shape)

    Example:
        >>> Reshape([(26, 16)], leading_dim=416).out_shapes
        [(416,)]
        >>> Reshape([(26, 16)], leading_dim=16).out_shapes[0].rows
        Rows(count=26, of_batch=True)
    """

    Parameters = ReshapeParameters
    changes_rows = True

    def build(self, init: Initializer) -> list[Shape]:
        """Work out the result's shape."""
        shape = self._result()
        before, after = rows_of(self.in_shapes[0]), rows_of(shape)
        self._view = before.count, after.count, tuple(shape)
        """Rows of the input and of the result for each row of the batch, and the result's shape."""
        return [shape]

    def _result(self) -> Shape:
        settings = cast(ReshapeParameters, self.settings)
        shape = self.one_input()
        rows = rows_of(shape)
        if settings.slots is not None:
            if len(shape) != 2 or any(not 0 <= slot < shape[0] for slot in settings.slots):
                raise self.refuse(f"(B, s, d) with s > {max(settings.slots, default=0)}, the largest selected slot")
            self.register_buffer("slots", torch.tensor(settings.slots, dtype=torch.int64), persistent=False)
            return with_rows((len(settings.slots) * shape[1],), rows)
        size = math.prod(shape)
        if settings.leading_dim is not None:
            wanted = (*((settings.time_step,) if settings.time_step else ()), settings.leading_dim)
            count, left = divmod(size * rows.count, math.prod(wanted))
            if left or not count:
                raise self.refuse(f"an input whose {size * rows.count} elements a sample fill rows of {wanted}")
            return with_rows(wanted, Rows(count, rows.of_batch))
        wanted = settings.shape or ()
        known = math.prod(n for n in wanted if n != -1)
        if wanted.count(-1) == 1 and known and size % known == 0:
            wanted = tuple(size // known if n == -1 else n for n in wanted)
        if min(wanted, default=0) < 1 or math.prod(wanted) != size:
            raise self.refuse(f"an input whose {size} elements a row fill {wanted}")
        return with_rows(wanted, rows)

    def forward(self, x: Tensor) -> Tensor:
        """Return the reshaped tensor."""
        slots = self._buffers.get("slots")
        if slots is not None:
            x = x.index_select(1, slots)
        before, after, shape = self._view
        return x.reshape(x.shape[0] * after // before, *shape)


class SliceParameters(Settings):
    """Parameters of `Slice`: ranges [start, stop) of the last dimension; they may overlap."""

    ranges: tuple[tuple[int, int], ...] = Field(min_length=1)


@LAYERS.register("Slice")
class Slice(Layer):
    """Cut the last dimension into ranges, one output each.

    Example:
        >>> Slice([(10,)], ranges=((0, 4), (2, 10))).out_shapes
        [(4,), (8,)]
    """

    Parameters = SliceParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the ranges against the input's width."""
        shape, ranges = self.one_input(), cast(SliceParameters, self.settings).ranges
        *front, width = shape or (0,)
        if any(not 0 <= start < stop <= width for start, stop in ranges):
            raise self.refuse(f"ranges [start, stop) inside the last dimension, not {ranges}")
        return [(*front, stop - start) for start, stop in ranges]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the ranges, a tensor alone where there is one."""
        parts = tuple(x[..., start:stop] for start, stop in cast(SliceParameters, self.settings).ranges)
        return parts if len(parts) > 1 else parts[0]
