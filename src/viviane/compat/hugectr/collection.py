"""HugeCTR's embedding collection: tables by name, their lookups, and how they are sharded over GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from viviane.compat.hugectr.argument_types import typed, typed_methods
from viviane.compat.hugectr.arguments import REQUIRED, Arguments, Signature, note
from viviane.compat.hugectr.enums import CommunicationStrategy, CompressionStrategy
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.names import graph_name, graph_names
from viviane.core.errors import ConfigError, expect, suggest

_PLACEMENTS: Final = ("mp", "dp", "localized", "column")
COMBINERS: Final = {"sum": "sum", "average": "mean", "mean": "mean", "concat": "concat"}
"""HugeCTR's name of a combiner, and Viviane's."""


class EmbeddingTableConfig(Arguments):
    """One table: name, number of rows (-1: dynamic), width, optionally its own optimizer."""

    signature: ClassVar[Signature] = Signature(
        "EmbeddingTableConfig",
        {
            "name": None, "max_vocabulary_size": REQUIRED, "ev_size": REQUIRED, "opt_params_or_empty": None,
            "init_param_or_empty": None, "table_id": None, "min_key": 0, "max_key": 0, "opt_params": None,
        },
        speed=frozenset({"min_key", "max_key"}),
        refused={"init_param_or_empty": "remove it: HugeCTR accepts it only from C++"},
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        if len(args) > 4 and isinstance(args[4], int):  # 3.7: (table_id, ..., min_key, max_key, opt_params)
            names = ("table_id", "max_vocabulary_size", "ev_size", "min_key", "max_key", "opt_params_or_empty")
            args, given = (), dict(zip(names, args, strict=False)) | given
        super().__init__(*args, **given)
        self.name: str = str(self.table_id) if vars(self)["name"] is None else str(vars(self)["name"])
        where = f"EmbeddingTableConfig {self.name!r}"
        if self.max_vocabulary_size != -1 and self.max_vocabulary_size < 1:
            raise ConfigError("max_vocabulary_size must be a number of rows, or -1", where=where,
                              value=self.max_vocabulary_size)  # fmt: skip
        if self.ev_size < 1:
            raise ConfigError("ev_size must be at least 1", where=where, value=self.ev_size)

    @property
    def size(self) -> int | None:
        """Number of rows, or None for a dynamic table."""
        return None if self.max_vocabulary_size == -1 else int(self.max_vocabulary_size)

    @property
    def optimizer(self) -> Any:
        """Its own CreateOptimizer, or None."""
        return self.opt_params_or_empty or self.opt_params


class EmbeddingTablePlaceHolder(EmbeddingTableConfig):
    """The name of a table's config in early versions."""


@dataclass(frozen=True)
class TableLookup:
    """One feature's lookup: the table, the sparse parameter with the keys, "sum", "mean" or "concat"."""

    table: EmbeddingTableConfig
    bottom: str
    combiner: str


@dataclass(frozen=True)
class LookupCall:
    """One call of embedding_lookup: a list yields one tensor (B, sum of widths), a single lookup (B, 1, ev_size)."""

    lookups: tuple[TableLookup, ...]
    top: str
    is_list: bool


