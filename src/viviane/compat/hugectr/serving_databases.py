"""The databases of HugeCTR's parameter server: their settings, checked before anything is opened."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import Field, StrictBool, field_validator

from viviane.compat.hugectr.arguments import note
from viviane.compat.hugectr.enums import DatabaseOverflowPolicy_t, DatabaseType_t, UpdateSourceType_t
from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.store.redis_wire import TlsOptions

_LARGEST: Final = 2**64 - 1
_UNBOUNDED: Final = 2**63
_MEMORY: Final = ("hash_map", "parallel_hash_map", "multi_process_hash_map")
_SIZES: Final = {
    "volatile_db": ("algorithm", "allocation_rate", "max_get_batch_size", "max_set_batch_size", "max_batch_size",
                    "num_node_connections"),
    "persistent_db": ("num_threads", "max_batch_size", "max_get_batch_size", "max_set_batch_size", "backend"),
    "update_source": ("receive_buffer_size", "max_receive_buffer_size", "max_batch_size", "max_commit_interval"),
}  # fmt: skip
"""Arguments that affect speed alone: batches, buffers and threads are sized here by what they hold."""


def refuse_credentials(name: str, values: dict[str, Any]) -> None:
    """Refuse a user or password in arguments, whatever the database is.

    Raises:
        ConfigError: there is one; the message does not show it.
    """
    for field, variable in (("password", "VIVIANE_REDIS_PASSWORD"), ("user_name", "VIVIANE_REDIS_USERNAME")):
        if values.get(field) not in (None, "", "default" if field == "user_name" else ""):
            raise ConfigError("credentials come only from the environment", where=f"{name}, {field}",
                              fix=f"remove it, and set {variable}")  # fmt: skip


class _Filtered(Settings):
    update_filters: list[str] = Field(default_factory=lambda: ["^hps_.+$"])

    @field_validator("update_filters")
    @classmethod
    def _patterns(cls, value: list[str]) -> list[str]:
        for one in value:
            try:
                re.compile(one)
            except re.error as error:
                raise ValueError(f"not a regular expression: {one[:80]!r}: {error}") from None
        return value

    def follows(self, model: str, topic: str) -> bool:
        """Return whether updates of a topic are for this database.

        A filter that begins with "^" is compared with the topic, as since HugeCTR 4; another is the model's name, or
        an expression for it, as before.

        Example:
            >>> PersistentDatabase(update_filters=["^hps_et.m.a$", "other"]).follows("m", "hps_et.m.a")
            True
            >>> PersistentDatabase(update_filters=["other"]).follows("m", "hps_et.m.a")
            False
        """
        return any(
            re.search(one, topic) is not None if one.startswith("^") else re.fullmatch(one, model) is not None
            for one in self.update_filters
        )


class VolatileDatabase(_Filtered):
    """Copies of rows in memory or in Redis; see `VolatileDatabaseParams`."""

    type: Literal["hash_map", "parallel_hash_map", "multi_process_hash_map", "redis_cluster"]
    shared_memory_size: int = Field(ge=1)
    shared_memory_name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,80}$")
    shared_memory_auto_remove: StrictBool
    address: str = Field(min_length=1)
    num_partitions: int = Field(ge=1, le=16_384)
    enable_tls: StrictBool
    tls_ca_certificate: str
    tls_client_certificate: str
    tls_client_key: str
    tls_server_name_identification: str
    overflow_margin: int = Field(ge=1, le=_LARGEST)
    overflow_policy: Literal["evict_oldest", "evict_least_used", "evict_random"]
    overflow_resolution_target: float = Field(gt=0, lt=1)
    initialize_after_startup: StrictBool
    initial_cache_rate: float = Field(ge=0, le=1)
    cache_missed_embeddings: StrictBool
    refresh_time_after_fetch: StrictBool

    @property
    def in_redis(self) -> bool:
        """Whether rows are in Redis."""
        return self.type == "redis_cluster"

    @property
    def is_shared(self) -> bool:
        """Whether rows are in memory that processes share."""
        return self.type == "multi_process_hash_map"

    @property
    def addresses(self) -> str:
        """Addresses, separated by commas."""
        return self.address.replace(";", ",")

    @property
    def most_rows(self) -> int | None:
        """The most rows of a table; None: no bound."""
        rows = self.overflow_margin * self.num_partitions
        return None if rows >= _UNBOUNDED else rows

    @property
    def eviction(self) -> Literal["oldest", "random"]:
        """Which rows make room."""
        return "random" if self.overflow_policy == "evict_random" else "oldest"

    @property
    def tls(self) -> TlsOptions | None:
        """How connections are encrypted."""
        if not self.enable_tls:
            return None
        return TlsOptions(self.tls_ca_certificate, self.tls_client_certificate, self.tls_client_key,
                          self.tls_server_name_identification)  # fmt: skip


class PersistentDatabase(_Filtered):
    """Rows in RocksDB; see `PersistentDatabaseParams`."""

    path: str = Field(default="/tmp/rocksdb", min_length=1)
    read_only: StrictBool = False
    initialize_after_startup: StrictBool = True


class UpdateSource(Settings):
    """Where changed rows come from; see `UpdateSourceParams`."""

    brokers: str = Field(min_length=1)
    metadata_refresh_interval_ms: int = Field(default=30_000, ge=10, le=3_600_000)
    poll_timeout_ms: int = Field(default=500, ge=1, le=60_000)
    failure_backoff_ms: int = Field(default=50, ge=1, le=60_000)

    @property
    def addresses(self) -> str:
        """Addresses of the brokers, separated by commas."""
        return self.brokers.replace(";", ",")


def volatile_database(params: Any) -> VolatileDatabase | None:
    """Check the arguments of a volatile database; None: there is none.

    Raises:
        ConfigError: a value is out of range, or not supported; says what to use instead.
    """
    kind = _type(params, DatabaseType_t, "volatile_db")
    if kind in (None, "disabled"):
        return None
    if kind == "rocks_db":
        raise ConfigError("RocksDB is on a disk", where="volatile_db, type", value=kind,
                          allowed=", ".join([*_MEMORY, "redis_cluster"]), fix="make it the persistent_db")  # fmt: skip
    values = _kept(params, "volatile_db", VolatileDatabase)
    policy = values["overflow_policy"]
    if policy == DatabaseOverflowPolicy_t.evict_least_used:
        note("volatile_db", "evict_least_used removes the rows that were not read for longest")
    values["overflow_policy"] = getattr(policy, "name", policy)
    return VolatileDatabase.from_dict({**values, "type": kind}, where="volatile_db")


def persistent_database(params: Any) -> PersistentDatabase | None:
    """Check the arguments of a persistent database; None: there is none.

    Raises:
        ConfigError: a value is out of range, or the database keeps nothing.
    """
    kind = _type(params, DatabaseType_t, "persistent_db")
    if kind == "disabled" and params is not None and params.backend is not None:
        kind = getattr(params.backend, "name", params.backend)  # the argument's name in HugeCTR 3
    if kind in (None, "disabled"):
        return None
    if kind != "rocks_db":
        raise ConfigError("rows do not persist there", where="persistent_db, type", value=str(kind)[:80],
                          allowed="rocks_db, disabled", fix="make it the volatile_db")  # fmt: skip
    return PersistentDatabase.from_dict(_kept(params, "persistent_db", PersistentDatabase), where="persistent_db")


def update_source(params: Any) -> UpdateSource | None:
    """Check the arguments of a source of updates; None: there is none.

    Raises:
        ConfigError: a value is out of range.
    """
    if _type(params, UpdateSourceType_t, "update_source") in (None, "null"):
        return None
    return UpdateSource.from_dict(_kept(params, "update_source", UpdateSource), where="update_source")


def _type(params: Any, words: Any, where: str) -> str | None:
    if params is None:
        return None
    if not isinstance(params.type, words):
        raise ConfigError("unknown type", where=f"{where}, type", value=str(params.type)[:80],
                          allowed=", ".join(f"{words.__name__}.{one.name}" for one in words))  # fmt: skip
    found: str = params.type.name
    return found


def _kept(params: Any, where: str, kind: type[Settings]) -> dict[str, Any]:
    """Return the arguments that have an effect, and note the others that were given."""
    defaults = params.signature.defaults
    given = [name for name in _SIZES[where] if getattr(params, name) != defaults[name] and name != "backend"]
    if given:
        note(where, ", ".join(given))
    return {name: value for name, value in vars(params).items() if name in kind.model_fields and name != "type"}
