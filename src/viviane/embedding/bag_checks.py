"""Check the bags of a batch before any kernel reads memory by them.

Types, shapes and devices are checked on the host. Offsets and weights are read: at once on the CPU, in a kernel on a
GPU, whose finding waits for the next `check`, as that of a key out of range does.

Shapes: B rows of the batch, nnz ids of a bag.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.embedding.keys import Violation, Violations, check_key_type, report
from viviane.ops.bag_checks import LAST, check_bags
from viviane.ops.capture import is_capturing


@dataclass(frozen=True)
class WrongBag(Violation):
    """Offsets or weights that no bag can have; the record is that of `viviane.ops.bag_checks`."""

    features: tuple[str, ...]
    offsets: tuple[Tensor, ...]
    counts: tuple[int, ...]
    weights: tuple[Tensor | None, ...]

    @property
    def num_lookups(self) -> int:
        """Features whose bags are kept for the message."""
        return len(self.features)

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error for position `place` of the record."""
        place = LAST - place
        size, features = len(self.offsets[0]), len(self.features)
        if place < features * size:
            f, row = divmod(place, size)
            return DataError(
                "the offsets of a bag must begin with 0, never fall, and end with the number of its ids",
                where=self.where(f"feature {self.features[f]!r}, offset {row}", max(0, row - 1)),
                value=f"{self.offsets[f][max(0, row - 1) : row + 1].tolist()}, with {self.counts[f]} ids",
            )
        place -= features * size
        starts = [0, *accumulate(self.counts[:-1])]
        f = bisect_right(starts, place) - 1
        n, weights = place - starts[f], self.weights[f]
        row = int(torch.searchsorted(self.offsets[f], n, right=True)) - 1
        return DataError(
            "the weight of an id must be finite",
            where=self.where(f"feature {self.features[f]!r}, weight {n}", row),
            value=None if weights is None else weights[n].item(),
        )


def checked_bag(bag: Bag, feature: str, device: torch.device) -> Bag:
    """Return a bag whose tensors have the shapes, types and device that kernels expect; offsets become int64.

    Raises:
        DataError: one of its tensors does not have the required form.
    """
    values, offsets, weights = bag.values, bag.offsets, bag.weights
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor) or values.dim() != 1 or offsets.dim() != 1:
        raise DataError(
            "a bag has vectors of ids and offsets", where=f"feature {feature!r}",
            value=f"{_describe(values)}, {_describe(offsets)}", allowed="(nnz,) and (B + 1,)",
        )  # fmt: skip
    check_key_type(values, feature)
    if offsets.dtype != torch.int64 or not offsets.is_contiguous():
        if offsets.dtype not in (torch.int32, torch.int64):
            allowed = "int64 or int32"
            raise DataError(
                "offsets must be whole numbers", where=f"feature {feature!r}", value=str(offsets.dtype), allowed=allowed
            )
        offsets = offsets.to(torch.int64).contiguous()
        bag = replace(bag, offsets=offsets)
    if not len(offsets):
        raise DataError(
            "a bag has one offset more than rows", where=f"feature {feature!r}", value="no offsets",
            allowed="at least the 0 that all offsets begin with",
        )  # fmt: skip
    if values.device != device or offsets.device != device:
        _refuse_device(feature, values if values.device != device else offsets, device)
    if weights is None:
        return bag
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or weights.shape != values.shape:
        raise DataError(
            "a bag has one weight per id", where=f"feature {feature!r}", value=_describe(weights),
            allowed=f"float32 {tuple(values.shape)}",
        )  # fmt: skip
    if weights.device != device:
        _refuse_device(feature, weights, device)
    if weights.requires_grad and torch.is_grad_enabled():
        fix = "detach them, or multiply vectors that are not pooled"
        raise ConfigError("the weights of a bag get no gradient", where=f"feature {feature!r}", fix=fix)
    return bag if weights.is_contiguous() else replace(bag, weights=weights.contiguous())


def checked_ids(ids: Tensor, feature: str, device: torch.device) -> Tensor:
    """Return ids beside the table; refuse those of another type or device."""
    check_key_type(ids, feature)
    if ids.device != device:
        _refuse_device(feature, ids, device)
    return ids


def check_given(bags: Mapping[str, Bag], origin: str, violations: Violations) -> None:
    """Check offsets and weights of bags that `checked_bag` gave, of one number of rows.

    Args:
        bags: by feature.
        origin: of the batch, for messages.
        violations: where a GPU leaves what it found.

    Raises:
        DataError: on the CPU: offsets do not rise from 0 to the number of ids, or a weight is not finite.
    """
    if not bags:
        return
    features, given = tuple(bags), bags.values()
    offsets = tuple(bag.offsets for bag in given)
    counts = tuple(len(bag.values) for bag in given)
    weights = tuple(bag.weights for bag in given)
    name, device = ("bag", *features), offsets[0].device
    kept = violations.words_for(name, device)[:3] if device.type == "cuda" and is_capturing(device) else None
    record = check_bags(offsets, counts, weights, kept)
    if record is not None:
        report(WrongBag(record, origin, features, offsets, counts, weights), violations, name)


def _refuse_device(feature: str, tensor: Tensor, device: torch.device) -> None:
    raise DataError(
        "the batch must be where the tables are", where=f"feature {feature!r}", value=str(tensor.device),
        allowed=str(device), fix=f"move it there: batch.to({str(device)!r})",
    )  # fmt: skip


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
