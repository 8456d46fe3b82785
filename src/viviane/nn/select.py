"""Layers that pick parts of a tensor, multiply matrices, or change the number type."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.core.errors import SchemaError
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import MAX_SIZE, Rows, rows_of, with_rows


class SelectParameters(Settings):
    """Parameters of `Select`: dim counts from the batch dimension, which is 0; index lists what to keep."""

    dim: int = Field(ge=1)
    index: tuple[int, ...] = Field(min_length=1)


@LAYERS.register("Select")
class Select(Layer):
    """Pick places along one dimension, in the given order; a place may be picked twice.

    Example:
        >>> layer = Select([(3, 2)], dim=1, index=(2, 0))
        >>> layer(torch.arange(6.0).view(1, 3, 2)).tolist()
        [[[4.0, 5.0], [0.0, 1.0]]]
    """

    Parameters = SelectParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the places against the dimension."""
        settings = cast(SelectParameters, self.settings)
        shape, axis = self.one_input(), settings.dim - 1
        if axis >= len(shape) or not all(0 <= place < shape[axis] for place in settings.index):
            raise self.refuse(f"an input whose dimension {settings.dim} is longer than {max(settings.index)}")
        self.register_buffer("index", torch.tensor(settings.index, dtype=torch.int64), persistent=False)
        return [(*shape[:axis], len(settings.index), *shape[axis + 1 :])]

    def forward(self, x: Tensor) -> Tensor:
        """Return the picked places."""
        return x.index_select(cast(SelectParameters, self.settings).dim, cast(Tensor, self.index))


class GatherParameters(Settings):
    """Parameters of `Gather`: numbers of the rows to keep."""

    indices: tuple[Annotated[int, Field(le=MAX_SIZE)], ...] = Field(min_length=1)


@LAYERS.register("Gather")
class Gather(Layer):
    """Pick rows: (B, n) -> (len(indices), n). Dimension 0 is the batch, so the result has a fixed number of rows.

    `Select` picks within each sample, which is what a model of single rows needs.

    Example:
        >>> layer = Gather([(2,)], indices=(2, 0))
        >>> layer(torch.arange(6.0).view(3, 2)).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """

    Parameters = GatherParameters
    changes_rows = True

    def build(self, init: Initializer) -> list[Shape]:
        """Note the rows."""
        indices = cast(GatherParameters, self.settings).indices
        shape = self.one_input()
        if min(indices) < 0:
            raise self.refuse("row numbers from 0")
        self.register_buffer("indices", torch.tensor(indices, dtype=torch.int64), persistent=False)
        return [with_rows(shape, Rows(len(indices), of_batch=False))]

    def forward(self, x: Tensor) -> Tensor:
        """Return the picked rows.

        Raises:
            SchemaError: the batch has fewer rows.
        """
        last = max(cast(GatherParameters, self.settings).indices)
        if last >= x.shape[0]:
            raise SchemaError(
                "a row to gather is not in the batch",
                where=f"layer {self.name!r}",
                value=last,
                allowed=f"0 <= index < {x.shape[0]}",
                fix="use Select to pick within each sample",
            )
        return x.index_select(0, cast(Tensor, self.indices))


@LAYERS.register("MatrixMultiply")
class MatrixMultiply(Layer):
    """Matrix product of two inputs.

        (B, m, n), (B, n, k)          -> (B, m, k)          for each sample
        (B, H, m, n), (B, H, n, k)    -> (B, H, m, k)       for each sample and head
        (B, n), (B, n, k)             -> (B, k)             a row vector times each sample's matrix
        (B, n), (n, k)                -> (B, k)             the second one with a fixed number of rows, as of `Gather`

    Example:
        >>> layer = MatrixMultiply([(2, 3), (3, 4)])
        >>> layer(torch.ones(5, 2, 3), torch.ones(5, 3, 4)).shape
        torch.Size([5, 2, 4])
    """

    changes_rows = True

    def build(self, init: Initializer) -> list[Shape]:
        """Check that the inner dimensions agree."""
        allowed = "(B, m, n) and (B, n, k); (B, H, m, n) and (B, H, n, k); (B, n) and (B, n, k); or (B, n) and (n, k)"
        if len(self.in_shapes) != 2:
            raise self.refuse(allowed)
        a, b = self.in_shapes
        if len(a) == 1 and len(b) == 1:
            if rows_of(b) != Rows(a[0], of_batch=False):
                raise self.refuse(allowed)
            return [with_rows(b, rows_of(a))]
        rows = self.same_rows()
        if (len(a), len(b)) not in ((2, 2), (3, 3), (1, 2)) or a[-1] != b[-2] or (len(a) == 3 and a[0] != b[0]):
            raise self.refuse(allowed)
        return [with_rows((*a[:-1], b[-1]), rows)]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product."""
        if a.dim() == 2 and b.dim() == 3:
            return (a.unsqueeze(1) @ b).squeeze(1)
        return a @ b


class CastParameters(Settings):
    """Parameters of `Cast`: the number type of the output."""

    dtype: Literal["float16", "bfloat16", "float32"] = "float16"


@LAYERS.register("Cast")
class Cast(Layer):
    """Change the number type, by default to float16, as HugeCTR's mixed-precision graphs did before 3.0.

    `Solver.precision` chooses the type of a whole model; this layer is for graphs that set it per layer. A layer
    with weights computes in the weights' type, float32: cast back before it, or train in a 16-bit precision.

    Example:
        >>> Cast([(2,)])(torch.ones(1, 2)).dtype
        torch.float16
    """

    Parameters = CastParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the same numbers, rounded."""
        return x.to(getattr(torch, cast(CastParameters, self.settings).dtype))
