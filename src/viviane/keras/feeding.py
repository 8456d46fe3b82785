"""Batches of whatever a user gives to `fit`, prepared ahead by a thread.

Shapes: N samples, C classes.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from viviane.core.errors import ConfigError, DataError

_END: Final = object()
_KINDS: Final = "arrays, a PyDataset, an iterable of (x, y) or (x, y, sample_weight)"


class EpochFeed:
    """The batches of a training, epoch by epoch, as `model.fit` takes them.

    Args:
        x, y, weight: arrays of N samples; or x alone: a PyDataset, or an iterable of batches.
        batch_size: of arrays.
        shuffle: arrays, in another order each time.
        seed: of the orders.
        class_weight: by class, the weight of its samples; 1 for others. None: no weights.
        steps: batches of an epoch; the next epoch continues where this one stopped. None: all data each epoch.
        ahead: batches that a thread prepares; 0 prepares none.

    Example:
        >>> feed = EpochFeed(np.zeros((7, 2)), np.zeros(7), None, batch_size=2, steps=2)
        >>> [[len(labels) for _, labels in feed.epoch()] for _ in range(2)]
        [[2, 2], [2, 1]]
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        weight: Any,
        *,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        class_weight: Mapping[int, float] | None = None,
        steps: int | None = None,
        ahead: int = 0,
    ) -> None:
        if not isinstance(x, keras.utils.PyDataset) and not is_arrays(x) and not isinstance(x, Iterable):
            raise ConfigError("not data to train on", where="x", value=type(x).__name__, allowed=_KINDS)
        if is_arrays(x):
            if y is None:
                raise ConfigError("x is arrays and y is missing", fix="pass y, or a data set of (x, y)")
            same_size({"x": x, "y": y, "sample_weight": weight})
        self._data, self._batch_size, self._shuffle, self._seed = (x, y, weight), batch_size, shuffle, seed
        self._class_weight, self._steps, self._ahead = class_weight, steps, ahead
        self._passes = 0
        self._feed: Iterator[Any] | None = None

    @property
    def num_steps(self) -> int | None:
        """Batches of an epoch, where that is known."""
        if self._steps is not None:
            return self._steps
        return num_batches(self._data[0], self._batch_size)

    def epoch(self) -> Iterator[tuple[Any, ...]]:
        """Give the batches of the next epoch: (x, y) or (x, y, sample_weight).

        Raises:
            ConfigError: there is no batch left, as of a generator in its second epoch.
        """
        if self._feed is None or self._steps is None:
            self._start()
        count, may_start = 0, True
        while self._steps is None or count < self._steps:
            assert self._feed is not None
            batch: Any = next(self._feed, _END)
            if batch is _END and count == 0 and may_start and self._steps is not None:
                may_start = False  # the epoch before ended with the last batch
                self._start()
                continue
            if batch is _END:
                self._feed = None
                break
            count += 1
            yield batch
        if count == 0:
            raise ConfigError(
                "an epoch has no batches", where="x", value=type(self._data[0]).__name__,
                fix="pass data that can be read once an epoch: a generator ends with its first; or pass "
                "steps_per_epoch=... to have its batches over several epochs",
            )  # fmt: skip
        if self._steps is not None and count < self._steps:
            warnings.warn(
                f"the data ended after {count} of steps_per_epoch={self._steps} batches: the epoch is shorter, and the "
                "next one begins with the first batch",
                stacklevel=2,
            )

    def close(self) -> None:
        """End the thread that prepares batches."""
        if self._feed is not None:
            self._feed.close()  # type: ignore[attr-defined]
            self._feed = None

    def _start(self) -> None:
        self.close()
        x, y, weight = self._data
        found = batches_of(x, y, weight, self._batch_size, self._shuffle, self._seed + self._passes)
        if self._class_weight is not None:
            found = (_weighted(batch, self._class_weight) for batch in found)
        self._passes += 1
        self._feed = prefetched(found, self._ahead)


