"""Tables of a served model in tiers: cache, host memory, Redis, RocksDB, and the saved model below."""

from viviane.serving.parameter_server.settings import (
    CacheSettings,
    HostSettings,
    RedisSettings,
    RocksSettings,
    TableSettings,
    TlsSettings,
    UpdateSettings,
)

__all__ = [
    "CacheSettings",
    "HostSettings",
    "RedisSettings",
    "RocksSettings",
    "TableSettings",
    "TlsSettings",
    "UpdateSettings",
]
