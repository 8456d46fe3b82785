"""Layers of models that predict a sequence's next item at each of its places.

Shapes: B rows, L places of the history, d the width of vectors, K sampled negatives, N items of the catalogue.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.candidates import log_sum_over_candidates
from viviane.nn.cross_entropy import as_float32
from viviane.nn.frequency import EMPTY_ID
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape
from viviane.nn.rows import Rows, rows_of


@LAYERS.register("CausalMask")
class CausalMask(Layer):
    """Which place may look at which: a mask (B, L) of ones and zeros -> (B, 1, L, L), as attention takes it.

        y[b, 0, i, j] = 1 where j < i and mask[b, j] > 0, and where j = i

    Every place sees itself, an empty one too: softmax needs at least one position; its output is not used.

    Example:
        >>> CausalMask([(3,)])(torch.tensor([[1.0, 0.0, 1.0]]))[0, 0].tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Return (1, L, L)."""
        (length,) = self.one_input(1)
        return [(1, length, length)]

    def forward(self, mask: Tensor) -> Tensor:
        """Return the mask of pairs."""
        length = mask.shape[1]
        before = torch.ones(length, length, device=mask.device, dtype=mask.dtype).tril(-1)
        own = torch.eye(length, device=mask.device, dtype=mask.dtype)
        return ((mask > 0).to(mask.dtype).unsqueeze(1) * before + own).unsqueeze(1)


@LAYERS.register("LastPlace")
class LastPlace(Layer):
    """The vector of the last place that holds something: (B, L, d) and a mask (B, L) -> (B, d); zeros where none does.

    Example:
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> LastPlace([(3, 1), (3,)])(x, torch.tensor([[1.0, 1.0, 0.0]])).tolist()
        [[2.0]]
    """

    def build(self, init: Initializer) -> list[Shape]:
        """Drop the places."""
        shapes = self.in_shapes
        if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
            raise self.refuse("vectors (B, L, d) and their mask (B, L)")
        return [shapes[0][1:]]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors."""
        held = mask > 0
        after = held.flip(1).cumsum(1).flip(1)
        last = (held & (after == 1)).to(x.dtype)  # one place, or none
        return (last.unsqueeze(1) @ x).squeeze(1)


class NextItemSoftmaxParameters(Settings):
    """Parameters of `NextItemSoftmax`.

    Args:
        targets: "every" predicts at each place of the history the item after it; "last" the row's item alone, for
            data sets with a row for every event.
        candidates: "batch", the predicted items of all rows and the sampled negatives; "all", the whole catalogue.
        temperature: divides the scores.
        first_item: of "all": ids below it are reserved and no candidates.
    """

    targets: Literal["every", "last"] = "every"
    candidates: Literal["batch", "all"] = "batch"
    temperature: float = Field(default=1.0, gt=0)
    first_item: int = Field(default=0, ge=0)


