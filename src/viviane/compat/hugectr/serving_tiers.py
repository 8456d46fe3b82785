"""The tiers of a table of HugeCTR's parameter server, from the settings of its databases."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool

from viviane.compat.hugectr.key_files import KeyFilesTier
from viviane.compat.hugectr.serving_databases import (
    PersistentDatabase,
    UpdateSource,
    VolatileDatabase,
    persistent_database,
    update_source,
    volatile_database,
)
from viviane.compat.hugectr.serving_params import InferenceParams, ParameterServerConfig
from viviane.config.base import Settings
from viviane.core.errors import ConfigError, StoreError
from viviane.core.json_files import parse_json
from viviane.store.applied import AppliedRocksTier
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level
from viviane.store.host import HostTier
from viviane.store.redis import RedisTier
from viviane.store.rocks_database import RocksDatabase
from viviane.store.row_layout import RowLayout
from viviane.store.shared import SharedTier

_BASE: Final = "base"
_UNBOUNDED: Final = 2**63
_INSTANCE: Final = b"viviane instance"


class ServedModel(Settings):
    """A model of a parameter server; see `InferenceParams`."""

    model_name: str = Field(min_length=1)
    sparse_model_files: list[str]
    table_names: list[str]
    widths: list[int]
    default_value_for_each_table: list[float]
    use_gpu_embedding_cache: StrictBool
    cache_size_percentage: float = Field(ge=0, le=1)
    hit_rate_threshold: float = Field(ge=0, allow_inf_nan=False)

    @classmethod
    def of(cls, given: ParameterServerConfig, params: InferenceParams) -> ServedModel:
        """Check the arguments of a model.

        Raises:
            ConfigError: a value is out of range, or a list has not one entry for each table.
        """
        values = {name: value for name, value in vars(params).items() if name in cls.model_fields}
        model = params.model_name
        names = given.emb_table_name.get(model) or params.embedding_table_names or []
        widths = given.embedding_vec_size.get(model) or params.embedding_vecsize_per_table or []
        found = cls.from_dict({**values, "table_names": names, "widths": widths}, where=f"model {str(model)[:80]!r}")
        count = len(found.sparse_model_files)
        for what, one in (("embedding_table_names", found.table_names), ("embedding_vecsize_per_table", found.widths)):
            if one and len(one) != count:
                raise ConfigError("a model's lists need one entry for each table", where=f"model {model!r}, {what}",
                                  value=len(one), allowed=f"{count}, as sparse_files")  # fmt: skip
        if len(set(found.table_names)) != len(found.table_names):
            raise ConfigError("two tables have the same name", where=f"model {model!r}, embedding_table_names",
                              value=", ".join(found.table_names)[:200])  # fmt: skip
        return found

    @property
    def names(self) -> list[str]:
        """Names of the tables, in the order of their files."""
        return self.table_names or [f"sparse_embedding{i}" for i in range(len(self.sparse_model_files))]


@dataclass
class Databases:
    """The databases of one model.

    Args:
        volatile, persistent, source: None: there is none.
    """

    volatile: VolatileDatabase | None
    persistent: PersistentDatabase | None
    source: UpdateSource | None

    @classmethod
    def of(cls, given: ParameterServerConfig, params: InferenceParams) -> Databases:
        """Check the databases that a model uses: its own, or the server's.

        Raises:
            ConfigError: a value cannot be, or both name a database and differ.
        """
        found = cls(
            volatile_database(_one(given, params, "volatile_db")),
            persistent_database(_one(given, params, "persistent_db")),
            update_source(_one(given, params, "update_source")),
        )
        if found.source is not None and found.volatile is not None and found.volatile.is_shared:
            raise ConfigError(
                "processes apply updates at their own pace, so rows in shared memory could go back in time",
                where="volatile_db, type", value=found.volatile.type, fix="parallel_hash_map or redis_cluster",
            )  # fmt: skip
        return found

    @property
    def keeps_in_memory(self) -> bool:
        """Whether changed rows are kept in this process, for lack of a database that persists."""
        volatile, persistent = self.volatile, self.persistent
        kept = persistent is not None and not persistent.read_only
        return self.source is not None and not kept and volatile is not None and not volatile.in_redis

    def follows(self, model: str, topic: str) -> bool:
        """Return whether updates of a table are applied.

        Raises:
            ConfigError: one database would follow them and the other one keep older rows.
        """
        kept = self.persistent if self.persistent is not None and not self.persistent.read_only else None
        answers = {one.follows(model, topic) for one in (self.volatile, kept) if one is not None}
        if len(answers) > 1:
            raise ConfigError(
                "only one of the databases follows a table, so the other one would answer with older rows",
                where=f"update_filters, topic {topic}", fix="set the same update_filters for both",
            )  # fmt: skip
        return answers == {True}


def _one(given: ParameterServerConfig, params: InferenceParams, name: str) -> Any:
    outer, inner = getattr(given, name), getattr(params, name)
    if outer is not None and inner is not None and vars(outer) != vars(inner):
        raise ConfigError("the server and a model name different ones", where=f"{name}, model {params.model_name!r}",
                          fix="name it once")  # fmt: skip
    return inner if outer is None else outer


@dataclass
class TierMaker:
    """Opens tiers, and RocksDB folders once for all tables.

    Args:
        opened: closes the folders.
    """

    opened: ExitStack
    _folders: dict[str, RocksDatabase] = field(default_factory=dict)

    def levels(self, name: str, base: KeyFilesTier, model: ServedModel, databases: Databases) -> list[Level]:
        """Open the tiers of a table, fastest first, without rows of other files of the model."""
        layout, levels = base.layout, []
        volatile, persistent = databases.volatile, databases.persistent
        if model.use_gpu_embedding_cache:
            rows = max(1, round(model.cache_size_percentage * base.num_rows()))
            levels.append(Level(CacheTier(layout, rows), "volatile"))
        if volatile is not None and volatile.in_redis:
            levels.append(Level(self._redis(volatile, databases, name, layout), "volatile"))
        elif volatile is not None:
            host = _host(volatile, base)
            keeps = databases.keeps_in_memory and isinstance(host, HostTier)
            levels.append(Level(host, "store" if keeps else "volatile"))
        if volatile is not None:
            levels[-1].fills = volatile.cache_missed_embeddings
        if persistent is not None:
            tier = AppliedRocksTier(self._folder(persistent), f"hps_et.{name}", layout)
            if not persistent.read_only:
                _start_from(base, tier, persistent)
            levels.append(Level(tier, "base" if persistent.read_only else "store"))
        return [*levels, Level(base, "base")]

    def _redis(self, volatile: VolatileDatabase, databases: Databases, name: str, layout: RowLayout) -> RedisTier:
        table = f"hps_et.{name}"
        if databases.source is not None and databases.persistent is not None and not databases.persistent.read_only:
            # Of several servers each applies updates at its own pace: rows that they shared could go back in time.
            table = f"{_instance(self._folder(databases.persistent))}:{table}"
        tier = RedisTier(
            volatile.addresses, table, layout, cluster=True, partitions=volatile.num_partitions, tls=volatile.tls,
            max_rows=volatile.most_rows, eviction=volatile.eviction, resolution=volatile.overflow_resolution_target,
        )  # fmt: skip
        if volatile.initialize_after_startup or databases.source is not None:
            tier.clear()  # rows of earlier files, or such that missed updates while no server ran
        return tier

    def _folder(self, persistent: PersistentDatabase) -> RocksDatabase:
        path = persistent.path
        if path not in self._folders:
            self._folders[path] = RocksDatabase(path, read_only=persistent.read_only)
            self.opened.callback(self._folders[path].close)
        return self._folders[path]


def _host(volatile: VolatileDatabase, base: KeyFilesTier) -> HostTier | CacheTier | SharedTier:
    if volatile.is_shared:
        rows = min(base.num_rows(), volatile.most_rows or _UNBOUNDED)
        content = f"{base.digest()}.{base.layout.row_bytes}"
        return SharedTier(
            f"{volatile.shared_memory_name}.{content}", base.layout, max_rows=max(1, rows),
            max_bytes=volatile.shared_memory_size, eviction=volatile.eviction,
            remove=volatile.shared_memory_auto_remove,
        )  # fmt: skip
    if volatile.most_rows is None:
        return HostTier(base.layout)
    return CacheTier(base.layout, volatile.most_rows, eviction=volatile.eviction,
                     resolution=volatile.overflow_resolution_target, name="host")  # fmt: skip


def _instance(database: RocksDatabase) -> str:
    """Return a name that the folder's servers have alone, of which there is one at a time."""
    known = database.get(_INSTANCE)
    if known is None:
        known = uuid4().hex[:12].encode()
        database.put(_INSTANCE, known)
    name: str = known.decode()
    return name


def _start_from(base: KeyFilesTier, tier: AppliedRocksTier, persistent: PersistentDatabase) -> None:
    """Remove rows that belong to other files of the model than these, unless the settings keep them."""
    known, times = tier.note(_BASE), base.times()
    before = {} if known is None else parse_json(known, where=persistent.path, error=StoreError)
    if before.get("times") == times:
        return
    digest = base.digest()
    if before and before["digest"] != digest and persistent.initialize_after_startup:
        tier.clear()
    none: NDArray[np.int64] = np.empty(0, np.int64)
    note = json.dumps({"times": times, "digest": digest}).encode()
    tier.apply(none, tier.layout.empty(0), none, {_BASE: note})