class EmbeddingCollectionConfig(Arguments):
    """Tables, their lookups, and their sharding."""

    signature: ClassVar[Signature] = Signature(
        "EmbeddingCollectionConfig",
        {"use_exclusive_keys": False, "comm_strategy": CommunicationStrategy.Uniform},
        speed=frozenset({"use_exclusive_keys", "comm_strategy"}),
    )

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.calls: list[LookupCall] = []
        self.shard_matrix: list[list[str]] | None = None
        self.shard_strategy: list[Any] = []
        self.compression_strategy: dict[Any, list[str]] = {}

    @property
    def tables(self) -> dict[str, EmbeddingTableConfig]:
        """The tables, in the order of their first lookup."""
        return {one.table.name: one.table for call in self.calls for one in call.lookups}

    @typed
    def embedding_lookup(
        self,
        table_config: EmbeddingTableConfig | Sequence[EmbeddingTableConfig],
        bottom_name: str | Sequence[str],
        top_name: str,
        combiner: str | Sequence[str],
    ) -> None:
        """Add the lookup of one feature, or of several that are concatenated.

        Raises:
            ConfigError: lists differ in length, a combiner is unknown, or two tables have one name.
        """
        is_list = not isinstance(table_config, EmbeddingTableConfig)
        tables = _all_of("table_config", table_config, EmbeddingTableConfig)
        bottoms = graph_names(_all_of("bottom_name", bottom_name, str))
        expect("embedding_lookup, top_name", top_name, str)
        top_name = graph_name(top_name)
        combiners = [combiner] * len(tables) if isinstance(combiner, str) else _all_of("combiner", combiner, str)
        where = f"embedding_lookup {top_name!r}"
        if not len(tables) == len(bottoms) == len(combiners):
            raise ConfigError("each lookup needs one table, one bottom and one combiner", where=where,
                              value=f"{len(tables)}, {len(bottoms)}, {len(combiners)}")  # fmt: skip
        for one in combiners:
            if one not in COMBINERS:
                raise ConfigError("unknown combiner", where=where, value=one, fix=suggest(str(one), COMBINERS))
        known = self.tables
        for table in tables:
            if known.setdefault(table.name, table) is not table:
                raise ConfigError("two tables have the same name", where=where, value=table.name)
        found = (TableLookup(*one) for one in zip(tables, bottoms, (COMBINERS[c] for c in combiners), strict=True))
        self.calls.append(LookupCall(tuple(found), top_name, is_list))

    @typed
    def shard(
        self,
        shard_matrix: Sequence[Sequence[str]],
        shard_strategy: Sequence[Any],
        compression_strategy: Mapping[Any, Sequence[str]] | None = None,
    ) -> None:
        """Set which GPU has which table; the plan is used if as many processes train, see `sharding`.

        Tables may be named before their lookups are added; `Model.compile` then checks the plan.

        Raises:
            ConfigError: a table or strategy is unknown, or the plan is inconsistent.
        """
        rows = _a_list("shard_matrix", shard_matrix, "a list with the tables of each GPU")
        self.shard_matrix = [
            [_name(one) for one in _a_list("shard_matrix", names, "names of tables")] for names in rows
        ]
        self.shard_strategy = _strategies(shard_strategy)
        expect("shard, compression_strategy", compression_strategy, Mapping, type(None))
        self.compression_strategy = {
            kind: [_name(one) for one in _a_list("compression_strategy", names, "names of tables")]
            for kind, names in (compression_strategy or {}).items()
        }
        if self.calls:
            self.check_plan()

    def strategy_of(self, table: str) -> tuple[str, int]:
        """Return "mp" or "dp" and the number of column shards of a table; by default "mp" and 1."""
        for kind, entries in self.shard_strategy:
            for entry in entries:
                given, parts = entry if isinstance(entry, tuple | list) else (entry, 1)
                if _name(given) == table:
                    return kind, int(parts)
        return "mp", 1

    def check_plan(self) -> None:
        """Check the arguments of `shard` against the tables of the lookups.

        Raises:
            ConfigError: a table or strategy is unknown, or the plan is inconsistent.
        """
        matrix = self.shard_matrix or []
        for row in matrix:
            self._check_names(row, "shard_matrix")
        for kind, entries in self.shard_strategy:
            self._check_strategy(kind, entries, matrix)
        for compression, names in self.compression_strategy.items():
            if not isinstance(compression, CompressionStrategy):
                raise ConfigError("unknown compression strategy", where="shard", value=compression,
                                  allowed="hugectr.CompressionStrategy.Reduction, Unique")  # fmt: skip
            self._check_names(names, "compression_strategy")

    def _check_names(self, names: Sequence[Any], where: str) -> None:
        known = self.tables
        for name in names:
            if str(name) not in known:
                raise ConfigError("no lookup uses a table of this name", where=f"shard, {where}", value=name,
                                  fix=suggest(str(name), known))  # fmt: skip

    def _check_strategy(self, kind: str, entries: Sequence[Any], matrix: Sequence[Sequence[str]]) -> None:
        where = "shard, shard_strategy"
        if kind not in ("mp", "dp"):
            raise ConfigError("unknown strategy", where=where, value=kind, allowed="'mp', 'dp'")
        for entry in entries:
            table, parts = entry if isinstance(entry, tuple | list) else (entry, 1)
            name = _name(table)
            self._check_names([name], "shard_strategy")
            if self.tables[name].ev_size % parts:
                raise ConfigError("ev_size is not divisible by the number of columns", where=f"{where}, table {name!r}",
                                  value=parts)  # fmt: skip
            on = sum(name in row for row in matrix)
            if not on or (kind == "dp" and on != len(matrix)):
                what = "a dp table must be on every GPU" if on else "the table is not on any GPU"
                raise ConfigError(what, where=f"{where}, table {name!r}", fix="correct shard_matrix")


