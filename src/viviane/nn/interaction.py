"""DLRM's dot interaction."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.ops.dot_interaction import TableRows, dot_interaction, num_pairs


class InteractionParameters(Settings):
    """Parameters of `Interaction`.

    Args:
        pad: append a column of zeros, as HugeCTR does to keep the width even.
        self_interaction: take each vector's product with itself too, i >= j.
    """

    pad: bool = True
    self_interaction: bool = False


@LAYERS.register("Interaction")
class Interaction(Layer):
    """Dot products of all pairs of vectors, after the dense vector itself.

    [(B, d), (B, s, d)] -> (B, d + (s + 1) s / 2 [+ 1]): the dense vector, then z_i . z_j for i > j of
    z = [dense, e_1 ... e_s], row by row, then a zero if `pad`. With the embeddings (B, s, d) alone:
    (B, s (s - 1) / 2 [+ 1]). On a GPU forward and backward are one kernel each, that reads the vectors once; see
    `viviane.ops.dot_interaction`.

    Source: Naumov et al. 2019 (DLRM).

    Example:
        >>> import torch
        >>> layer = Interaction([(2,), (1, 2)])
        >>> layer(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0]]])).tolist()
        [[1.0, 2.0, 11.0, 0.0]]
    """

    Parameters = InteractionParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the shapes."""
        shapes = self.in_shapes
        alone = len(shapes) == 1 and len(shapes[0]) == 2
        both = len(shapes) == 2 and len(shapes[0]) == 1 and len(shapes[1]) == 2 and shapes[0][0] == shapes[1][1]
        if not alone and not both:
            raise self.refuse("(B, d) and (B, s, d), or (B, s, d) alone")
        settings = cast(InteractionParameters, self.settings)
        pairs = num_pairs(shapes[-1][0] + int(both), settings.self_interaction)
        return [((shapes[0][0] if both else 0) + pairs + int(settings.pad),)]

    def forward(self, *inputs: Tensor | TableRows) -> Tensor:
        """Return the dense vector and the dot products; embeddings may be given by the rows that hold them."""
        settings = cast(InteractionParameters, self.settings)
        dense = cast(Tensor, inputs[0]) if len(inputs) == 2 else None
        return dot_interaction(dense, inputs[-1], pad=settings.pad, itself=settings.self_interaction)
