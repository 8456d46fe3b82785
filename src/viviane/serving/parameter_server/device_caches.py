"""Caches on a GPU for the tables of a collection, and the lookup of all its features in them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.ops.row_cache import DeviceRowCache
from viviane.serving.parameter_server.settings import CacheSettings
from viviane.store.device_cache import DeviceCacheTier
from viviane.store.hierarchy import Begun, TableHierarchy
from viviane.store.row_layout import Keys, RowLayout

_NO_TABLE = -1
"""The table of an entry that reads zeros."""


def rows_of_cache(settings: CacheSettings, num_rows: int) -> int:
    """Return the rows of a table's cache.

    Example:
        >>> rows_of_cache(CacheSettings(share=0.1), 50)
        5
    """
    return settings.rows or max(1, round(settings.share * num_rows))


class DeviceCaches:
    """The caches of a collection on a GPU: one for all tables with rows of one length.

    Args:
        settings: None, or with place="host": there are none.
        device: where they are.
        resources: empties them at the end.
    """

    def __init__(self, settings: CacheSettings | None, device: torch.device, resources: ExitStack) -> None:
        self._settings, self._device, self._resources = settings, device, resources
        self._tiers: dict[str, DeviceCacheTier] = {}

    def make(self, tables: Mapping[str, tuple[RowLayout, int]]) -> None:
        """Make the caches and the tiers of tables, given the layout and the number of rows of each."""
        settings = self._settings
        if settings is None or settings.place == "host":
            return
        for row_bytes in sorted({layout.row_bytes for layout, _ in tables.values()}):
            own = {name: one for name, one in tables.items() if one[0].row_bytes == row_bytes}
            shares = {name: rows_of_cache(settings, num_rows) for name, (_, num_rows) in own.items()}
            cache = DeviceRowCache(
                sum(shares.values()), row_bytes, self._device, host_capacity=settings.host_rows * len(own),
                eviction=settings.eviction,
            )  # fmt: skip
            self._resources.callback(cache.clear)
            for number, (name, (layout, _)) in enumerate(own.items()):
                self._tiers[name] = DeviceCacheTier(layout, cache, number, shares[name])

    def tier(self, table: str) -> DeviceCacheTier:
        """Return a table's tier."""
        return self._tiers[table]


@dataclass(frozen=True)
class Asked:
    """A feature's keys in a lookup.

    Args:
        hierarchy: of its table.
        keys: (B,).
        skipped: places of keys that read zeros, or None.
        start: the first of its columns in the output.
    """

    hierarchy: TableHierarchy
    keys: Keys
    skipped: NDArray[np.int64] | None
    start: int


def lookup_on_device(asked: Sequence[Asked], out: Tensor) -> None:
    """Copy the rows of all features to their columns of `out`, (B, W) float32, on the device of the caches.

    One launch serves all features whose tables share a cache; what the cache lacks comes from the tiers below.
    """
    groups: dict[int, list[Asked]] = {}
    for one in asked:
        groups.setdefault(id(_tier(one).cache), []).append(one)
    for own in groups.values():
        _lookup_group(own, out)


def _tier(one: Asked) -> DeviceCacheTier:
    tier = one.hierarchy.levels[0].tier
    assert isinstance(tier, DeviceCacheTier)
    return tier


def _lookup_group(asked: Sequence[Asked], out: Tensor) -> None:
    cache = _tier(asked[0]).cache
    begun = [one.hierarchy.begin() for one in asked]
    start = time.perf_counter()
    with cache.requests.take(len(asked), len(out)) as request:
        tables = [_tier(one).table if state.is_readable else _NO_TABLE for one, state in zip(asked, begun, strict=True)]
        for i, one in enumerate(asked):
            request.keys[i] = one.keys
            if one.skipped is not None:
                request.skip(i, one.skipped)
        found = cache.find_for(request, out, [one.start for one in asked], tables).copy()
    seconds = time.perf_counter() - start
    hits = np.count_nonzero(found, axis=1).tolist()
    for i, (one, state) in enumerate(zip(asked, begun, strict=True)):
        skipped = 0 if one.skipped is None else len(one.skipped)
        absent = len(out) - skipped - hits[i]
        _tier(one).fetched(seconds, hits[i], absent)
        if absent or not state.is_readable:
            _complete(one, found[i], state, out)
        else:
            one.hierarchy.count_hits(hits[i])


def _complete(one: Asked, found: NDArray[np.bool_], begun: Begun, out: Tensor) -> None:
    """Write rows that the cache lacks to a feature's columns of `out`."""
    if one.skipped is None:
        missing, given, _ = one.hierarchy.complete(one.keys, found, begun)
    else:
        counting = np.setdiff1d(np.arange(len(found)), one.skipped, assume_unique=True)
        missing, given, _ = one.hierarchy.complete(np.ascontiguousarray(one.keys[counting]), found[counting], begun)
        missing = counting[missing]
    if len(missing):  # seldom: a view of the columns alone takes microseconds for each feature
        rows = out[:, one.start : one.start + given.shape[1] // 4]
        rows[torch.from_numpy(missing).to(rows.device)] = torch.from_numpy(given.view(np.float32)).to(rows.device)
