"""Resolves the keys of batches with static shapes into one matrix of rows, without reading a value on the host.

Shapes: B rows of the local batch, C columns, one for each id of a row, S segments of the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.core.errors import DataError, VivianeError
from viviane.embedding import FeatureConfig, TableConfig
from viviane.embedding.batch_keys import Keys
from viviane.embedding.keys import RowMap, Violation, Violations, report
from viviane.ops.capture import refuse_capture
from viviane.ops.wire_blocks import first_difference
from viviane.parallel.plan import AnyTable


@dataclass(frozen=True)
class StaticRows:
    """The keys of a batch as rows of whole tables.

    Args:
        rows: (B, C), contiguous.
        masks: (B, L), bool, of "concat" features.
        shares: of "mean" features with several ids in each row: the factor of their sum, (B, 1), float32.
    """

    rows: Tensor
    masks: Mapping[str, Tensor]
    shares: Mapping[str, Tensor]


def fixed_hotness(
    features: Mapping[str, FeatureConfig],
    tables: Mapping[str, AnyTable],
    keys: Keys,
    declared: Mapping[str, int],
) -> tuple[int, ...] | None:
    """Return the hotness of each feature if all shapes of the batch follow from its size; None otherwise.

    Raises:
        DataError: a "concat" has more ids than positions.
    """
    found = []
    for name, feature in features.items():
        if not isinstance(tables[feature.table], TableConfig):
            return None
        hotness = declared.get(name)
        if name in keys.one_hot_names:
            hotness = 1
        elif keys.bags[name].weights is not None or hotness is None:
            return None
        if feature.combiner == "concat" and hotness > feature.num_places:
            raise DataError(
                "a bag is longer than its feature's max_length", where=f"feature {name!r}", value=hotness,
                allowed=f"at most {feature.num_places} ids",
            )  # fmt: skip
        found.append(hotness)
    return tuple(found)


def check_sizes(keys: Keys, size: int, hotness: Mapping[str, int]) -> None:
    """Refuse a batch whose sizes differ from the declared static shapes.

    Raises:
        DataError: naming the size, or the feature.
    """
    if keys.size != size:
        fix = "call fix_sizes(None) on all processes before such a batch"
        raise DataError(
            "the batch size differs from the declared static size", value=keys.size, allowed=str(size), fix=fix
        )
    for name, count in hotness.items():
        if name in keys.bags and len(keys.bags[name].values) != count * size:
            raise DataError(
                "the number of ids in the bags differs from the declared hotness", where=f"feature {name!r}",
                value=len(keys.bags[name].values), allowed=f"{count} a row",
            )  # fmt: skip


@dataclass(frozen=True)
class UnevenBag(Violation):
    """A bag whose number of ids differs from the declared hotness; `place` indexes the offsets of all features."""

    features: tuple[tuple[str, int], ...]
    size: int

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error of the bag that ends at `place`."""
        number, row = divmod(place, self.size + 1)
        name, count = self.features[number]
        return DataError(
            "the number of ids in a bag differs from the declared hotness",
            where=self.where(f"feature {name!r}", max(0, row - 1)),
            value=f"the ids of rows up to it are {value}", allowed=f"{count} a row",
            fix="call fix_sizes(None) on all processes, or leave the feature out of its hotness",
        )  # fmt: skip


class StaticKeyResolver:
    """Applies the tables' policies to the keys of one kind of batch.

    Args:
        features, tables: of the collection; fixed tables only.
        one_hot: names of the one-hot columns.
        hotness: number of ids in each row, by feature.
        violations: see `viviane.embedding.keys`.
        device: of the keys.
    """

    def __init__(
        self,
        features: Mapping[str, FeatureConfig],
        tables: Mapping[str, AnyTable],
        one_hot: Sequence[str],
        hotness: Sequence[int],
        violations: Violations,
        device: torch.device,
    ) -> None:
        self.features = features
        self._violations = violations
        self._ends: Tensor | None = None
        index = {name: i for i, name in enumerate(one_hot)}
        self._singles = [name for name in features if name in index]
        self._bags = [(name, count) for name, count in zip(features, hotness, strict=True) if name not in index]
        owners = [*self._singles, *(name for name, count in self._bags for _ in range(count))]
        self.columns: dict[str, range] = {}
        """The columns of each feature."""
        start = 0
        for name, count in [*((name, 1) for name in self._singles), *self._bags]:
            self.columns[name] = range(start, start + count)
            start += count
        settings = [table for name in owners if isinstance(table := tables[features[name].table], TableConfig)]
        self.null_row = max(one.num_rows for one in tables.values() if isinstance(one, TableConfig))
        picked = [index[name] for name in self._singles]
        self._all = picked == list(range(len(one_hot)))
        self._picked = torch.tensor(picked, dtype=torch.int64, device=device)
        columns = None if self._bags or self._all else picked
        self._map = RowMap(owners, settings, [0] * len(owners), self.null_row, violations, device, columns)

    def __call__(self, keys: Keys) -> StaticRows:
        """Resolve a batch."""
        rows = self._map(self._matrix(keys), origin=keys.origin)
        if self._bags:
            self._check_lengths(keys)
        masks, shares = {}, {}
        for name, feature in self.features.items():
            span = self.columns[name]
            if feature.combiner == "concat":
                known = rows[:, span.start : span.stop] != self.null_row
                masks[name] = F.pad(known, (0, feature.num_places - len(span)))
            elif self.is_mean(name):
                count = (rows[:, span.start : span.stop] != self.null_row).sum(1, keepdim=True).float()
                shares[name] = count.reciprocal().masked_fill(count == 0, 0.0)
        return StaticRows(rows, masks, shares)

    def is_mean(self, name: str) -> bool:
        """Whether a feature's vectors are summed and divided by their number."""
        return self.features[name].combiner == "mean" and len(self.columns[name]) > 1

    def _check_lengths(self, keys: Keys) -> None:
        """Record the first bag whose number of ids differs from its hotness; nothing waits for the GPU."""
        if self._ends is None or len(self._ends) != (keys.size + 1) * len(self._bags):
            refuse_capture(keys.one_hot.device, "a new size of batch", fix="run an iteration with such a batch before")
            ends = torch.arange(keys.size + 1, dtype=torch.int64)
            self._ends = torch.cat([ends * count for _, count in self._bags]).to(
                keys.bags[self._bags[0][0]].offsets.device
            )
        found = torch.cat([keys.bags[name].offsets for name, _ in self._bags])
        record = first_difference(found, self._ends)
        names = tuple(name for name, _ in self._bags)
        report(UnevenBag(record, keys.origin, tuple(self._bags), keys.size), self._violations, ("uneven", *names))

    def _matrix(self, keys: Keys) -> Tensor:
        if not self._bags:
            return keys.one_hot
        parts = [keys.bags[name].values.view(keys.size, count) for name, count in self._bags]
        if self._singles:
            parts.insert(0, keys.one_hot if self._all else keys.one_hot.index_select(1, self._picked))
        return torch.cat(parts, 1)
