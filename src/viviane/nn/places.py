"""Layers over the places of a sequence, some of which may be empty."""

from __future__ import annotations

from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.frequency import EMPTY_ID
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


@LAYERS.register("MeanPlaces")
class MeanPlaces(_Places):
    """Mean over the places that hold something: (B, L, d) and a mask (B, L) of ones and zeros -> (B, d).

    Zeros where no place does.

    Example:
        >>> MeanPlaces([(2, 1), (2,)])(torch.tensor([[[3.0], [5.0]]]), torch.tensor([[1.0, 0.0]])).tolist()
        [[3.0]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Drop the places."""
        return [self.places(need_mask=True)[1:]]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the means."""
        held = mask.to(x.dtype)
        return (held.unsqueeze(1) @ x).squeeze(1) / held.sum(1, keepdim=True).clamp_min(1)


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
        if x.is_cuda:  # whose gradient of an index is slow where it has to be the same in each run
            place = torch.arange(len(self.weight), device=x.device)
            picks = (after.unsqueeze(2) == place) & held.unsqueeze(2)
            return x + picks.to(x.dtype) @ self.weight.to(x.dtype)
        return x + (self.weight[after] * held.unsqueeze(2)).to(x.dtype)


class TimeEmbeddingParameters(Settings):
    """Parameters of `TimeEmbedding`.

    Args:
        num_buckets: K, the number of vectors; whatever is older shares the last.
        unit: time that counts as one, in the columns' unit: 3600 for seconds where an hour is the finest difference.
    """

    num_buckets: int = Field(default=32, ge=2, le=63)
    unit: int = Field(default=1, ge=1)


@LAYERS.register("TimeEmbedding")
class TimeEmbedding(_Places):
    """Adds a learned vector for the time from each event to the last place, drawn from N(0, 0.02).

        age_i = max(time_L - time_i, 0) / unit
        y_i   = x_i + P[min(floor(log2(1 + age_i)), K - 1)]

    Vectors (B, L, d) and times (B, L), int64 -> (B, L, d). A place without a time stays as it is.

    Source: Chen et al. 2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", whose positions
    are such times; the logarithm keeps their number small.

    Example:
        >>> layer = TimeEmbedding([(3, 1), (3,)], num_buckets=4)
        >>> layer.load_state_dict({"weight": torch.tensor([[0.0], [10.0], [20.0], [30.0]])})
        <All keys matched successfully>
        >>> layer(torch.zeros(1, 3, 1), torch.tensor([[10, 99, 100]])).tolist()
        [[[30.0], [10.0], [0.0]]]
    """

    Parameters = TimeEmbeddingParameters
    id_inputs = (1,)

    def build(self, init: Initializer) -> list[Shape]:
        """Create P (K, d)."""
        shape = self.places(need_mask=True)
        num_buckets = cast(TimeEmbeddingParameters, self.settings).num_buckets
        self.weight = init.normal("weight", (num_buckets, shape[1]), _POSITION_STD)
        # Whole numbers: a logarithm might put a power of two into the bucket below.
        bounds = torch.tensor([2**k - 1 for k in range(1, num_buckets)])
        self.register_buffer("bounds", bounds, persistent=False)
        return [shape]

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return the vectors with their times."""
        settings = cast(TimeEmbeddingParameters, self.settings)
        empty = (times == EMPTY_ID) | (times[:, -1:] == EMPTY_ID)
        age = (times[:, -1:] - times).masked_fill(empty, 0).clamp_min(0) // settings.unit
        bucket = torch.bucketize(age, cast(Tensor, self.bounds), right=True)
        return x + (self.weight[bucket] * ~empty.unsqueeze(2)).to(x.dtype)