@LAYERS.register("NextItemSoftmax")
class NextItemSoftmax(Layer):
    """How well the state at each place of a history picks the item that comes next.

        user, item (B, d), states (B, L, d), items (B, L + 1 + K, d), mask and ids (B, L + 1 + K), and
            perhaps log q (B, L + 1 + K)        for candidates "batch"
            a table (N, d)                      for candidates "all", where K is 0

    The places of items, mask and ids are the history's L, the row's item, and K sampled negatives. The item after
    place i is that of the next place that holds one, after the last the row's. `user` and `item` are the vectors of
    the row's prediction, u after the whole history and v of the row's item.

        s     = user . item / temperature
        z_i   = u_i . v_next(i) / temperature - log q_next(i)
        log p_i = z_i - log(exp z_i + sum over candidates j with another id of exp(u_i . v_j / temperature - log q_j))
        -> (B, 2): s, and the sum of log p_i over the places that count, for `SampledSoftmaxLoss`

    log q corrects for candidates that come up more often than others, see `LogFrequency`.

    Source: Kang and McAuley 2018, "Self-Attentive Sequential Recommendation", for training at every place; with a
    softmax in place of one negative, Klenitskiy and Vasilev 2023, "Turning Dross Into Gold Loss: is BERT4Rec really
    better than SASRec?".

    Example:
        >>> from viviane.nn.rows import Rows, RowShape
        >>> shapes = [(2,), (2,), (1, 2), (2, 2), (2,), (2,), RowShape((2,), Rows(6, of_batch=False))]
        >>> layer = NextItemSoftmax(shapes, candidates="all", first_item=4)
        >>> user, items, table = torch.tensor([[0.0, 1.0]]), torch.eye(2)[None], torch.eye(6, 2).roll(4, 0)
        >>> out = layer(user, items[:, 1], user[None], items, torch.ones(1, 2), torch.tensor([[4, 5]]), table)
        >>> [round(x, 4) for x in out[0].tolist()]  # 1, and log(e / (e + 1))
        [1.0, -0.3133]
    """

    Parameters = NextItemSoftmaxParameters
    id_inputs = (5,)
    changes_rows = True
    scores_only = False
    """Leave the sums of log p at zero: predictions do not need them, nor the catalogue."""

    def build(self, init: Initializer) -> list[Shape]:
        """Check the shapes."""
        shapes, settings = self.in_shapes, cast(NextItemSoftmaxParameters, self.settings)
        full = settings.candidates == "all"
        fits = len(shapes) in ((7,) if full else (6, 7)) and len(shapes[2]) == len(shapes[3]) == 2
        if fits:
            (length, width), (places, _) = shapes[2], shapes[3]
            fits = all(shape == (width,) for shape in shapes[:2]) and shapes[3][1] == width
            fits = fits and rows_of(shapes[2]) == rows_of(shapes[3]) == Rows()
            fits = fits and all(shape == (places,) for shape in shapes[4:6])
            fits = fits and (places == length + 1 if full else places > length)
            if fits and len(shapes) == 7:
                whole = tuple(shapes[6]) == (width,) and not rows_of(shapes[6]).of_batch
                fits = whole if full else shapes[6] == (places,)
        if not fits:
            last = "items, mask, ids (B, L + 1), table (N, d)" if full else "items, mask, ids [, log q] (B, L + 1 + K)"
            raise self.refuse(f"user, item (B, d), states (B, L, d), {last}")
        return [(2,)]

    def forward(
        self,
        user: Tensor,
        item: Tensor,
        states: Tensor,
        items: Tensor,
        mask: Tensor,
        ids: Tensor,
        more: Tensor | None = None,
    ) -> Tensor:
        """Return score and summed log probability of each row."""
        settings = cast(NextItemSoftmaxParameters, self.settings)
        length = states.shape[1]
        if self.scores_only:
            score = (as_float32(user) * as_float32(item)).sum(1, keepdim=True) / settings.temperature
            return torch.cat([score, torch.zeros_like(score)], 1).to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            u = as_float32(states) / settings.temperature
            vectors = as_float32(items).to(u.dtype)
            v, of, shift = self._candidates(vectors, mask, ids, more, length)
            following, counts = _following(mask, length, settings.targets)
            # A product with ones and zeros: the gradient of a gather is slow where it has to be the same in each run.
            picks = following.unsqueeze(2) == torch.arange(length + 1, device=u.device)
            own = (u * (picks.to(u.dtype) @ vectors[:, : length + 1])).sum(2)
            if settings.candidates == "batch" and more is not None:
                own = own - more.to(u.dtype).gather(1, following)
            log_p = self._log_p(u, own, ids.gather(1, following), counts, v, of, shift)
            score = (as_float32(user) * as_float32(item)).sum(1, keepdim=True).to(u.dtype) / settings.temperature
        return torch.cat([score, log_p], 1).to(states.dtype)

    def _candidates(
        self, items: Tensor, mask: Tensor, ids: Tensor, more: Tensor | None, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors (C, d), ids (C,) and what their scores are lowered by (C,)."""
        settings = cast(NextItemSoftmaxParameters, self.settings)
        if settings.candidates == "all":
            assert more is not None
            table = as_float32(more).to(items.dtype)
            of = torch.arange(len(table), device=table.device)
            shift = torch.zeros(len(table), dtype=items.dtype, device=table.device)
            return table, of, shift.masked_fill(of < settings.first_item, torch.inf)
        first = 1 if settings.targets == "every" else length
        held = (mask[:, first:] > 0).flatten()
        correction = torch.zeros_like(ids, dtype=items.dtype) if more is None else more.to(items.dtype)
        shift = correction[:, first:].flatten().masked_fill(~held, torch.inf)
        v, of = items[:, first:].flatten(0, 1), ids[:, first:].flatten().masked_fill(~held, EMPTY_ID)
        if v.device.type == "cpu" and not torch.compiler.is_compiling():
            v, of, shift = v[held], of[held], shift[held]
        return v, of, shift

    def _log_p(
        self, u: Tensor, own: Tensor, wanted: Tensor, counts: Tensor, v: Tensor, of: Tensor, shift: Tensor
    ) -> Tensor:
        """Return log p summed over the places that count, (B, 1)."""
        if u.device.type != "cpu" or torch.compiler.is_compiling():  # sizes that do not depend on the data
            flat = own.reshape(-1, 1)
            needed = counts.flatten()
            sums = log_sum_over_candidates(u.flatten(0, 1), v, shift, flat, wanted.reshape(-1, 1), of, needed)
            return torch.where(counts, own - sums.view_as(own), 0.0).sum(1, keepdim=True)
        flat = own[counts].unsqueeze(1)
        sums = log_sum_over_candidates(u[counts], v, shift, flat, wanted[counts].unsqueeze(1), of)
        log_p = torch.zeros_like(own).masked_scatter(counts, flat - sums)
        return log_p.sum(1, keepdim=True)


def _following(mask: Tensor, length: int, targets: str) -> tuple[Tensor, Tensor]:
    """Return for each place of the history that of the next item, and whether it counts."""
    held = mask[:, :length] > 0
    place = torch.arange(length, device=mask.device).expand_as(held)
    # The next place that holds an item, counted from the end; after the last of them comes the row's item.
    ahead = torch.where(held, place, length).flip(1).cummin(1).values.flip(1)
    following = torch.cat([ahead[:, 1:], torch.full_like(ahead[:, :1], length)], 1)
    counts = held if targets == "every" else held & (following == length)
    return following, counts & (mask.gather(1, following) > 0)
