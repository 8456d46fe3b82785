"""The attention of HSTU as a layer: biases by place and by time, and the operation."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size
from viviane.ops.pointwise_attention import pointwise_attention

_BIAS_STD = 0.02


class PointwiseAttentionParameters(Settings):
    """Parameters of `PointwiseAttention`.

    Args:
        num_attention_heads: H; divides the widths.
        num_buckets: K, the number of time biases; whatever is older shares the last.
        unit: time that counts as one, in the times' unit: 3600 for seconds where an hour is the finest difference.
    """

    num_attention_heads: Size = 1
    num_buckets: int = Field(default=32, ge=2, le=62)
    unit: int = Field(default=1, ge=1)


@LAYERS.register("PointwiseAttention")
class PointwiseAttention(Layer):
    """Causal attention with SiLU weights in place of a softmax, and learned biases by distance and by time.

        q, k (B, L, H d), v (B, L, H e), mask (B, L) [, times (B, L), int64]  -> (B, L, H e)
        y_i = (1 / L) sum over j <= i with mask_j > 0 of silu(q_i . k_j + p[i - j] + r[bucket(t_i - t_j)]) v_j

    The number of weights that fire grows with the history: how much a user did is not normalised away. Biases begin at
    N(0, 0.02). See `viviane.ops.pointwise_attention`, whose kernel a GPU uses.

    Source: Zhai et al. 2024, "Actions Speak Louder than Words".

    Example:
        >>> import torch
        >>> layer = PointwiseAttention([(5, 8), (5, 8), (5, 8), (5,)], num_attention_heads=2)
        >>> x = torch.randn(3, 5, 8)
        >>> layer(x, x, x, torch.ones(3, 5)).shape
        torch.Size([3, 5, 8])
    """

    Parameters = PointwiseAttentionParameters
    id_inputs = (4,)

    def build(self, init: Initializer) -> list[Shape]:
        """Create p (L,), and r (K,) where there are times."""
        shapes, settings = self.in_shapes, cast(PointwiseAttentionParameters, self.settings)
        heads = settings.num_attention_heads
        fits = len(shapes) in (4, 5) and all(len(shape) == 2 for shape in shapes[:3]) and shapes[0] == shapes[1]
        fits = fits and shapes[0][0] == shapes[2][0] and all(shape == shapes[0][:1] for shape in shapes[3:])
        if not fits or shapes[0][1] % heads or shapes[2][1] % heads:
            raise self.refuse(f"q, k (B, L, h), v (B, L, e), widths multiples of {heads}, a mask and times (B, L)")
        self.position = init.normal("position", (shapes[0][0],), _BIAS_STD)
        self.time = init.normal("time", (settings.num_buckets,), _BIAS_STD) if len(shapes) == 5 else None
        return [shapes[2]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the sums."""
        settings = cast(PointwiseAttentionParameters, self.settings)
        heads = settings.num_attention_heads
        queries, keys, values = (one.reshape(*one.shape[:2], heads, one.shape[2] // heads) for one in (q, k, v))
        y = pointwise_attention(
            queries, keys, values, mask > 0, self.position, times, self.time, settings.unit
        )  # fmt: skip
        return y.flatten(2)
