"""What of a feature is looked up where, and where it goes in the output: worked out once for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.embedding.output import Place
from viviane.parallel.plan import AnyTable, Plan, Shard, check_columns, shards_of


@dataclass(frozen=True)
class Piece:
    """A feature's lookups in one shard.

    Args:
        feature: whose ids are looked up.
        place: which vector of a "concat", from 0.
        shard: where.
        column: of the output, where its vector goes; pieces of one column are added.
    """

    feature: FeatureConfig
    place: int
    shard: Shard
    column: int

    @property
    def name(self) -> str:
        """Unique among the pieces of one process."""
        return f"{self.feature.name}/{self.place}/{self.shard.start}/{self.shard.low}"

    @property
    def is_single(self) -> bool:
        """Whether a row of the batch gives at most one id: a place of a "concat"."""
        return self.feature.combiner == "concat"


def pieces_of(
    features: Mapping[str, FeatureConfig], tables: Mapping[str, AnyTable], places: Mapping[str, Place], plan: Plan
) -> list[Piece]:
    """Return the pieces of all features, in order of the features."""
    found = []
    for feature in features.values():
        table, place = tables[feature.table], places[feature.name]
        for shard in shards_of(plan.table(table.name), table):
            for i in range(feature.num_places):
                found.append(Piece(feature, i, shard, place.start + i * place.dim + shard.start))
    return found


def part_table(shard: Shard, table: AnyTable) -> AnyTable:
    """Return the settings of a shard as a table of its own, whose keys are 0, 1, ... and below 0 where there is none.

    It begins as zeros: its rows are filled from those of the whole table.
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
    plan: Plan,
    optimizer: AnyOptimizer,
    deduplicate_ids: bool = False,
) -> None:
    """Refuse features that no lookup over several processes can serve, and tables that cannot be cut as planned.

    Raises:
        ConfigError: naming the feature or the table.
    """
    for feature in features:
        if feature.table not in tables:
            fix = suggest(feature.table, tables)
            raise ConfigError("no such table", where=f"feature {feature.name!r}", value=feature.table, fix=fix)
        if feature.combiner == "concat" and not isinstance(tables[feature.table], TableConfig):
            raise ConfigError(
                "a dynamic table gives no 'concat' over several processes", where=f"feature {feature.name!r}",
                fix="pool with 'sum' or 'mean', or give the table num_rows",
            )  # fmt: skip
    for name, table in tables.items():
        if deduplicate_ids and not isinstance(table, TableConfig):
            raise ConfigError(
                "ids of a dynamic table are not deduplicated before they are sent", where=f"table {name!r}",
                fix="deduplicate_ids=False, or give the table num_rows",
            )  # fmt: skip
        if plan.table(name).kind == "column":
            check_columns(name, table.optimizer or optimizer)
