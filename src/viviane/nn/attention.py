"""Softmax, masks, matrix products and attention.

Shapes: B samples, H heads, L_q queries, L_k keys, h the hidden width of all heads, d = h / H that of one.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size

MASKED = -10000.0
"""What HugeCTR adds to the score of a masked place; it fits fp16, where minus infinity would turn into NaN."""

_SMALL = 1e-6
# Up to this many scores per head plain steps beat torch's blocked CPU kernel, made for long sequences: 21 places
# take 11 ms against 19, 64 take 18 against 14 (forward and backward, 512 and 128 rows, 4 heads).
_SHORT = 32 * 32


def masked_softmax(x: Tensor, mask: Tensor, factor: float = 1.0) -> Tensor:
    """Softmax over the last dimension where the mask is 1, computed in float32 for 16-bit input.

        z = x factor - 10000 (1 - mask)
        y = exp(z - max z) / (sum exp(z - max z) + 1e-6)

    Where a row is masked altogether, the mask cancels out and the row is a plain softmax.

    Args:
        x: scores, (..., n).
        mask: 1 keeps a place, 0 masks it; any shape that broadcasts to x.
        factor: multiplies the scores.

    Example:
        >>> masked_softmax(torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]])).round(decimals=4).tolist()
        [[0.5, 0.5, 0.0]]
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) * factor + (1 - mask.to(wide)) * MASKED
    e = (z - z.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + _SMALL)).to(x.dtype)


class SoftmaxParameters(Settings):
    """Parameters of `Softmax`: factor multiplies the scores of the masked form."""

    factor: float = 1.0


@LAYERS.register("Softmax")
class Softmax(Layer):
    """Softmax over the last dimension: y = exp(x) / sum exp(x), any shape.

    With a second input, the mask, it is HugeCTR's masked softmax (see `masked_softmax`); the mask has the scores'
    rank, and each of its dimensions is the scores' or 1: (B, H, L_q, L_k) and (B, 1, 1, L_k), for example.

    Example:
        >>> Softmax([(2,)])(torch.zeros(1, 2)).tolist()
        [[0.5, 0.5]]
    """

    Parameters = SoftmaxParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the mask against the scores."""
        shapes = self.in_shapes
        if len(shapes) not in (1, 2) or not shapes[0]:
            raise self.refuse("scores (B, ..., n), and a mask if there is one")
        if len(shapes) == 1:
            if cast(SoftmaxParameters, self.settings).factor != 1.0:
                raise self.refuse("scores and a mask: factor belongs to the masked form")
            return [shapes[0]]
        if len(shapes[1]) != len(shapes[0]) or any(m not in (1, n) for n, m in zip(*shapes, strict=True)):
            raise self.refuse("scores, and a mask of the same rank whose dimensions are the scores' or 1")
        return [shapes[0]]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the shares, which sum to 1."""
        if mask is None:
            return F.softmax(x, -1)
        return masked_softmax(x, mask, cast(SoftmaxParameters, self.settings).factor)


class SequenceMaskParameters(Settings):
    """Parameters of `SequenceMask`.

    Args:
        max_sequence_len_from: L_q, of the form with two inputs.
        max_sequence_len_to: L_k, of the form with two inputs.
        max_sequence_len: L, of HugeCTR's older form with one input (up to 4.3.0).
    """

    max_sequence_len_from: Size | None = None
    max_sequence_len_to: Size | None = None
    max_sequence_len: Size | None = None


@LAYERS.register("SequenceMask")
class SequenceMask(Layer):
    """Lengths to a mask of ones and zeros.

        two inputs (B, 1)   mask[b, 0, i, j] = 1 where i < from_b and j < to_b     (B, 1, L_q, L_k)
        one input (B, 1)    mask[b, 0, 0, j] = 1 where j < length_b                (B, 1, 1, L)

    The lengths are numbers of any type, such as dense columns. They get no gradient.

    Example:
        >>> layer = SequenceMask([(1,)], max_sequence_len=3)
        >>> layer(torch.tensor([[2.0]])).tolist()
        [[[[1.0, 1.0, 0.0]]]]
    """

    Parameters = SequenceMaskParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check that lengths and maxima belong together."""
        settings = cast(SequenceMaskParameters, self.settings)
        both = settings.max_sequence_len_from is not None and settings.max_sequence_len_to is not None
        one = settings.max_sequence_len is not None
        neither = settings.max_sequence_len_from is None and settings.max_sequence_len_to is None
        fits = (both and not one) if len(self.in_shapes) == 2 else (one and neither)
        if not fits or len(self.in_shapes) not in (1, 2) or any(shape != (1,) for shape in self.in_shapes):
            raise self.refuse(
                "two inputs (B, 1) with max_sequence_len_from and max_sequence_len_to, or one with max_sequence_len"
            )
        self.last = settings.max_sequence_len_to or settings.max_sequence_len or 0
        self.first = settings.max_sequence_len_from or 1
        return [(1, self.first, self.last)]

    def forward(self, length: Tensor, length_to: Tensor | None = None) -> Tensor:
        """Return the mask, in float32 or the lengths' floating type."""
        dtype = length.dtype if length.is_floating_point() else torch.float32
        to = length if length_to is None else length_to
        columns = torch.arange(self.last, device=to.device) < to.view(-1, 1, 1, 1)  # (B, 1, 1, L_k)
        if length_to is None:
            return columns.to(dtype)
        rows = torch.arange(self.first, device=length.device).unsqueeze(1) < length.view(-1, 1, 1, 1)
        return (rows & columns).to(dtype)


