"""Layers over the places of a sequence, some of which may be empty."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape

_POSITION_STD = 0.02


class _Places(Layer):
    def places(self, *, need_mask: bool) -> Shape:
        """Return (L, d) of the vectors, or refuse."""
        shapes = self.in_shapes
        counts = (2,) if need_mask else (1, 2)
        if len(shapes) not in counts or len(shapes[0]) != 2 or any(shape != shapes[0][:1] for shape in shapes[1:]):
            raise self.refuse("vectors (B, L, d) and " + ("" if need_mask else "perhaps ") + "their mask (B, L)")
        return shapes[0]


@LAYERS.register("MaskPlaces")
class MaskPlaces(_Places):
    """Zeros where a place is empty: vectors (B, L, d) and a mask (B, L) of ones and zeros -> (B, L, d).

    Example:
        >>> MaskPlaces([(2, 1), (2,)])(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]])).tolist()
        [[[1.0], [0.0]]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the vectors' shape."""
        return [self.places(need_mask=True)]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors, or zeros."""
        return x * mask.to(x.dtype).unsqueeze(2)


@LAYERS.register("PositionEmbedding")
class PositionEmbedding(_Places):
    """Adds a learned vector for each place, drawn from N(0, 0.02): (B, L, d) -> (B, L, d).

        y_i = x_i + P[i]
        y_i = x_i + P[number of places after i whose mask is 1]      with a mask (B, L): counted back from the last

    Counting back gives the newest event of a history the same vector however long the history is; empty places stay
    as they are.

    Example:
        >>> layer = PositionEmbedding([(3, 1), (3,)])
        >>> layer.load_state_dict({"weight": torch.tensor([[10.0], [20.0], [30.0]])})
        <All keys matched successfully>
        >>> layer(torch.zeros(1, 3, 1), torch.tensor([[1.0, 0.0, 1.0]])).tolist()
        [[[20.0], [0.0], [10.0]]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Create P (L, d)."""
        shape = self.places(need_mask=False)
        self.weight = init.normal("weight", tuple(shape), _POSITION_STD)
        return [shape]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the vectors with their places."""
        if mask is None:
            return x + self.weight.to(x.dtype)
        held = mask > 0
        after = held.flip(1).cumsum(1).flip(1) - held.to(torch.int64)
        return x + (self.weight[after] * held.unsqueeze(2)).to(x.dtype)
