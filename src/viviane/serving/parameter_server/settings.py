"""How the tables of a served model are held: one clause of JSON, or the same objects in Python."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from viviane.config.base import Settings
from viviane.core.locations import RemotePath, location
from viviane.data.streaming.topic import READING, refuse_credentials, refuse_fixed
from viviane.store.redis_wire import TlsOptions
from viviane.store.stream import StreamAddress


class CacheSettings(Settings):
    """Rows in this process, those that are asked for most.

    Args:
        rows: most rows of each table; None: `share` of the table.
        share: of a table's rows.
        eviction: "oldest" removes rows that were not read for longest, "random" any.
        warm_up: fill it from the tiers below before the first request.
        place: "host", or "device": the GPU of the session, where lookups then run.
        host_rows: with "device", more rows of each table in page-locked memory of the host, which the GPU reads.
    """

    rows: int | None = Field(default=None, ge=1, le=1 << 31)
    share: float = Field(default=0.2, gt=0, le=1)
    eviction: Literal["oldest", "random"] = "oldest"
    warm_up: bool = True
    place: Literal["host", "device"] = "host"
    host_rows: int = Field(default=0, ge=0, le=1 << 30)

    @model_validator(mode="after")
    def _behind_a_device(self) -> CacheSettings:
        if self.host_rows and self.place == "host":
            raise ValueError('host_rows is for a cache with place="device"; one with place="host" takes rows or share')
        return self


class HostSettings(Settings):
    """Rows in this process's memory, filled as they are asked for.

    Args:
        rows: most rows of each table; None: all of it, and more as keys come.
        eviction: which rows make room beyond `rows`.
        resolution: down to which share of `rows`.
    """

    rows: int | None = Field(default=None, ge=1, le=1 << 31)
    eviction: Literal["oldest", "random"] = "oldest"
    resolution: float = Field(default=0.8, gt=0, lt=1)


class TlsSettings(Settings):
    """Encryption to Redis: certificates by file."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> TlsSettings:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file is the key of cert_file, which is not set: set both, or leave key_file out")
        return self

    def options(self) -> TlsOptions:
        """Return what connections take."""
        return TlsOptions(self.ca_file, self.cert_file, self.key_file, self.server_name)


class RedisSettings(Settings):
    """Rows in Redis or Valkey. User and password: VIVIANE_REDIS_USERNAME, VIVIANE_REDIS_PASSWORD.

    Args:
        address: host:port, or [address]:port of IPv6; of a cluster any of its nodes, several with commas.
        instance: part of the rows' name there. Servers with one name share rows, which is for models without updates:
            a server with updates needs a name of its own.
        cluster: the address is of a cluster.
        partitions: hashes a table; of a cluster at least 8 for each node. None: 24 of a cluster, 4 of a single server.
        timeout_ms: how long it may be silent.
        tls: None: without encryption.
        max_rows: most rows of a table; others make room beyond it, beside lookups.
        eviction, resolution: as for `HostSettings`.
    """

    address: str
    instance: str = Field(default="shared", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    cluster: bool = False
    partitions: int | None = Field(default=None, ge=1, le=16_384)
    timeout_ms: float = Field(default=200, gt=0, le=60_000)
    tls: TlsSettings | None = None
    max_rows: int | None = Field(default=None, ge=1)
    eviction: Literal["oldest", "random"] = "random"
    resolution: float = Field(default=0.8, gt=0, lt=1)


def _on_a_local_disk(value: str | None) -> str | None:
    if value is not None and isinstance(location(value), RemotePath):
        raise ValueError("must be a folder on a disk of this machine, not a URL")
    return value


class RocksSettings(Settings):
    """Rows in RocksDB, on a disk of this machine: those that updates have changed; see `viviane store import`.

    Args:
        folder: of the database, which one process has open at a time; versions of models share it.
        cache_mb: of blocks that it keeps in memory.
    """

    folder: str = Field(min_length=1)
    cache_mb: int = Field(default=64, ge=1, le=1 << 24)

    _is_local = field_validator("folder")(_on_a_local_disk)


class UpdateSettings(Settings):
    """Where changed rows come from.

    Args:
        address: kafka://host:port/topic.
        model: by which the publisher calls the model; None: the model's own name.
        visible: "row": as they come; "publication": all of a publication together.
        outbox: the publisher's outbox, where this machine can read it, for updates that the stream has lost.
        settings: librdkafka's own; user and password come from the environment.
    """

    address: str
    model: str | None = None
    visible: Literal["row", "publication"] = "row"
    outbox: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("address")
    @classmethod
    def _stream(cls, value: str) -> str:
        StreamAddress.of(value, where="updates.address")
        return value

    _is_local = field_validator("outbox")(_on_a_local_disk)

    @field_validator("settings")
    @classmethod
    def _no_credentials(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_credentials(value)
        refuse_fixed(value, READING, "updates.settings")
        return value


class TableSettings(Settings):
    """The tiers of a served model's tables, fastest first; each may be left out. The saved model is below all.

    Args:
        strict: fail where a tier that may hold the answer fails; False: answer with what other tiers have, counted.
        hit_rate_threshold: share of a lookup's keys that the cache has to have for the others to read the default
            value and be fetched beside the request; 1: every answer is exact.
        deadline_ms: how long a lookup waits for tiers below the cache; None: as long as they take.

    Example:
        >>> clause = {"cache": {"share": 0.1}, "rocksdb": {"folder": "/nvme/ps"}}
        >>> TableSettings.from_dict(clause).cache.share
        0.1
    """

    cache: CacheSettings | None = CacheSettings()
    host: HostSettings | None = None
    redis: RedisSettings | None = None
    rocksdb: RocksSettings | None = None
    updates: UpdateSettings | None = None
    strict: bool = False
    hit_rate_threshold: float = Field(default=1.0, gt=0, le=1)
    deadline_ms: float | None = Field(default=None, gt=0, le=3_600_000)

    @model_validator(mode="after")
    def _keeps_updates(self) -> TableSettings:
        if self.updates is None:
            return self
        if self.rocksdb is None and (self.host is None or self.host.rows is not None):
            raise ValueError("updates need a place that keeps them: rocksdb, or host without a bound on rows")
        if self.redis is not None and self.redis.instance == "shared":
            raise ValueError("with updates each server needs rows of its own in redis: set redis.instance")
        return self
