"""HugeCTR's parameter server in Python: vectors of keys, from tiers over the files of trained models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.enums import DatabaseOverflowPolicy_t, DatabaseType_t, UpdateSourceType_t
from viviane.compat.hugectr.key_files import KeyFilesTier
from viviane.compat.hugectr.messages import MessageSource, topic_of
from viviane.compat.hugectr.serving_params import InferenceParams, ParameterServerConfig, server_from_json
from viviane.core.errors import ConfigError, suggest
from viviane.core.whole_numbers import whole_numbers
from viviane.store.applied import AppliedRocksTier
from viviane.store.cache import CacheTier
from viviane.store.hierarchy import Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.mover import Mover
from viviane.store.redis import RedisTier
from viviane.store.redis_wire import TlsOptions
from viviane.store.rocks import RocksDatabase
from viviane.store.row_layout import Keys, RowLayout, Rows

_UNBOUNDED = 2**63


class HPS:
    """Looks keys up in the tables of several models: cache, volatile database, persistent database, the files below.

    With `hit_rate_threshold` below 1 keys that the cache has not may read the default value and are fetched beside
    the call, as in HugeCTR; at 1 every answer is exact.

    Args:
        config: a ParameterServerConfig, or the path of a parameter server's JSON.
    """

    def __init__(self, config: ParameterServerConfig | str) -> None:
        given = server_from_json(config) if isinstance(config, str | Path) else config
        self._tables: dict[str, list[TableHierarchy]] = {}
        self._opened = ExitStack()
        self._mover = Mover()
        self._opened.callback(self._mover.close)
        self._databases: dict[str, RocksDatabase] = {}
        self.updates: MessageSource | None = None
        try:
            for params in given.inference_params_array:
                self._tables[params.model_name] = list(self._open(given, params))
            self._follow(given)
        except BaseException:
            self._opened.close()
            raise
        print_notes()

    def _open(self, given: ParameterServerConfig, params: InferenceParams) -> Iterator[TableHierarchy]:
        widths = given.embedding_vec_size.get(params.model_name) or params.embedding_vecsize_per_table or []
        for i, folder in enumerate(params.sparse_model_files):
            base = KeyFilesTier(Path(folder), widths[i] if i < len(widths) else None)
            name = f"{params.model_name}.{self._names(given, params)[i]}"
            default = np.full(base.layout["weight"].width, params.default_of(i), np.float32).view(np.uint8)
            levels = list(self._levels(given, params, name, base))
            table = TableHierarchy(
                name, base.layout, levels, default=_constant(default), mover=self._mover,
                hit_rate_threshold=float(params.hit_rate_threshold),
            )  # fmt: skip
            self._opened.callback(table.close)
            self._fill(table, given, params)
            yield table

    @staticmethod
    def _names(given: ParameterServerConfig, params: InferenceParams) -> list[str]:
        names = given.emb_table_name.get(params.model_name) or params.embedding_table_names or []
        return [names[i] if i < len(names) else f"sparse_embedding{i}" for i in range(len(params.sparse_model_files))]

    # Tiers ------------------------------------------------------------------------------------------------------

    def _levels(
        self, given: ParameterServerConfig, params: InferenceParams, name: str, base: KeyFilesTier
    ) -> Iterator[Level]:
        layout = base.layout
        if params.use_gpu_embedding_cache:
            rows = max(1, round(float(params.cache_size_percentage) * base.num_rows()))
            yield Level(CacheTier(layout, rows), "volatile")
        volatile, persistent = given.volatile_db or params.volatile_db, given.persistent_db or params.persistent_db
        if volatile is not None and volatile.type == DatabaseType_t.redis_cluster:
            yield Level(self._redis(volatile, name, layout), "volatile")
        elif volatile is not None and volatile.type != DatabaseType_t.disabled:
            updated = (given.update_source or params.update_source) is not None
            host = self._host(volatile, layout)
            keeps = updated and persistent is None and isinstance(host, HostTier)
            yield Level(host, "store" if keeps else "volatile")
        if persistent is not None and persistent.type == DatabaseType_t.rocks_db:
            yield Level(AppliedRocksTier(self._database(str(persistent.path)), f"hps_et.{name}", layout), "store")
        yield Level(base, "base")

    @staticmethod
    def _host(volatile: Any, layout: RowLayout) -> Any:
        margin = int(volatile.overflow_margin) * int(volatile.num_partitions)
        if margin >= _UNBOUNDED:
            return HostTier(layout)
        policy = volatile.overflow_policy
        eviction = "random" if policy == DatabaseOverflowPolicy_t.evict_random else "oldest"
        resolution = float(volatile.overflow_resolution_target)
        return CacheTier(layout, margin, eviction=eviction, resolution=resolution, name="host")  # type: ignore[arg-type]

    def _redis(self, volatile: Any, name: str, layout: RowLayout) -> RedisTier:
        if volatile.password:
            raise ConfigError("a password does not stand in settings", where="volatile_db, password",
                              fix="set VIVIANE_REDIS_USERNAME and VIVIANE_REDIS_PASSWORD")  # fmt: skip
        tls = None
        if volatile.enable_tls:
            server = volatile.tls_server_name_identification
            tls = TlsOptions(
                volatile.tls_ca_certificate, volatile.tls_client_certificate, volatile.tls_client_key, server
            )
        address = str(volatile.address).replace(";", ",")
        return RedisTier(
            address, f"hps_et.{name}", layout, cluster=True, partitions=int(volatile.num_partitions), tls=tls
        )

    def _database(self, path: str) -> RocksDatabase:
        if path not in self._databases:
            self._databases[path] = RocksDatabase(path)
            self._opened.callback(self._databases[path].close)
        return self._databases[path]

    @staticmethod
    def _fill(table: TableHierarchy, given: ParameterServerConfig, params: InferenceParams) -> None:
        """Fill the copies from the files, as the databases' settings say."""
        volatile = given.volatile_db or params.volatile_db
        base = table.levels[-1].tier
        left = base.num_rows()
        wanted = any(level.role == "volatile" for level in table.levels)
        if volatile is not None:
            wanted = bool(volatile.initialize_after_startup)
            left = round(left * float(volatile.initial_cache_rate))
        for keys, _ in base.scan():
            if not wanted or left <= 0:
                break
            table.warm(keys[:left])
            left -= len(keys)

    # Updates ----------------------------------------------------------------------------------------------------

    def _follow(self, given: ParameterServerConfig) -> None:
        source = given.update_source or next(
            (one.update_source for one in given.inference_params_array if one.update_source is not None), None
        )
        if source is None or source.type == UpdateSourceType_t.null:
            return
        tables = {}
        for params in given.inference_params_array:
            for name, table in zip(self._names(given, params), self._tables[params.model_name], strict=True):
                if all(level.role != "store" for level in table.levels):
                    raise ConfigError(
                        "updates need a place that keeps them", where=f"HPS, table {table.name!r}",
                        fix="a persistent_db, or a volatile_db in memory without overflow_margin",
                    )  # fmt: skip
                tables[topic_of(params.model_name, name)] = (table, table.layout["weight"].width)
        brokers = str(source.brokers).replace(";", ",")
        self.updates = MessageSource(brokers, tables)
        self._opened.callback(self.updates.close)

    # Lookup -----------------------------------------------------------------------------------------------------

    def _table(self, model_name: str, table_id: int) -> TableHierarchy:
        if model_name not in self._tables:
            raise ConfigError("no such model", where="HPS", value=model_name, fix=suggest(model_name, self._tables))
        tables = self._tables[model_name]
        if not 0 <= table_id < len(tables):
            raise ConfigError("no such table", where=f"HPS, model {model_name!r}", value=table_id,
                              allowed=f"0 to {len(tables) - 1}")  # fmt: skip
        return tables[table_id]

    def tables(self, model_name: str) -> list[TableHierarchy]:
        """Return the tiers of a model's tables, in the order of its sparse files."""
        self._table(model_name, 0)
        return list(self._tables[model_name])

    def lookup(self, keys: Any, model_name: str, table_id: int, device_id: int = 0) -> NDArray[np.float32]:
        """Return (n, D), a vector for each key."""
        table = self._table(model_name, table_id)
        wanted = np.ascontiguousarray(whole_numbers(keys, np.int64, "HPS, keys").reshape(-1))
        rows = table.layout.empty(len(wanted))
        table.lookup(wanted, rows)
        found: NDArray[np.float32] = np.ascontiguousarray(table.layout.column(rows, "weight")).view(np.float32)
        return found

    def lookup_fromdlpack(self, keys: Any, output: Any, model_name: str, table_id: int, device_id: int = 0) -> None:
        """Look keys up, and write their vectors into a tensor; both are DLPack capsules."""
        given, out = from_dlpack(keys), from_dlpack(output)
        found = self.lookup(given.cpu().numpy(), model_name, table_id)
        out.view(-1).copy_(torch.from_numpy(found).view(-1))

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """Return by model what its tables and their tiers have done."""
        return {name: [table.status() for table in tables] for name, tables in self._tables.items()}

    def close(self) -> None:
        """Close all tiers."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _constant(value: NDArray[np.uint8]) -> Any:
    def write(keys: Keys, rows: Rows) -> None:
        del keys
        rows[:] = 0
        rows[:, : len(value)] = value

    return write
