"""Count values and look them up on a device, shard by shard.

Shapes: N values of a shard; U distinct ones. A whole number is its own key of 64 bits; the key of a text is a hash, and
every text is compared with the one stored for its key, so that a shared hash is found and never merges two.

Counting sorts: one hot value costs what any other does, where atomic additions would queue for it. Looking up asks the
hash table of `viviane.ops.hash_table`, one read of memory a value.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.etl.device_texts import Texts
from viviane.ops.hash_table import make_index, stamp_of

SEEDS: Final = range(8)  # hashes to try before giving up; two of 10^8 texts share one with probability 1/2,000
_FEWEST_MERGED: Final = 1 << 20
_SIGN: Final = -(1 << 63)


class SharedHashError(VivianeError):
    """Two texts have one hash: another seed is needed."""


@dataclass(frozen=True)
class Counts:
    """Distinct values and how often each was seen.

    Args:
        keys: (U,), int64, rising.
        counts: (U,), int64.
        texts: that the keys are hashes of; None: the keys are the values.

    Example:
        >>> one, two = count_keys(torch.tensor([7, 7, 2])), count_keys(torch.tensor([9, 7]))
        >>> both = join_counts([one, two])
        >>> both.keys.tolist(), both.counts.tolist()
        ([2, 7, 9], [1, 3, 1])
    """

    keys: Tensor
    counts: Tensor
    texts: Texts | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def at_least(self, count: int) -> Counts:
        """Leave out values seen less often."""
        return self.take((self.counts >= count).nonzero().squeeze(1))

    def take(self, places: Tensor) -> Counts:
        """Return some of them, (M,), in any order."""
        texts = None if self.texts is None else self.texts.take(places)
        return Counts(self.keys[places], self.counts[places], texts)

    def ordered(self, *, by_value: bool, unsigned: bool) -> Counts:
        """Order whole numbers by value, or by falling count and equal counts by value."""
        order = torch.argsort(self.keys ^ _SIGN if unsigned else self.keys)  # distinct: no need to be stable
        if not by_value:
            order = order[torch.argsort(self.counts[order], descending=True, stable=True)]
        return self.take(order)


def count_keys(keys: Tensor) -> Counts:
    """Count whole numbers, (N,), int64; numbers less than 2^32 apart are sorted as int32, in half as many passes."""
    if len(keys) == 0:
        return Counts(keys, keys.clone())
    low, high = (int(end) for end in torch.aminmax(keys))
    if high - low >= 1 << 32:
        found, counts = torch.unique(keys, return_counts=True)
        return Counts(found, counts)
    middle = low + (1 << 31)
    middle -= (1 << 64) if middle >= 1 << 63 else 0  # arithmetic is modulo 2^64
    found, counts = torch.unique((keys - middle).to(torch.int32), return_counts=True)
    return Counts(found.to(torch.int64) + middle, counts)


def count_texts(texts: Texts, seed: int) -> Counts:
    """Count texts.

    Raises:
        SharedHashError: two different ones have one hash of this seed.
    """
    keys = texts.hashes(seed)
    return join_counts([Counts(keys, torch.ones_like(keys), texts)])


def join_counts(parts: Sequence[Counts]) -> Counts:
    """Add counts up; see `Counts`.

    Raises:
        SharedHashError: two different texts have one hash.
    """
    keys, inverse = torch.unique(torch.cat([part.keys for part in parts]), return_inverse=True)
    counts = torch.zeros_like(keys).index_add_(0, inverse, torch.cat([part.counts for part in parts]))
    texts = [part.texts for part in parts if part.texts is not None]
    if not texts:
        return Counts(keys, counts)
    every = Texts.join(texts)
    places = torch.arange(len(every), device=keys.device)
    standing = torch.empty_like(keys)
    standing[inverse] = places  # whichever is written last: they are equal, or it is found out here
    if not bool(every.equal(places, every, standing[inverse]).all()):
        raise SharedHashError("two texts have one hash")
    return Counts(keys, counts, every.take(standing))


class Tally:
    """Counts of a stream of shards: merged when what waits outgrows what is merged, so that each is merged few times.

    Example:
        >>> tally = Tally()
        >>> for shard in ([3, 1, 3], [1, 3]):
        ...     tally.add(count_keys(torch.tensor(shard)))
        >>> tally.total().counts.tolist()
        [2, 3]
    """

    def __init__(self) -> None:
        self._parts: list[Counts] = []

    def add(self, counts: Counts) -> None:
        """Count the values of one more shard."""
        self._parts.append(counts)
        merged, *waiting = (len(part) for part in self._parts)
        if sum(waiting) > max(_FEWEST_MERGED, merged):
            self._parts = [join_counts(self._parts)]

    def total(self) -> Counts | None:
        """Return the counts of all shards; None where there was none."""
        return join_counts(self._parts) if self._parts else None


class DeviceIndex:
    """Places of known values.

    Args:
        known: (U,), int64, or texts; distinct.

    Raises:
        SharedHashError: two known texts are the same, or no seed tells them apart.

    Example:
        >>> DeviceIndex(torch.tensor([7, -1])).find(torch.tensor([-1, 2, 7])).tolist()
        [1, -1, 0]
    """

    def __init__(self, known: Tensor | Texts) -> None:
        self._texts = known if isinstance(known, Texts) else None
        self._seed, keys = _told_apart(known) if isinstance(known, Texts) else (0, known)
        self._lock = threading.Lock()  # the index keeps notes between the kernels of a call
        self._index = make_index(max(1, len(keys)), initial_rows=max(1, len(keys)), device=keys.device)
        rows = torch.full_like(keys, -1)
        self._index.insert(keys, rows, torch.arange(len(keys), device=keys.device), stamp_of(0, 1))

    def find(self, values: Tensor | Texts) -> Tensor:
        """Return the place of each value, (N,), int64; -1 where it is not known."""
        keys = values.hashes(self._seed) if isinstance(values, Texts) else values
        with self._lock:
            rows = self._index.find(keys)
        if isinstance(values, Texts) and self._texts is not None:
            found = (rows >= 0).nonzero().squeeze(1)
            same = values.equal(found, self._texts, rows[found])
            rows[found[~same]] = -1
        return rows


def _told_apart(known: Texts) -> tuple[int, Tensor]:
    for seed in SEEDS:
        keys = known.hashes(seed)
        if len(torch.unique(keys)) == len(keys):
            return seed, keys
    raise SharedHashError("known values are not distinct", value=f"{len(known)} texts")
