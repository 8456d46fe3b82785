"""Chooses the exchange for each batch of a sharded collection: static, jagged or deduplicated.

An exchange is built for the first batch of a kind and kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import VivianeError
from viviane.embedding.batch_keys import Keys, read_keys
from viviane.parallel.dedup_exchange import DedupExchange
from viviane.parallel.distributed_input import DistributedInput, Exchange
from viviane.parallel.jagged_exchange import JaggedExchange, JaggedInput, exchange_sizes_ahead
from viviane.parallel.keys import Resolved
from viviane.parallel.sharded_tables import ShardedTables
from viviane.parallel.static_exchange import StaticExchange
from viviane.parallel.static_keys import check_sizes, fixed_hotness

_MAX_UNCHECKED = 64  # batches whose key errors on the GPU have not been read


class Exchanges:
    """Resolves the keys of a batch and runs the input_dist of the exchange that fits the batch.

    Args:
        sharded: the collection.

    Attributes:
        jagged: exchanges of batches with dynamic shapes, by names of one-hot columns.
        static: exchanges of batches with static shapes, by names of one-hot columns, hotness and batch size.
        dedup: exchanges that send distinct rows only, by names of one-hot columns.
    """

    def __init__(self, sharded: ShardedTables) -> None:
        self._sharded = sharded
        self.jagged: dict[tuple[str, ...], JaggedExchange] = {}
        self.static: dict[tuple[Any, ...], StaticExchange] = {}
        self.dedup: dict[tuple[str, ...], DedupExchange] = {}

    def input_dist(self, batch: Batch | Mapping[str, Bag | Tensor], *, ahead: bool = False) -> DistributedInput:
        """Send the ids of a batch to the ranks that hold their rows. Collective.

        Args:
            batch: the local batch.
            ahead: see `Exchange.input_dist`.
        """
        sharded = self._sharded
        if len(sharded.violations) >= _MAX_UNCHECKED:
            sharded.check()
        keys = read_keys(batch, sharded.features, sharded.device, sharded.violations)
        return self._exchange(keys).input_dist(keys, ahead=ahead)

    def input_dist_ahead(self, batch: Batch | None) -> JaggedInput | None:
        """Run the input_dist of a batch with dynamic shapes whose lookup comes later. Collective.

        Args:
            batch: the local batch; None: this rank could not read it.

        Returns:
            None where a rank has no batch or cannot resolve its keys: its lookup has the reason.
        """
        sharded, size = self._sharded, 0
        route: JaggedExchange | None = None
        found: Resolved | None = None
        with suppress(VivianeError, IndexError):
            if batch is not None:
                keys = read_keys(batch, sharded.features, sharded.device, sharded.violations)
                route, size = self._jagged_exchange(keys.one_hot_names), keys.size
                found = route.resolve(keys)
        sizes = exchange_sizes_ahead(sharded.group, list(sharded.features), size, found)
        if sizes is None or found is None or route is None:
            return None
        return route.exchanged(found, sizes, {})

    def open_peers(self) -> str | None:
        """Use peer memory for captured batches of the current size; return the reason if that is impossible."""
        routes = [route for route in self.static.values() if route.size == self._sharded.batch_size]
        if not routes:
            return "no batch of this size has been looked up yet"
        reasons = [route.open_peers() for route in routes]
        return next((one for one in reasons if one is not None), None)

    @property
    def has_peers(self) -> bool:
        """Whether a capture of a batch of the current size uses peer memory only."""
        own = self._sharded
        routes = [route for route in self.static.values() if route.size == own.batch_size]
        through = own.uses_peers and own.training and not own.deduplicate_ids
        return through and bool(routes) and all(one.peers is not None for one in routes)

    @contextmanager
    def through_peers(self) -> Iterator[None]:
        """Capture with peer memory inside a block, for exchanges on which `open_peers` succeeded."""
        for route in self.static.values():
            if route.peers is not None:
                route.peers.is_taken = False
        self._sharded.uses_peers = True
        try:
            yield
        finally:
            self._sharded.uses_peers = False

    def _exchange(self, keys: Keys) -> Exchange:
        sharded = self._sharded
        if sharded.deduplicate_ids:
            return self._dedup_exchange(keys.one_hot_names)
        size = sharded.fixed_batch_size
        static = None if size is None else self._static_exchange(keys, size)
        return static or self._jagged_exchange(keys.one_hot_names)

    def _static_exchange(self, keys: Keys, size: int) -> StaticExchange | None:
        """Return the exchange for static shapes, or None if the shapes of this batch are dynamic."""
        sharded = self._sharded
        check_sizes(keys, size, sharded.hotness)
        hotness = fixed_hotness(sharded.features, sharded.tables, keys, sharded.hotness)
        if hotness is None:
            return None
        kind = (keys.one_hot_names, hotness, size)
        if kind not in self.static:
            self.static[kind] = StaticExchange(sharded, keys.one_hot_names, hotness, size)
        return self.static[kind]

    def _jagged_exchange(self, one_hot: tuple[str, ...]) -> JaggedExchange:
        if one_hot not in self.jagged:
            self.jagged[one_hot] = JaggedExchange(self._sharded, one_hot)
        return self.jagged[one_hot]

    def _dedup_exchange(self, one_hot: tuple[str, ...]) -> DedupExchange:
        if one_hot not in self.dedup:
            self.dedup[one_hot] = DedupExchange(self._sharded, self._jagged_exchange(one_hot))
        return self.dedup[one_hot]
