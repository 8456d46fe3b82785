"""DLRM's dot interaction."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape


class InteractionParameters(Settings):
    """Parameters of `Interaction`.

    Args:
        pad: append a column of zeros, as HugeCTR does to keep the width even.
    """

    pad: bool = True


class _PairwiseDots(torch.autograd.Function):
    """z (B, s, d) -> dots of its rows i > j, row by row, (B, s (s - 1) / 2).

    Torch's own backward of the triangle's selection scatters element by element; here the gradient is laid
    out as one symmetric matrix and multiplied once: dz = (G + G^T) z.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, lower: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(z, source)
        return torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, lower)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        z, source = ctx.saved_tensors
        batch, s, _ = z.shape
        # source[i, j] is the pair's place in the output; the diagonal reads an extra column of zeros
        padded = torch.nn.functional.pad(grads[0].to(z.dtype), (0, 1))
        symmetric = padded.index_select(1, source).view(batch, s, s)
        return torch.bmm(symmetric, z), None, None


def _pairwise_dots(z: Tensor, lower: Tensor, source: Tensor) -> Tensor:
    return cast(Tensor, _PairwiseDots.apply(z, lower, source))  # type: ignore[no-untyped-call]


@LAYERS.register("Interaction")
class Interaction(Layer):
    """Dot products of all pairs of vectors, after the dense vector itself.

    [(B, d), (B, s, d)] -> (B, d + (s + 1) s / 2 [+ 1]): the dense vector, then z_i . z_j for i > j of
    z = [dense, e_1 ... e_s], row by row, then a zero if `pad`. With the embeddings (B, s, d) alone:
    (B, s (s - 1) / 2 [+ 1]).

    Source: Naumov et al. 2019 (DLRM).

    Example:
        >>> layer = Interaction([(2,), (1, 2)])
        >>> layer(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0]]])).tolist()
        [[1.0, 2.0, 11.0, 0.0]]
    """

    Parameters = InteractionParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the shapes and lay out the triangle."""
        shapes = self.in_shapes
        alone = len(shapes) == 1 and len(shapes[0]) == 2
        both = len(shapes) == 2 and len(shapes[0]) == 1 and len(shapes[1]) == 2 and shapes[0][0] == shapes[1][1]
        if not alone and not both:
            raise self.refuse("(B, d) and (B, s, d), or (B, s, d) alone")
        s = shapes[-1][0] + (1 if both else 0)
        rows, columns = torch.tril_indices(s, s, -1)
        num_pairs = rows.numel()
        source = torch.full((s, s), num_pairs, dtype=torch.int64)
        source[rows, columns] = source[columns, rows] = torch.arange(num_pairs)
        self.register_buffer("lower", rows * s + columns, persistent=False)
        self.register_buffer("source", source.flatten(), persistent=False)
        pad = int(cast(InteractionParameters, self.settings).pad)
        return [((shapes[0][0] if both else 0) + num_pairs + pad,)]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the dense vector and the dot products."""
        if len(inputs) == 2:
            dense, embeddings = inputs
            z = torch.cat([dense.unsqueeze(1), embeddings.to(dense.dtype)], 1)
        else:
            z = inputs[0]
        parts = [_pairwise_dots(z, cast(Tensor, self.lower), cast(Tensor, self.source))]
        if len(inputs) == 2:
            parts.insert(0, inputs[0])
        if cast(InteractionParameters, self.settings).pad:
            parts.append(z.new_zeros(z.shape[0], 1))
        return torch.cat([part.to(z.dtype) for part in parts], 1) if len(parts) > 1 else parts[0]
