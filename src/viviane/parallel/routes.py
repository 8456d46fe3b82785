"""The ways that batches of a sharded collection take: one for each kind of batch, made when the first one comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.embedding.plan import Keys, read_keys
from viviane.parallel.distinct import DistinctAsked, DistinctRoute
from viviane.parallel.fixed import FixedAsked, FixedRoute
from viviane.parallel.fixed_keys import check_sizes, fixed_hotness
from viviane.parallel.keys import KeyResolver
from viviane.parallel.route import Asked, Route, exchange_sizes

if TYPE_CHECKING:
    import torch

    from viviane.parallel.collection import ShardedCollection

AnyAsked: TypeAlias = Asked | FixedAsked | DistinctAsked
_MOST_UNCHECKED = 64  # records of batches that wait on a GPU to be read


class Routes:
    """Resolves a batch's keys and exchanges ids, in the way that fits the batch.

    Args:
        sharded: whose batches they are.
        row_dtype: of rows on the wire where sizes vary.

    Attributes:
        varying: by names of one-hot columns: sizes are exchanged.
        fixed: by names of one-hot columns, hotness and rows: sizes are known beforehand.
        distinct: by names of one-hot columns: rows travel once.
        uses_peers: whether what is recorded now goes through memory that all processes write to.
    """

    def __init__(self, sharded: ShardedCollection, row_dtype: torch.dtype) -> None:
        self._sharded, self._row_dtype = sharded, row_dtype
        self.uses_peers = False
        self.varying: dict[tuple[str, ...], Route] = {}
        self.fixed: dict[tuple[Any, ...], FixedRoute] = {}
        self.distinct: dict[tuple[str, ...], DistinctRoute] = {}

    def ask(self, batch: Batch | Mapping[str, Bag | Tensor], *, ahead: bool = False) -> AnyAsked:
        """Exchange a batch's ids; all processes call it together.

        Args:
            batch: of this process.
            ahead: see `FixedRoute.ask`.
        """
        sharded = self._sharded
        if len(sharded.violations) >= _MOST_UNCHECKED:
            sharded.check()
        keys = read_keys(batch, sharded.features, sharded.device, sharded.violations)
        if sharded.deduplicate_ids:
            return self._distinct_route(keys.one_hot_names).ask(keys)
        size = sharded.batch_size if sharded.training else None
        fixed = None if size is None else self._fixed_route(keys, size)
        return self._ask_varying(keys, size) if fixed is None else fixed.ask(keys, ahead=ahead)

    def open_peers(self) -> str | None:
        """Let recorded batches of the present size be exchanged through the GPUs' memory; returns why not, or None."""
        routes = [route for route in self.fixed.values() if route.size == self._sharded.batch_size]
        if not routes:
            return "no batch of this size has been looked up so far"
        reasons = [route.open_peers() for route in routes]
        return next((one for one in reasons if one is not None), None)

    @property
    def has_peers(self) -> bool:
        """Whether all that is recorded now of batches of the present size goes through memory of all processes."""
        own = self._sharded
        routes = [route for route in self.fixed.values() if route.size == own.batch_size]
        through = self.uses_peers and own.training and not own.deduplicate_ids
        return through and bool(routes) and all(one.peers is not None for one in routes)

    @contextmanager
    def through_peers(self) -> Iterator[None]:
        """Exchange what is recorded in a block so, where `open_peers` has opened the way."""
        for route in self.fixed.values():
            if route.peers is not None:
                route.peers.is_taken = False
        self.uses_peers = True
        try:
            yield
        finally:
            self.uses_peers = False

    def _ask_varying(self, keys: Keys, size: int | None) -> Asked:
        sharded, route = self._sharded, self._route(keys.one_hot_names)
        group, found = sharded.group, route.resolve(keys)
        sizes = [0 if size is None else size] * group.size
        if size is None:
            sizes = exchange_sizes(group, list(sharded.features), keys.size, found)
        asked = route.exchange(group, found, sizes, {} if size is None else sharded.hotness)
        return Asked(asked, route.local(found), sizes, found.scales, found.masks)

    def _fixed_route(self, keys: Keys, size: int) -> FixedRoute | None:
        """Return the way of batches of fixed shapes, where this is one."""
        sharded = self._sharded
        check_sizes(keys, size, sharded.hotness)
        hotness = fixed_hotness(sharded.features, sharded.tables, keys, sharded.hotness)
        if hotness is None:
            return None
        kind = (keys.one_hot_names, hotness, size)
        if kind not in self.fixed:
            self.fixed[kind] = FixedRoute(sharded, keys.one_hot_names, hotness, size)
        return self.fixed[kind]

    def _route(self, one_hot: tuple[str, ...]) -> Route:
        if one_hot not in self.varying:
            sharded = self._sharded
            resolver = KeyResolver(
                sharded.features, sharded.tables, one_hot, sharded.violations, sharded.device, self._row_dtype
            )
            self.varying[one_hot] = Route(resolver, sharded.pieces, sharded.group, sharded.device)
        return self.varying[one_hot]

    def _distinct_route(self, one_hot: tuple[str, ...]) -> DistinctRoute:
        if one_hot not in self.distinct:
            route = self._route(one_hot)
            self.distinct[one_hot] = DistinctRoute(self._sharded, route.resolve, route)
        return self.distinct[one_hot]