class BatchList(Sequence[Any]):
    """A list of batches, which without its type would be a list of a model's inputs."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]


def batch_list(x: Any, y: Any) -> Any:
    """Return x as a `BatchList` where it is a list of (x, y) and no y is given; else as it is."""
    is_list = isinstance(x, list) and y is None and x
    return BatchList(x) if is_list and all(isinstance(one, tuple) and len(one) in (2, 3) for one in x) else x


def num_batches(x: Any, batch_size: int) -> int | None:
    """Return how many batches an epoch has, if that is known."""
    if isinstance(x, keras.utils.PyDataset):
        found = x.num_batches
        return None if found is None else int(found)
    if is_arrays(x):
        return -(-len(keras.tree.flatten(x)[0]) // batch_size)
    try:
        return len(x) if hasattr(x, "__len__") else None
    except TypeError:  # a data set of TensorFlow that is endless, or does not know
        return None


def is_arrays(x: Any) -> bool:
    """Return whether data are arrays of samples, one or a structure of them.

    Example:
        >>> is_arrays({"a": np.zeros(2)}), is_arrays([1, 2])
        (True, False)
    """
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves)


def same_size(parts: Mapping[str, Any]) -> int:
    """Return N, the samples of every array of all parts.

    Raises:
        DataError: arrays differ in it.

    Example:
        >>> same_size({"x": np.zeros((3, 2)), "y": np.zeros(3), "sample_weight": None})
        3
    """
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        if part is None:
            continue
        for place, leaf in enumerate(keras.tree.flatten(part)):
            if not hasattr(leaf, "shape") or not len(leaf.shape):
                raise DataError("not an array of samples", where=name, value=type(leaf).__name__, allowed="arrays")
            sizes[name if place == 0 else f"{name}, array {place}"] = len(leaf)
    if len(set(sizes.values())) > 1:
        raise DataError(
            "arrays of one training have different numbers of samples",
            value=", ".join(f"{name}: {size}" for name, size in sizes.items()), allowed="one number",
        )  # fmt: skip
    return next(iter(sizes.values()))


def split_samples(parts: tuple[Any, Any, Any], fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return (x, y, sample_weight) of training, and of validation: the last samples, before any shuffling.

    Raises:
        ConfigError: a part would be empty, or the data are no arrays.

    Example:
        >>> train, valid = split_samples((np.arange(10), np.arange(10), None), 0.2)
        >>> valid[0].tolist()
        [8, 9]
    """
    if not is_arrays(parts[0]) or parts[1] is None:
        raise ConfigError(
            "validation_split needs arrays x and y", value=type(parts[0]).__name__, fix="pass validation_data=..."
        )
    size = same_size(dict(zip(("x", "y", "sample_weight"), parts, strict=True)))
    is_fraction = isinstance(fraction, int | float) and 0 < fraction < 1
    cut = int(size * (1.0 - fraction)) if is_fraction else 0
    if not 0 < cut < size:
        raise ConfigError(
            "validation_split leaves no sample to train on, or none to validate on", value=fraction,
            where=f"{size} samples", allowed="0 < validation_split < 1",
        )  # fmt: skip

    def cut_all(pick: slice) -> tuple[Any, ...]:
        return tuple(
            None if part is None else keras.tree.map_structure(lambda leaf: np.asarray(leaf)[pick], part)
            for part in parts
        )

    return cut_all(slice(0, cut)), cut_all(slice(cut, None))


def batches_of(x: Any, y: Any, weight: Any, batch_size: int, shuffle: bool, seed: int) -> Iterator[tuple[Any, ...]]:
    """Give the batches of all data: (x, y) or (x, y, sample_weight).

    Example:
        >>> [len(one[1]) for one in batches_of(np.zeros((5, 2)), np.zeros(5), None, 2, False, 0)]
        [2, 2, 1]
    """
    if isinstance(x, keras.utils.PyDataset):
        i = 0
        while x.num_batches is None or i < x.num_batches:
            yield _checked(x[i])
            i += 1
        x.on_epoch_end()
    elif is_arrays(x):
        yield from _of_arrays(x, y, weight, batch_size, shuffle, seed)
    else:
        for batch in x:
            yield _checked(batch)


def _checked(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ConfigError("batches are (x, y) or (x, y, sample_weight)", value=type(batch).__name__)
    return tuple(batch)


def _of_arrays(x: Any, y: Any, weight: Any, batch_size: int, shuffle: bool, seed: int) -> Iterator[tuple[Any, ...]]:
    size = len(keras.tree.flatten(x)[0])
    order = np.random.default_rng(seed).permutation(size) if shuffle else None
    parts = (x, y) if weight is None else (x, y, weight)
    whole = tuple(keras.tree.map_structure(np.asarray, part) for part in parts)
    for start in range(0, size, batch_size):
        stop = min(start + batch_size, size)
        pick: Any = slice(start, stop) if order is None else order[start:stop]
        yield tuple(keras.tree.map_structure(lambda leaf, pick=pick: leaf[pick], part) for part in whole)


def _weighted(batch: tuple[Any, ...], class_weight: Mapping[int, float]) -> tuple[Any, ...]:
    if len(batch) == 3 and batch[2] is not None:
        raise ConfigError(
            "class_weight and sample_weight exclude each other", fix="multiply the sample weights by those of classes"
        )
    return batch[0], batch[1], weights_of_classes(batch[1], class_weight)


def weights_of_classes(labels: Any, class_weight: Mapping[int, float]) -> np.ndarray[Any, Any]:
    """Return the weights (N,) of samples by their classes: labels are (N,), (N, 1), or (N, C) with one 1 a row.

    Raises:
        ConfigError: the model has several outputs.

    Example:
        >>> weights_of_classes(np.array([[0.0], [1.0]]), {1: 3.0}).tolist()
        [1.0, 3.0]
    """
    leaves = keras.tree.flatten(labels)
    if len(leaves) != 1:
        raise ConfigError(
            "class_weight needs a model of one output", value=f"{len(leaves)} outputs", fix="pass sample_weight=..."
        )
    plain = np.asarray(leaves[0])
    if plain.ndim > 1:
        plain = plain.argmax(-1) if plain.shape[-1] != 1 else plain[..., 0]
    if plain.ndim != 1:
        raise ConfigError("class_weight needs one label a sample", where="y", value=str(np.shape(leaves[0])))
    classes = np.round(plain).astype(np.int64)
    weights = np.ones(len(classes), np.float32)
    for one, value in class_weight.items():
        weights[classes == one] = value
    return weights


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
