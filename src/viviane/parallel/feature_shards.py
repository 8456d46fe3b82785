"""Which shard serves which feature, and which output columns it fills: computed once from the sharding plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.embedding.output import OutputColumns
from viviane.parallel.plan import AnyTable, Shard, ShardingPlan, check_columns, shards_of


@dataclass(frozen=True)
class FeatureShard:
    """The lookups of one feature in one shard.

    Args:
        feature: the feature.
        place: index of the vector within a "concat" feature, from 0.
        shard: the shard.
        column: first output column; feature shards with the same column are summed.
    """

    feature: FeatureConfig
    place: int
    shard: Shard
    column: int

    @property
    def name(self) -> str:
        """Unique among the feature shards of one rank."""
        return f"{self.feature.name}/{self.place}/{self.shard.start}/{self.shard.low}"

    @property
    def is_single(self) -> bool:
        """Whether a row has at most one id: a position of a "concat" feature."""
        return self.feature.combiner == "concat"


def pieces_of(
    features: Mapping[str, FeatureConfig],
    tables: Mapping[str, AnyTable],
    places: Mapping[str, OutputColumns],
    plan: ShardingPlan,
) -> list[FeatureShard]:
    """Return the shards of all features, in the order of the features."""
    found = []
    for feature in features.values():
        table, place = tables[feature.table], places[feature.name]
        for shard in shards_of(plan.table(table.name), table):
            for i in range(feature.num_places):
                found.append(FeatureShard(feature, i, shard, place.start + i * place.dim + shard.start))
    return found


def part_table(shard: Shard, table: AnyTable) -> AnyTable:
    """Return the table configuration of a shard: keys 0, 1, ..., and negative keys for rows outside the shard.

    The rows are zero until they are filled from the whole table.
    """
    if isinstance(table, DynamicTableConfig):
        return table
    changes = {
        "num_rows": len(shard.keys), "dim": shard.dim, "init": {"type": "zero"}, "out_of_range": "ignore",
        "default_id": None, "padding_id": None,
    }  # fmt: skip
    return type(table)(**{**table.model_dump(), **changes})


def check_features(
    features: Sequence[FeatureConfig],
    tables: Mapping[str, AnyTable],
    plan: ShardingPlan,
    optimizer: AnyOptimizer,
    deduplicate_ids: bool = False,
) -> None:
    """Refuse features that a sharded lookup cannot serve, and tables that cannot be sharded as planned.

    Raises:
        ConfigError: naming the feature or the table.
    """
    for feature in features:
        if feature.table not in tables:
            fix = suggest(feature.table, tables)
            raise ConfigError("no such table", where=f"feature {feature.name!r}", value=feature.table, fix=fix)
        if feature.combiner == "concat" and not isinstance(tables[feature.table], TableConfig):
            raise ConfigError(
                "a dynamic table over several processes does not support 'concat'", where=f"feature {feature.name!r}",
                fix="pool with 'sum' or 'mean', or give the table num_rows",
            )  # fmt: skip
    for name, table in tables.items():
        if deduplicate_ids and not isinstance(table, TableConfig):
            raise ConfigError(
                "deduplicate_ids does not support dynamic tables", where=f"table {name!r}",
                fix="deduplicate_ids=False, or give the table num_rows",
            )  # fmt: skip
        if plan.table(name).kind == "column":
            check_columns(name, table.optimizer or optimizer)
