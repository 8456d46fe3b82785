"""Two-tower models: unit vectors, and a softmax over the items of the batch."""

from __future__ import annotations

from typing import cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.nn.candidates import log_sum_over_candidates
from viviane.nn.cross_entropy import as_float32, weighted_mean
from viviane.nn.frequency import EMPTY_ID
from viviane.nn.init import Initializer
from viviane.nn.loss import Loss
from viviane.nn.registry import LAYERS, Layer, Shape


@LAYERS.register("L2Normalize")
class L2Normalize(Layer):
    """x / max(|x|, 1e-12), the length over the last dimension: unit vectors, any shape.

    Example:
        >>> L2Normalize([(2,)])(torch.tensor([[3.0, 4.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Keep the shape."""
        return [self.one_input()]

    def forward(self, x: Tensor) -> Tensor:
        """Return the unit vectors."""
        return F.normalize(as_float32(x), dim=-1).to(x.dtype)


class SampledSoftmaxParameters(Settings):
    """Parameters of `SampledSoftmax`.

    Args:
        temperature: divides the scores; unit vectors want about 0.05 to 0.2.
        in_batch: the other rows' items are candidates; False leaves the sampled negatives alone.
    """

    temperature: float = Field(default=1.0, gt=0)
    in_batch: bool = True


@LAYERS.register("SampledSoftmax")
class SampledSoftmax(Layer):
    """How well a user's vector picks the row's item out of the items of the batch.

        user (B, d), items (B, d), ids (B, 1) [, log q (B, 1)]
        user (B, d), items (B, 1 + K, d), ids (B, 1 + K) [, log q (B, 1 + K)]      K sampled negatives behind the item
        s_bj = u_b . v_j / temperature                   z_bj = s_bj - log q_j
        log p_b = z_bb - log(exp z_bb + sum over candidates j with another id of exp z_bj)
        -> (B, 2): s_bb and log p_b, for `SampledSoftmaxLoss`

    The candidates are the items of all rows and the negatives of all rows, shared. log q corrects for candidates
    that come up more often than others, see `LogFrequency`. Empty places are left out.

    Source: Yi et al. 2019; negatives beside those of the batch: Yang et al. 2020, "Mixed Negative Sampling".

    Example:
        >>> layer = SampledSoftmax([(2,), (2,), (1,)])
        >>> out = layer(torch.eye(2), torch.eye(2), torch.tensor([[5], [6]]))
        >>> [round(x, 4) for x in out[0].tolist()]  # 1, and log(e / (e + 1))
        [1.0, -0.3133]
    """

    Parameters = SampledSoftmaxParameters
    id_inputs = (2,)

    def build(self, init: Initializer) -> list[Shape]:
        """Check the shapes."""
        shapes = self.in_shapes
        wide = len(shapes) in (3, 4) and len(shapes[0]) == 1 and len(shapes[1]) in (1, 2)
        places = shapes[1][0] if wide and len(shapes[1]) == 2 else 1
        if not wide or shapes[1][-1] != shapes[0][0] or any(shape != (places,) for shape in shapes[2:]):
            raise self.refuse("user (B, d), items (B, d) or (B, 1 + K, d), an id and perhaps a log q for each item")
        if places == 1 and not cast(SampledSoftmaxParameters, self.settings).in_batch:
            raise self.refuse("items with sampled negatives (B, 1 + K, d), as in_batch is False")
        return [(2,)]

    def forward(self, user: Tensor, items: Tensor, ids: Tensor, log_q: Tensor | None = None) -> Tensor:
        """Return score and log probability of each row's item."""
        settings = cast(SampledSoftmaxParameters, self.settings)
        with torch.autocast(user.device.type, enabled=False):
            u = as_float32(user)
            v = as_float32(items).to(u.dtype).view(ids.shape[0], ids.shape[1], u.shape[1])
            correction = torch.zeros_like(ids, dtype=u.dtype) if log_q is None else log_q.to(u.dtype)
            first = 0 if settings.in_batch else 1
            others, other_ids = v[:, first:].flatten(0, 1), ids[:, first:].flatten()
            score = (u * v[:, 0]).sum(1, keepdim=True) / settings.temperature
            own = score - correction[:, :1]
            shift = correction[:, first:].flatten().masked_fill(other_ids == EMPTY_ID, torch.inf)
            # The row's own item among them, and the same item of another row, are no wrong answers.
            log_p = own - log_sum_over_candidates(u / settings.temperature, others, shift, own, ids[:, :1], other_ids)
        return torch.cat([score, log_p], 1).to(user.dtype)


@LAYERS.register("SampledSoftmaxLoss")
class SampledSoftmaxLoss(Loss):
    """Cross-entropy of `SampledSoftmax`, weighted by the label: (B, 2) and (B, 1) -> a number.

        loss = -sum_b w_b y_b log p_b / sum_b w_b

    Rows of label 0 teach nothing by themselves; their items are candidates for the others. The prediction is
    sigmoid(s), which ranks as the score does.

    Example:
        >>> loss = SampledSoftmaxLoss([(2,), (1,)])
        >>> loss(torch.tensor([[0.0, -3.0], [0.0, -1.0]]), torch.tensor([[1.0], [0.0]])).item()
        1.5
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Check that there are score, log probability and one label."""
        if len(self.in_shapes) != 2 or self.in_shapes[0] != (2,) or self.in_shapes[1] not in ((1,), ()):
            raise self.refuse("the output (B, 2) of SampledSoftmax and a label (B, 1)")
        return [()]

    def mean_loss(
        self,
        output: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        class_weights: tuple[float, float] | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss of a batch.

        Raises:
            ConfigError: class weights or label smoothing, which a softmax over candidates does not have.
        """
        if class_weights is not None or label_smoothing:
            fix = "leave class_weights and label_smoothing out of the solver"
            raise ConfigError("a softmax over candidates has no classes to weigh or smooth", where=self.name, fix=fix)
        losses = -as_float32(output)[:, 1] * label.flatten().to(as_float32(output).dtype)
        return weighted_mean(losses, None if weight is None else weight.flatten())

    def predictions(self, output: Tensor) -> Tensor:
        """Return sigmoid(s), (B, 1)."""
        return output[:, :1].sigmoid()
