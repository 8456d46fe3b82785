"""The keys of a batch: read from what a collection is called with, and checked before a kernel reads memory by them.

Types, shapes and devices are checked on the host. Offsets and weights of bags are read: at once on the CPU, in a kernel
on a GPU, whose record waits for the next `check`, as that of a key out of range does.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, DataError, VivianeError, suggest
from viviane.embedding.config import FeatureConfig
from viviane.embedding.jagged import Jagged, is_keyed_jagged, read_keyed_jagged
from viviane.embedding.keys import Violation, Violations, check_key_type, check_memory, report
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
    tensors = isinstance(values, Tensor) and isinstance(offsets, Tensor)
    plain = tensors and not values.is_nested and not offsets.is_nested  # a nested one has no size
    if not plain or values.dim() != 1 or offsets.dim() != 1:
        raise DataError(
            "a bag has vectors of ids and offsets", where=f"feature {feature!r}",
            value=f"{_describe(values)}, {_describe(offsets)}", allowed="(nnz,) and (B + 1,)",
        )  # fmt: skip
    check_key_type(values, feature)
    check_memory(offsets, f"feature {feature!r}, offsets")
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
    plain = isinstance(weights, Tensor) and not weights.is_nested
    if not plain or weights.dtype != torch.float32 or weights.shape != values.shape:
        raise DataError(
            "a bag has one weight per id", where=f"feature {feature!r}", value=_describe(weights),
            allowed=f"float32 {tuple(values.shape)}",
        )  # fmt: skip
    check_memory(weights, f"feature {feature!r}, weights")
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
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        return "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Keys:
    """The keys of a batch: one-hot columns side by side, (B, F), and bags by feature."""

    one_hot_names: tuple[str, ...]
    one_hot: Tensor
    bags: Mapping[str, Bag]
    size: int
    origin: str


AnyKeys: TypeAlias = Batch | Mapping[str, Bag | Tensor] | Jagged | Any
"""What a collection can be called with; Any means a KeyedJaggedTensor, whose library is not imported."""


def read_keys(
    batch: AnyKeys, features: Mapping[str, FeatureConfig], device: torch.device, violations: Violations
) -> Keys:
    """Take the features' keys out of what a collection is called with, and check all that kernels go by but the keys.

    Raises:
        DataError: a feature is missing, features differ in their number of rows, a tensor is of another type, shape or
            device than it should be; on the CPU: offsets or weights of a bag are wrong.
    """
    if not isinstance(batch, Batch | Mapping):
        batch = _from_jagged(batch, features)
    known = (batch.layout.one_hot_index, batch.bags) if isinstance(batch, Batch) else (batch,)
    missing: Set[str] = frozenset()
    if not features.keys() <= known[0].keys():  # mostly all are one-hot columns
        missing = features.keys()
        for part in known:
            missing = missing - part.keys()
    if missing:
        name = next(name for name in features if name in missing)
        fix = suggest(name, [own for part in known for own in part])
        raise DataError("the batch lacks a feature", value=name, fix=fix)
    if isinstance(batch, Batch):
        return _keys_of_batch(batch, features, device, violations)
    singles: dict[str, Tensor] = {}
    bags: dict[str, Bag] = {}
    given: dict[str, Bag] = {}
    for name, feature in features.items():
        keys = batch[name]
        if isinstance(keys, Tensor) and keys.dim() == 1 and feature.combiner != "concat":
            singles[name] = checked_ids(keys, name, device)
        elif isinstance(keys, Bag):
            given[name] = bags[name] = checked_bag(keys, name, device)
        else:
            bags[name] = as_bag(checked_ids(keys, name, device), name)
    sizes = {name: len(keys) for name, keys in singles.items()}
    sizes |= {name: len(bag.offsets) - 1 for name, bag in bags.items()}
    if len(set(sizes.values())) > 1:
        raise DataError("features differ in their number of rows", value=sizes)
    check_given(given, "", violations)
    none = torch.empty(0, 0, dtype=torch.int64, device=device)
    ids = torch.stack(list(singles.values()), 1) if singles else none
    return Keys(tuple(singles), ids, bags, next(iter(sizes.values())), "")


def _keys_of_batch(
    batch: Batch, features: Mapping[str, FeatureConfig], device: torch.device, violations: Violations
) -> Keys:
    one_hot, names, size = batch.one_hot, batch.layout.one_hot, batch.size
    bags: dict[str, Bag] = {}
    given: dict[str, Bag] = {}
    for name, feature in features.items():
        if name in batch.bags:
            given[name] = bags[name] = checked_bag(batch.bags[name], name, device)
            if len(bags[name].offsets) != size + 1:
                raise DataError(
                    "the bags of a feature are not as many as the batch has rows", where=f"feature {name!r}",
                    value=len(bags[name].offsets) - 1, allowed=str(size),
                )  # fmt: skip
        elif feature.combiner == "concat":
            bags[name] = batch.bag(name)
    if len(bags) < len(features):
        if one_hot.dim() != 2 or one_hot.shape[1] != len(names):
            raise DataError("ids are (B, F), a column for each one-hot feature", value=tuple(one_hot.shape))
        checked_ids(one_hot, names[0], device)
    check_given(given, batch.origin, violations)
    return Keys(names, one_hot, bags, size, batch.origin)


def _from_jagged(batch: Any, features: Mapping[str, FeatureConfig]) -> dict[str, Bag]:
    if not isinstance(batch, Jagged):
        if not is_keyed_jagged(batch):
            allowed = "a Batch, a mapping from features to keys, or a KeyedJaggedTensor"
            raise DataError("a collection cannot read this", value=type(batch).__name__, allowed=allowed)
        return read_keyed_jagged(batch, starts=True).bags(features)
    return batch.bags(features)


def as_bag(keys: Tensor, feature: str) -> Bag:
    """See ids (B,) as bags of one, a matrix of ids (B, H) as bags of H each."""
    if keys.dim() == 1:
        keys = keys.unsqueeze(1)
    if keys.dim() != 2:
        raise DataError("keys must be a Bag, (B,) or (B, H)", where=f"feature {feature!r}", value=tuple(keys.shape))
    offsets = torch.arange(keys.shape[0] + 1, device=keys.device) * keys.shape[1]
    return Bag(keys.reshape(-1), offsets)
