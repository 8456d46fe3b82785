"""How often ids come up, estimated while they stream past."""

from __future__ import annotations

from typing import Final, cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Size

EMPTY_ID: Final = -(2**63)
"""Marks padding in a tensor of ids."""


class LogFrequencyParameters(Settings):
    """Parameters of `LogFrequency`.

    Args:
        num_buckets: H; ids with the same remainder by H share an estimate. The column's num_ids keeps all apart.
        rate: a, the weight of the newest gap between two batches with an id, and of the newest count in one.
        first_counted: places before it are estimated and not counted: 1 counts sampled negatives alone, which stand
            behind the row's own item.
    """

    num_buckets: Size
    rate: float = Field(default=0.01, gt=0, le=1)
    first_counted: int = Field(default=0, ge=0)


@LAYERS.register("LogFrequency")
class LogFrequency(Layer):
    """Logarithm of how often an id comes up in a batch, estimated in training: ids (B, S) -> log q (B, S).

        at step t, for an id h that occurs c times in the batch
            D[h] = (1 - a) D[h] + a (t - A[h]);  A[h] = t         D[h] = t at the first time
            C[h] = (1 - a) C[h] + a c                             C[h] = c at the first time
        log q = log C[h] - log D[h]                               an id that never came up: -log of the number of steps

    D is the mean number of steps from one batch with the id to the next, C how often it occurs in such a batch: q is
    the expected number of places that hold it, above 1 for ids in every batch. Evaluation does not count.
    An empty place gives 0. No gradient.

    Source: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    algorithm 2; the first gap starts the mean there from a constant, and C is 1, as if a batch never held an item
    twice: with thousands of items that is far from true, and the frequent ones would be pushed away.

    Example:
        >>> layer = LogFrequency([(1,)], num_buckets=10, rate=0.5)
        >>> for step in range(4):
        ...     log_q = layer(torch.tensor([[3], [4 + step % 2]]))
        >>> log_q.exp().round(decimals=2).tolist()  # the first in every batch, the second in every other
        [[1.0], [0.5]]
    """

    Parameters = LogFrequencyParameters
    id_inputs = (0,)
    process_buffers = ("running_interval", "running_count", "last_seen", "steps")

    def build(self, init: Initializer) -> list[Shape]:
        """Create D, C, A and the step count."""
        (places,) = self.one_input(1)
        settings = cast(LogFrequencyParameters, self.settings)
        if settings.first_counted >= places:
            raise self.refuse(f"ids (B, S), S > {settings.first_counted}, the first place that counts")
        init.check_size("last_seen", 2 * (settings.num_buckets + 1))
        # One bucket more takes the empty places.
        self.register_buffer("running_interval", torch.zeros(settings.num_buckets + 1))
        self.register_buffer("running_count", torch.zeros(settings.num_buckets + 1))
        self.register_buffer("last_seen", torch.zeros(settings.num_buckets + 1, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return [(places,)]

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return log q, after counting the batch in training."""
        settings = cast(LogFrequencyParameters, self.settings)
        empty = ids == EMPTY_ID
        buckets = torch.where(empty, settings.num_buckets, ids.remainder(settings.num_buckets))
        interval, count = cast(Tensor, self.running_interval), cast(Tensor, self.running_count)
        if self.training:
            self._count(buckets[:, settings.first_counted :].flatten(), settings.rate)
        gap, known = interval[buckets], count[buckets] > 0
        steps = cast(Tensor, self.steps).to(gap.dtype)
        per_step = torch.where(known, count[buckets], 1.0) / torch.where(known, gap, steps).clamp_min(1.0)
        return per_step.log().masked_fill(empty, 0.0)

    def _count(self, buckets: Tensor, rate: float) -> None:
        interval, count = cast(Tensor, self.running_interval), cast(Tensor, self.running_count)
        last_seen, steps = cast(Tensor, self.last_seen), cast(Tensor, self.steps).add_(1)
        old, gap = interval[buckets], (steps - last_seen[buckets]).to(interval.dtype)
        known, before = old > 0, count[buckets]
        # An id that occurs several times in the batch writes the same number several times, and adds as often.
        interval[buckets] = torch.where(known, old + rate * (gap - old), gap)
        count[buckets] = before * (1 - rate)  # 0 for an id that is new
        count.index_add_(0, buckets, torch.where(known, rate, 1.0).to(count.dtype))
        last_seen[buckets] = steps.expand_as(buckets)