class MultiHeadAttentionParameters(Settings):
    """Parameters of `MultiHeadAttention`.

    Args:
        num_attention_heads: H; the hidden width must be a multiple of it.
        transpose_b: with two inputs (B, H, m, n): True multiplies by the transposed second one.
        scores: with three inputs: return the bare scores and the values by head, as HugeCTR 4.2 did, instead of
            the attention's result.
    """

    num_attention_heads: Size = 1
    transpose_b: bool = False
    scores: bool = False


@LAYERS.register("MultiHeadAttention")
class MultiHeadAttention(Layer):
    """Scaled dot-product attention of several heads, without projections.

        Q (B, L_q, h), K and V (B, L_k, h) [, mask (B, 1, L_q or 1, L_k)]    -> (B, L_q, h)
        for each head:  softmax(Q K^T / sqrt(d) - 10000 (1 - mask)) V        the heads side by side

    HugeCTR's older forms take the steps apart, with `Softmax` between them, which then does the scaling:

        Q, K, V with scores=True (4.2)            Q K^T (B, H, L_q, L_k), and V by head (B, H, L_k, d)
        (B, H, m, d), (B, H, k, d), transpose_b   a b^T, (B, H, m, k)
        (B, H, m, k), (B, H, k, d)                a b, heads side by side, (B, m, H d)

    HugeCTR adds 1e-6 to the softmax's divisor, which is at least 1; torch's attention does not, so results
    differ by at most a millionth part.

    Source: Vaswani et al. 2017.

    Example:
        >>> layer = MultiHeadAttention([(5, 8)] * 3, num_attention_heads=2)
        >>> q = torch.randn(3, 5, 8)
        >>> layer(q, q, q).shape
        torch.Size([3, 5, 8])
    """

    Parameters = MultiHeadAttentionParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Check the shapes of one of the four forms."""
        settings = cast(MultiHeadAttentionParameters, self.settings)
        shapes = self.in_shapes
        if len(shapes) == 2:
            return self._products(settings.transpose_b)
        heads = settings.num_attention_heads
        if len(shapes) not in (3, 4) or any(len(shape) != 2 for shape in shapes[:3]):
            raise self.refuse("Q, K, V (B, L, h) and perhaps a mask, or two inputs (B, H, m, n)")
        (queries, h), (keys, _), _ = shapes[:3]
        if shapes[1] != shapes[2] or shapes[1][1] != h or h % heads:
            raise self.refuse(f"Q (B, L_q, h), K and V (B, L_k, h), h a multiple of {heads} heads")
        if len(shapes) == 4 and (settings.scores or shapes[3] not in ((1, queries, keys), (1, 1, keys))):
            raise self.refuse(f"a mask (B, 1, {queries} or 1, {keys}), and scores left False")
        if settings.scores:
            return [(heads, queries, keys), (heads, keys, h // heads)]
        return [(queries, h)]

    def _products(self, transposed: bool) -> list[Shape]:
        a, b = self.in_shapes
        inner = 2 if transposed else 1
        if len(a) != 3 or len(b) != 3 or a[0] != b[0] or a[2] != b[inner]:
            raise self.refuse("(B, H, m, d), (B, H, k, d)" if transposed else "(B, H, m, k), (B, H, k, d)")
        return [(a[0], a[1], b[1])] if transposed else [(a[1], a[0] * b[2])]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention's result, or that of the step."""
        settings = cast(MultiHeadAttentionParameters, self.settings)
        if len(inputs) == 2:
            a, b = inputs
            return a @ b.transpose(-1, -2) if settings.transpose_b else (a @ b).transpose(1, 2).flatten(2)
        q, k, v = (_by_head(one, settings.num_attention_heads) for one in inputs[:3])
        if settings.scores:
            return q @ k.transpose(-1, -2), v
        bias = None if len(inputs) == 3 else (1 - inputs[3].to(q.dtype)) * MASKED
        scale = 1 / math.sqrt(q.shape[-1])
        if q.device.type == "cpu" and q.dtype.itemsize >= 4 and q.shape[2] * k.shape[2] <= _SHORT:
            scores = (q * scale) @ k.transpose(-1, -2)
            result = F.softmax(scores if bias is None else scores + bias, -1) @ v
        else:
            result = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        return result.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    batch, length, h = x.shape
    return x.reshape(batch, length, heads, h // heads).transpose(1, 2)  # (B, L, h) -> (B, H, L, d)
