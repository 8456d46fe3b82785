"""What was learned from training data, and the schema that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from viviane.etl.columns import Bucketize, CategoricalSpec, Categorify, GivenVocabulary, HashTo, RawIds
from viviane.etl.config import EtlConfig
from viviane.etl.external import External
from viviane.etl.groups import Groups
from viviane.etl.operators import State
from viviane.schema import RESERVED, CategoricalColumn, DenseColumn, LabelColumn, Schema


@dataclass(frozen=True)
class Vocabulary:
    """Values in the order of their ids, from id 3 on, and how often each was seen in training."""

    values: Any  # pyarrow array
    counts: Any  # pyarrow int64 array


@dataclass(frozen=True)
class Learned:
    """A config with all that it learned: statistics, borders and vocabularies.

    Args:
        config: the declarative file.
        states: by output column, by position of the operator, its statistics.
        borders: by column table, the borders of a bucketize.
        vocabularies: by column table, the values of a categorify.
        groups: by group derivation, its numbers by key.
        external: by join, its table.
    """

    config: EtlConfig
    states: Mapping[str, dict[int, State]] = field(default_factory=dict)
    borders: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    groups: Mapping[str, Groups] = field(default_factory=dict)
    external: External = field(default_factory=dict)

    @cached_property
    def schema(self) -> Schema:
        """The schema of every data set that this ETL writes."""
        config = self.config
        return Schema(
            labels=tuple(LabelColumn(name=spec.name, task=spec.task, optional=spec.optional) for spec in config.labels),
            dense=tuple(DenseColumn(name=spec.name, dim=spec.dim) for spec in config.dense),
            categorical=tuple(
                CategoricalColumn(
                    name=spec.name,
                    num_ids=self.num_ids(spec),
                    kind=spec.kind,
                    max_length=spec.max_length,
                    hotness=spec.hotness if isinstance(spec.hotness, int) else None,
                    weights=spec.weights,
                    vocabulary=spec.vocabulary,
                    dtype=spec.dtype,
                )
                for spec in config.categorical
            ),
            sample_weight=config.sample_weight.name if config.sample_weight else None,
            ignored=config.ignored,
        )

    def num_ids(self, spec: CategoricalSpec) -> int | None:
        """Size of a column's range of ids, the reserved ones included; None of raw ids."""
        if isinstance(spec.encoding, RawIds):
            return None
        if isinstance(spec.encoding, HashTo):
            return spec.encoding.num_ids
        if isinstance(spec.encoding, Bucketize):
            return RESERVED.first + len(self.borders[spec.table]) + 1
        buckets = spec.encoding.unknown_buckets if isinstance(spec.encoding, (Categorify, GivenVocabulary)) else 0
        return RESERVED.first + len(self.vocabularies[spec.table].values) + buckets
