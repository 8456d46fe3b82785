"""The keys of a batch: read from what a collection is called with, and checked.

Shapes: B rows of the batch, F one-hot columns, N entries of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import DataError, suggest
from viviane.embedding.bag_checks import check_given, checked_bag, checked_ids
from viviane.embedding.config import FeatureConfig
from viviane.embedding.jagged import Jagged, is_keyed_jagged, read_keyed_jagged
from viviane.embedding.keys import Violations


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
    known = batch.layout.one_hot_index.keys() | batch.bags.keys() if isinstance(batch, Batch) else batch.keys()
    for name in features:
        if name not in known:
            raise DataError("the batch lacks a feature", value=name, fix=suggest(name, known))
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
