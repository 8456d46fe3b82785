"""The gradients of one or several lookups, as rows and the position of each gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from viviane.core.errors import VivianeError


@dataclass(frozen=True)
class Entries:
    """N looked-up rows and their gradients: entry n has weights[n] * gradients[sources[n] : sources[n] + D].

    Args:
        rows: (N,), int32 or int64, contiguous.
        gradients: one dimension, contiguous; float32, float16 or bfloat16.
        sources: (N,), int32 or int64: the element of `gradients` at which an entry's D numbers begin. None: entry
            n has the n-th D numbers.
        weights: (N,), float32, or None for ones.
        aligned: a power of two that divides every number in `sources`; 4 and more let a GPU load in wide pieces.
        bound: of rows that are all 0 <= row < bound, which lets a GPU sort them by fewer bits; None: not known.
        order: (N,), on the rows' device, where equal rows are neighbours already and a GPU need not sort them: of each
            row the entry whose source and weight it has, 0, 1, to N - 1 where these are sorted, too; None: not known.
    """

    rows: Tensor
    gradients: Tensor
    sources: Tensor | None = None
    weights: Tensor | None = None
    aligned: int = 1
    bound: int | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.rows)
        for name, part in (("sources", self.sources), ("weights", self.weights), ("order", self.order)):
            if part is not None and part.shape != (count,):
                raise VivianeError(f"each entry needs one of {name}", value=f"{tuple(part.shape)} for {count} rows")
        if self.gradients.dim() != 1:
            raise VivianeError("gradients must be one flat tensor", value=tuple(self.gradients.shape))
        if self.aligned < 1 or self.aligned & (self.aligned - 1):
            raise VivianeError("alignment is a power of two", value=self.aligned)
