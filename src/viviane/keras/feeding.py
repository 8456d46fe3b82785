"""Batches of whatever a user gives to `fit`, prepared ahead by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from viviane.core.errors import ConfigError


def num_batches(x: Any, batch_size: int) -> int | None:
    """Return how many batches an epoch has, if that is known."""
    if isinstance(x, keras.utils.PyDataset):
        return int(x.num_batches)
    if _is_arrays(x):
        return -(-_size(x) // batch_size)
    return len(x) if hasattr(x, "__len__") else None


def _is_arrays(x: Any) -> bool:
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves)


def _size(x: Any) -> int:
    return len(keras.tree.flatten(x)[0])


def batches_of(x: Any, y: Any, weight: Any, batch_size: int, shuffle: bool, seed: int) -> Iterator[tuple[Any, ...]]:
    """Give the batches of an epoch: (x, y) or (x, y, sample_weight).

    Example:
        >>> [len(one[1]) for one in batches_of(np.zeros((5, 2)), np.zeros(5), None, 2, False, 0)]
        [2, 2, 1]
    """
    if isinstance(x, keras.utils.PyDataset):
        for i in range(x.num_batches):
            yield _checked(x[i])
        x.on_epoch_end()
    elif _is_arrays(x):
        if y is None:
            raise ConfigError("x is arrays and y is missing", fix="pass y, or a data set of (x, y)")
        yield from _of_arrays(x, y, weight, batch_size, shuffle, seed)
    elif isinstance(x, Iterable):
        for batch in x:
            yield _checked(batch)
    else:
        raise ConfigError("not data to train on", value=type(x).__name__, allowed="arrays, a PyDataset, an iterable")


def _checked(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ConfigError("batches are (x, y) or (x, y, sample_weight)", value=type(batch).__name__)
    return tuple(batch)


def _of_arrays(x: Any, y: Any, weight: Any, batch_size: int, shuffle: bool, seed: int) -> Iterator[tuple[Any, ...]]:
    size = _size(x)
    order = np.random.default_rng(seed).permutation(size) if shuffle else None
    for start in range(0, size, batch_size):
        stop = min(start + batch_size, size)
        pick: Any = slice(start, stop) if order is None else order[start:stop]
        parts = (x, y) if weight is None else (x, y, weight)
        yield tuple(keras.tree.map_structure(lambda leaf, pick=pick: np.asarray(leaf)[pick], part) for part in parts)


def prefetched(feed: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Give the same, prepared up to `ahead` batches before they are asked for.

    Example:
        >>> list(prefetched(iter([1, 2, 3]), 2))
        [1, 2, 3]
    """
    if ahead < 1:
        yield from feed
        return
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for item in feed:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=read, name="viviane-keras-feed", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join(timeout=5)
