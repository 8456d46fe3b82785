"""The tables of one served version of a model: their tiers, their updates, and what they have done."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.core.errors import CheckpointError, VivianeError, suggest
from viviane.core.logging import get_logger
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig
from viviane.embedding.initializers import table_seed
from viviane.ops.hash_table import initial_rows
from viviane.serving.parameter_server.databases import leave_database, take_database
from viviane.serving.parameter_server.device_caches import DeviceCaches, rows_of_cache
from viviane.serving.parameter_server.lookups import StoreCollection
from viviane.serving.parameter_server.saved_rows import SavedRowsTier
from viviane.serving.parameter_server.settings import TableSettings
from viviane.store.applied import AppliedRocksTier
from viviane.store.applier import Changes, Published, Stream
from viviane.store.cache import CacheTier
from viviane.store.circuit import CircuitBreaker
from viviane.store.device_cache import DeviceCacheTier
from viviane.store.gate import Gate
from viviane.store.hierarchy import Default, Level, TableHierarchy
from viviane.store.host import HostTier
from viviane.store.mover import Mover
from viviane.store.redis import RedisTier
from viviane.store.row_layout import Keys, RowLayout, Rows
from viviane.store.subscriber import DeltaSubscriber
from viviane.training.checkpoint.dense_state import NUM_DIGEST_ROWS, weights_digest
from viviane.training.checkpoint.manifest import Manifest

AnyTable = TableConfig | DynamicTableConfig
_POOL_THREADS: Final = 4
_WARM_ROWS: Final = 65_536
_APPLIED: Final = "applied"
_PUBLISHER: Final = "publisher"
_DENSE: Final = "dense"
_NO_KEYS: Keys = np.empty(0, np.int64)
_log = get_logger("serving")


@dataclass(frozen=True)
class Place:
    """Where the tables of a version are.

    Args:
        model, version: names of the rows in stores.
        weights: the folder of the saved weights.
        manifest: of the weights.
        published: which deltas they contain.
    """

    model: str
    version: int
    weights: Path
    manifest: Manifest
    published: Published


class ServedTables:
    """The hierarchies of all tables of a model version; what deltas change (`viviane.store.applier.DeltaTarget`).

    Args:
        place: where the saved tables are.
        settings: which tiers they have.
    """

    def __init__(self, place: Place, settings: TableSettings) -> None:
        self.place, self.settings = place, settings
        self.model = (settings.updates.model if settings.updates else None) or place.model
        self.hierarchies: dict[str, TableHierarchy] = {}
        self._resources = ExitStack()
        self.mover = Mover()
        self._resources.callback(self.mover.close)
        self._pool = None
        if settings.deadline_ms is not None:
            self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="viviane-lookup")
            self._resources.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        self._positions: dict[Stream, int] = {}
        self._publisher = 0
        self.base = 0
        """Digest of the saved weights, which tells publishers that began with others."""
        self.prepare_dense: Callable[[bytes], Callable[[], None]] | None = None
        """Reads dense weights that came with updates; what it returns lets requests use them."""
        self._subscriber: DeltaSubscriber | None = None
        self._turn = threading.Lock()
        self._gate = Gate()

    def make(
        self, tables: Sequence[AnyTable], features: Sequence[FeatureConfig], optimizer: Any, *, device: Any,
        seed: int, name: str,
    ) -> StoreCollection:  # fmt: skip
        """Make a collection of a graph, as `viviane.parallel.make_tables` is called."""
        del optimizer
        own: dict[str, TableHierarchy] = {}
        caches = DeviceCaches(self.settings.cache, torch.device(device), self._resources)
        with ExitStack() as opened:
            bases = {table.name: self._base(f"{name}.{table.name}", opened) for table in tables}
            caches.make({table: (base.layout, base.num_rows()) for table, base in bases.items()})
            for table in tables:
                full = f"{name}.{table.name}"
                own[table.name] = self._hierarchy(full, table, bases[table.name], caches, seed)
                self.hierarchies[full] = own[table.name]
            self._resources.push(opened.pop_all())
        return StoreCollection(tables, features, own, torch.device(device))

    def _base(self, full: str, opened: ExitStack) -> SavedRowsTier:
        entries = self.place.manifest.tables
        if full not in entries:
            raise CheckpointError("the saved model lacks a table", where=str(self.place.weights), value=full,
                                  fix=suggest(full, entries))  # fmt: skip
        base = SavedRowsTier(self.place.weights, entries[full])
        opened.callback(base.close)
        return base

    def _hierarchy(
        self, full: str, table: AnyTable, base: SavedRowsTier, caches: DeviceCaches, seed: int
    ) -> TableHierarchy:
        with ExitStack() as opened:
            levels = list(self._levels(full, table.name, base, caches, opened))
            made = TableHierarchy(
                full, base.layout, levels, default=_default(table, seed), strict=self.settings.strict,
                hit_rate_threshold=self.settings.hit_rate_threshold, deadline_ms=self.settings.deadline_ms,
                mover=self.mover, pool=self._pool,
            )  # fmt: skip
            self._resources.push(opened.pop_all())
        return made

    def _levels(
        self, full: str, table: str, base: SavedRowsTier, caches: DeviceCaches, opened: ExitStack
    ) -> Iterator[Level]:
        settings, layout = self.settings, base.layout
        if settings.cache is not None and settings.cache.place == "device":
            yield Level(caches.tier(table), "volatile")
        elif settings.cache is not None:
            rows = rows_of_cache(settings.cache, base.num_rows())
            yield Level(CacheTier(layout, rows, eviction=settings.cache.eviction), "volatile")
        keeps = settings.updates is not None and settings.rocksdb is None  # then the host's rows are the newest
        if settings.host is not None and not keeps:
            yield Level(self._host(layout), "volatile")
        if settings.redis is not None:
            yield self._redis(full, layout, opened)
        if settings.host is not None and keeps:
            yield Level(self._host(layout), "store")
        if settings.rocksdb is not None:
            folder = settings.rocksdb.folder
            database = take_database(folder, settings.rocksdb.cache_mb << 20)
            opened.callback(leave_database, folder)
            rocks = AppliedRocksTier(database, self._stored_name(full), layout)
            opened.callback(rocks.close)
            yield Level(rocks, "store")
        yield Level(base, "base")

    def _host(self, layout: RowLayout) -> Any:
        host = self.settings.host
        assert host is not None
        if host.rows is None:
            return HostTier(layout)
        return CacheTier(layout, host.rows, eviction=host.eviction, resolution=host.resolution, name="host")

    def _redis(self, full: str, layout: RowLayout, opened: ExitStack) -> Level:
        redis = self.settings.redis
        assert redis is not None
        tier = RedisTier(
            redis.address, f"{redis.instance}:{self._stored_name(full)}", layout, cluster=redis.cluster,
            partitions=redis.partitions, timeout_s=redis.timeout_ms / 1000,
            tls=None if redis.tls is None else redis.tls.options(), max_rows=redis.max_rows, eviction=redis.eviction,
            resolution=redis.resolution,
        )  # fmt: skip
        opened.callback(tier.close)
        if self.settings.updates is not None:
            tier.clear()  # it may have missed updates while no server ran
        return Level(tier, "volatile", CircuitBreaker(most_failures=1, pause_s=1.0))

    def _stored_name(self, full: str) -> str:
        """Return a table's name in stores: its content is part of it, since a model may be saved again in its place."""
        manifest = self.place.manifest
        sums = "".join(manifest.files[name].sha256 for name in manifest.tables[full].files)
        content = hashlib.sha256(sums.encode()).hexdigest()[:12]
        return f"{self.place.model}.{self.place.version}.{full}.{content}"

    # Deltas -----------------------------------------------------------------------------------------------------

    def row_bytes(self, table: str) -> int | None:
        """Return the bytes of a table's rows, or None."""
        return self.hierarchies[table].layout.row_bytes if table in self.hierarchies else None

    def applied(self, stream: Stream) -> int:
        """Return the seq of the last delta of a table and partition that was applied."""
        if stream in self._positions:
            return self._positions[stream]
        table, partition = stream
        if table:
            note = self.hierarchies[table].note(f"{_APPLIED} {partition}") if table in self.hierarchies else None
        else:
            note = self._model_note(f"{_APPLIED} {partition}")
        return self._positions.setdefault(stream, int(note) if note is not None else self._saved_position(stream))

    def _saved_position(self, stream: Stream) -> int:
        return self.place.published.positions.get(stream, 0)

    def publisher(self) -> int:
        """Return whose deltas were applied."""
        if not self._publisher:
            notes = [one.note(_PUBLISHER) for one in self.hierarchies.values()]
            self._publisher = next((int(note) for note in notes if note is not None), 0)
        return self._publisher or self.place.published.publisher

    def apply(
        self, changes: Mapping[str, Changes], last: Mapping[Stream, int], publisher: int, dense: bytes | None,
        publication: int,
    ) -> None:  # fmt: skip
        """Apply changes by table, the positions with them in one write where a table is in RocksDB."""
        commit = None
        if dense is not None and self.prepare_dense is not None:
            try:
                commit = self.prepare_dense(dense)
            except VivianeError as error:  # of another graph: the rows are right all the same
                _log.error("dense weights of an update are left out: %s", error)
        together = self.settings.updates is not None and self.settings.updates.visible == "publication"
        with self._turn, self._gate.alone() if together else nullcontext():
            for table, own in changes.items():
                hierarchy = self.hierarchies[table]
                keys, rows, erased = own.merged(hierarchy.layout.row_bytes)
                done = {stream: seq for stream, seq in last.items() if stream[0] == table}
                notes = {f"{_APPLIED} {partition}": str(seq).encode() for (_, partition), seq in done.items()}
                hierarchy.apply(keys, rows, erased, {**notes, _PUBLISHER: str(publisher).encode()})
                self._positions |= done
            self._keep_dense(None if commit is None else dense, last)
            self._positions |= last
            self._publisher = publisher
            if commit is not None:
                commit()

    def _keep_dense(self, dense: bytes | None, last: Mapping[Stream, int]) -> None:
        """Write dense weights beside the rows of the first table, so that a restart has both of one publication."""
        done = {partition: seq for (table, partition), seq in last.items() if not table}
        notes = {self._model_key(f"{_APPLIED} {partition}"): str(seq).encode() for partition, seq in done.items()}
        if dense is not None:
            notes[self._model_key(_DENSE)] = dense
        hierarchy = next(iter(self.hierarchies.values()), None)
        if notes and hierarchy is not None and hierarchy.takes_notes:
            hierarchy.apply(_NO_KEYS, hierarchy.layout.empty(0), _NO_KEYS, notes)

    def kept_dense(self) -> bytes | None:
        """Return the dense weights of the rows in the store; None: there are none newer than the saved ones."""
        return self._model_note(_DENSE)

    def _model_note(self, name: str) -> bytes | None:
        hierarchy = next(iter(self.hierarchies.values()), None)
        return None if hierarchy is None else hierarchy.note(self._model_key(name))

    def _model_key(self, name: str) -> str:
        return f"model {self.base} {name}"

    def set_base(self, dense: Mapping[str, torch.Tensor]) -> None:
        """Take the digest of the saved weights."""
        rows = {}
        for name, hierarchy in self.hierarchies.items():
            if not self.place.manifest.tables[name].is_dynamic:
                tier = hierarchy.levels[-1].tier
                rows[name] = hierarchy.layout.empty(min(NUM_DIGEST_ROWS, tier.num_rows()))
                tier.fetch(np.arange(len(rows[name])), rows[name])
        self.base = weights_digest(dense, rows)

    def reading(self) -> AbstractContextManager[None]:
        """Keep publications that become visible together out, while a request is computed."""
        return self._gate.beside_others()

    def follow(self) -> None:
        """Start to apply updates from the source in the settings.

        Raises:
            RemoteError: no broker answers within 3 seconds, or there is no such topic.
        """
        updates = self.settings.updates
        if updates is not None:
            self._subscriber = DeltaSubscriber(
                updates.address, self, visible=updates.visible, outbox=updates.outbox, settings=updates.settings
            )

    @property
    def updates(self) -> DeltaSubscriber | None:
        """What applies updates."""
        return self._subscriber

    # Life -------------------------------------------------------------------------------------------------------

    def warm_up(self, before: ServedTables | None = None) -> int:
        """Fill caches: with the keys that another version's caches hold, else with the first rows; returns rows."""
        rows = 0
        for name, hierarchy in self.hierarchies.items():
            cache = hierarchy.levels[0].tier
            if not isinstance(cache, CacheTier | DeviceCacheTier):
                continue
            older = before.hierarchies[name].levels[0].tier if before and name in before.hierarchies else None
            keys = (
                older.keys()
                if isinstance(older, CacheTier | DeviceCacheTier)
                else self._first_keys(hierarchy, cache.capacity)
            )
            for start in range(0, min(len(keys), cache.capacity), _WARM_ROWS):
                part = np.ascontiguousarray(keys[start : min(start + _WARM_ROWS, cache.capacity)])
                rows += hierarchy.warm(part)
        return rows

    @staticmethod
    def _first_keys(hierarchy: TableHierarchy, count: int) -> Keys:
        found: list[NDArray[np.int64]] = []
        for keys, _ in hierarchy.levels[-1].tier.scan(_WARM_ROWS):
            found.append(keys)
            if sum(map(len, found)) >= count:
                break
        return np.concatenate(found)[:count] if found else np.empty(0, np.int64)

    def status(self) -> dict[str, Any]:
        """Return counts of all tables as plain data."""
        updates = None if self._subscriber is None else self._subscriber.status()
        tables = [one.status() for one in self.hierarchies.values()]
        return {"tables": tables, "left_out": self.mover.num_left_out, "updates": updates}

    def close(self) -> None:
        """Stop updates and close all tiers."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._resources.close()


def _default(table: AnyTable, seed: int) -> Default:
    """Return what writes the rows of absent keys: zeros, or the values that a dynamic table's keys begin with."""
    if not isinstance(table, DynamicTableConfig) or table.absent == "zero":
        return _zeros
    kind, a, b = table.law
    dim, dtype, own = table.dim, table.torch_dtype, table_seed(seed, table.name)

    def drawn(keys: Keys, rows: Rows) -> None:
        weight = torch.zeros((len(keys), dim), dtype=dtype)
        initial_rows(weight, torch.arange(len(keys)), torch.from_numpy(keys), kind, a, b, own)
        rows[:] = 0
        if len(keys):
            rows[:, : dim * weight.element_size()] = weight.view(torch.uint8).numpy()

    return drawn


def _zeros(keys: Keys, rows: Rows) -> None:
    del keys
    rows[:] = 0
