"""Keys of many features in one tensor, as TorchRec's KeyedJaggedTensor holds them.

Shapes: B rows of the batch, F features, nnz ids of all features together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.core.errors import DataError


@dataclass(frozen=True)
class Jagged:
    """Bags of F features behind one another: those of the first feature, B of them, then of the second, ...

    Args:
        names: F features, in order.
        values: ids, (nnz,), int32 or int64.
        offsets: (F * B + 1,), int32 or int64, rising from 0 to nnz.
        weights: (nnz,), float32, or None where every id counts once.
        starts: where each feature's ids begin, and nnz at the end, where that is known without asking the device.

    Example:
        >>> keys = Jagged(("a", "b"), torch.tensor([7, 8, 9]), torch.tensor([0, 1, 1, 1, 3]))
        >>> keys.bags(["b"])["b"].offsets.tolist()
        [0, 0, 2]
    """

    names: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    starts: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """Rows of the batch, B."""
        return (len(self.offsets) - 1) // max(len(self.names), 1)

    def bags(self, features: Iterable[str]) -> dict[str, Bag]:
        """Return a bag for each of the features that are here; other names are passed over.

        Raises:
            DataError: names, offsets and ids do not fit together.
        """
        self._check()
        size = self.size
        starts = self._starts() if self.starts is None else self.starts
        rising = all(start <= stop for start, stop in pairwise(starts))
        if len(starts) != len(self.names) + 1 or starts[0] != 0 or starts[-1] != len(self.values) or not rising:
            raise DataError(
                "the ids of the features do not follow one another", where="KeyedJaggedTensor",
                value=list(starts), allowed=f"{len(self.names) + 1} numbers that rise from 0 to {len(self.values)}",
            )  # fmt: skip
        offsets = self.offsets.to(torch.int64)
        place = {name: i for i, name in enumerate(self.names)}
        found = {}
        for name in features:
            if name in place:
                i = place[name]
                ids = slice(starts[i], starts[i + 1])
                own = offsets[i * size : (i + 1) * size + 1] - starts[i]
                weights = None if self.weights is None else self.weights[ids]
                found[name] = Bag(self.values[ids].contiguous(), own, weights)
        return found

    def _check(self) -> None:
        """Refuse what cannot be cut into bags; offsets themselves are checked with the bags."""
        ids, offsets = self.values, self.offsets
        wrong = None
        if len(set(self.names)) != len(self.names):
            wrong = f"names {', '.join(self.names)}, one of them twice"
        elif ids.dim() != 1 or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            wrong = f"ids {tuple(ids.shape)}, offsets {tuple(offsets.shape)} of {offsets.dtype}"
        elif not len(offsets) or (len(offsets) - 1) % max(len(self.names), 1):
            wrong = f"{len(offsets)} offsets of {len(self.names)} features"
        elif self.weights is not None and self.weights.shape != ids.shape:
            wrong = f"{len(ids)} ids, weights {tuple(self.weights.shape)}"
        if wrong is not None:
            raise DataError("the parts of a KeyedJaggedTensor do not fit", where="KeyedJaggedTensor", value=wrong)

    def _starts(self) -> list[int]:
        # Read in one piece: on a GPU each number by itself would wait for the device.
        bounds = torch.arange(len(self.names) + 1, device=self.offsets.device) * self.size
        starts: list[int] = self.offsets.index_select(0, bounds).tolist()
        return starts


def is_keyed_jagged(batch: Any) -> bool:
    """Whether an object has the methods of a KeyedJaggedTensor; the library itself is not imported for that."""
    return all(hasattr(batch, name) for name in ("keys", "values", "offsets", "weights_or_none", "stride"))


def read_keyed_jagged(batch: Any, *, starts: bool) -> Jagged:
    """See a KeyedJaggedTensor as Jagged; nothing is copied.

    Args:
        batch: what `is_keyed_jagged` recognises.
        starts: whether to ask it where each feature's ids begin, which waits for a GPU once if it does not know.

    Raises:
        DataError: its features have different numbers of rows, or weights are not float32.
    """
    if getattr(batch, "variable_stride_per_key", bool)():
        raise DataError(
            "the features of a KeyedJaggedTensor differ in their number of rows",
            value=batch.stride_per_key(),
            fix="give each part of one batch size to the collection by itself",
        )
    weights = batch.weights_or_none()
    if weights is not None and weights.dtype != torch.float32:
        raise DataError("weights must be float32", where="KeyedJaggedTensor", value=str(weights.dtype))
    known = batch.offset_per_key() if starts else None
    return Jagged(tuple(batch.keys()), batch.values(), batch.offsets(), weights, known)