def _name(table: Any) -> str:
    expect("shard, a table", table, EmbeddingTableConfig, str, int)  # 3.7 and 4.1 name tables by their numbers
    return table.name if isinstance(table, EmbeddingTableConfig) else str(table)


def _all_of(argument: str, value: Any, kind: type) -> list[Any]:
    """Return an argument of embedding_lookup as a list: one value of a type, or a list of such values."""
    found = list(value) if isinstance(value, list | tuple) else [value]
    for one in found:
        expect(f"embedding_lookup, {argument}", one, kind)
    return found


def _a_list(argument: str, value: Any, allowed: str) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise ConfigError("an argument has the wrong type", where=f"shard, {argument}", value=value, allowed=allowed)
    return list(value)


def _strategies(value: Any) -> list[tuple[str, list[Any]]]:
    """Return pairs of a strategy and its entries: a table, or a pair of a table and a number of columns."""
    found = []
    for pair in _a_list("shard_strategy", value, "a list of pairs (strategy, tables)"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError("a strategy must be a pair", where="shard, shard_strategy", value=pair,
                              allowed="('mp', [tables]), ('dp', [tables])")  # fmt: skip
        entries = _a_list("shard_strategy", pair[1], "a list of tables")
        for entry in entries:
            is_pair = isinstance(entry, list | tuple)
            if is_pair and (len(entry) != 2 or not isinstance(entry[1], int) or entry[1] < 1):
                raise ConfigError("an entry must be a table, or a pair", where="shard, shard_strategy", value=entry,
                                  allowed="table, (table, number of columns)")  # fmt: skip
        found.append((pair[0], entries))
    return found


@typed_methods
class EmbeddingPlanner:
    """The collection API of HugeCTR 3.7 to 4.1, with the plan in a JSON file."""

    @typed
    def __init__(self) -> None:
        self._collection = EmbeddingCollectionConfig()

    @typed
    def embedding_lookup(
        self, table_config: EmbeddingTableConfig, bottom_name: str, top_name: str, combiner: str
    ) -> None:
        """Add the lookup of one feature."""
        self._collection.embedding_lookup(table_config, bottom_name, top_name, combiner)

    @typed
    def create_embedding_collection(
        self,
        plan_file: str | Path | Sequence[Sequence[int]] | None = None,
        emb_table_group_strategy: Sequence[Any] = (),
        emb_table_placement_strategy: Sequence[str] = (),
        *,
        shard_matrix: Sequence[Sequence[int]] | None = None,
    ) -> EmbeddingCollectionConfig:
        """Return the collection; the sharding of its tables is planned again.

        Args:
            plan_file: JSON file of the plan, up to 4.0; positionally also 4.1's shard_matrix.
            emb_table_group_strategy: tables of each group, in 4.1.
            emb_table_placement_strategy: "mp" or "dp" for each group.
            shard_matrix: tables of each GPU.

        Raises:
            ConfigError: the file is not a list with one entry per GPU, or a strategy is unknown.
        """
        plan: Any = shard_matrix if plan_file is None else plan_file
        if isinstance(plan, str | Path):
            plan = load_json(Path(plan))
        if isinstance(plan, np.ndarray):
            plan = plan.tolist()
        if not isinstance(plan, list | tuple):
            raise ConfigError("a plan must be a list with one entry per GPU", where=str(plan_file or "shard_matrix"))
        for kind in emb_table_placement_strategy:
            if kind not in _PLACEMENTS:
                raise ConfigError("unknown strategy", where="emb_table_placement_strategy", value=kind,
                                  allowed=", ".join(_PLACEMENTS))  # fmt: skip
        note("EmbeddingPlanner", "plan_file" if isinstance(plan_file, str) else "shard_matrix")
        return self._collection
