"""Viviane's data sets as input of Keras' `fit`, `evaluate` and `predict`, on every backend.

Shapes: B rows of the batch, N dense numbers, F features with one id a row, L ids of a bag after padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import keras
import numpy as np

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset

_PADDING = 0
_MATRICES = ("dense", "ids")


class Batches(keras.utils.PyDataset):
    """A data set's batches in the reader's order, for Keras; made by `batches`."""

    def __init__(
        self, dataset: Dataset, columns: str, lengths: Mapping[str, int], first_epoch: int, **reader: Any
    ) -> None:
        super().__init__(workers=1, use_multiprocessing=False)
        self._dataset, self._columns, self._lengths = dataset, columns, dict(lengths)
        self._reader = dataset.reader(**reader)
        self._iterator: Iterator[Batch] | None = None
        self._epoch = first_epoch
        self._last: tuple[int, tuple[Any, ...]] = (-1, ())

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        last, batch = self._last
        if index == last and len(self) > 1:  # Keras asks for the first batch once more than it trains on it
            return batch
        if index == 0:
            self._reader.set_epoch(self._epoch)
            self._iterator, self._epoch, last = iter(self._reader), self._epoch + 1, -1
        if self._iterator is None or index != last + 1:
            raise DataError(
                "batches are read in order", value=index, allowed=str(last + 1), fix="pass shuffle=False to fit; "
                "the reader shuffles"
            )  # fmt: skip
        batch = to_keras(next(self._iterator), self._columns, self._lengths)
        self._last = (index, batch)
        return batch


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    columns: Literal["names", "matrices"] = "names",
    lengths: Mapping[str, int] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    first_epoch: int = 0,
) -> Batches:
    """Return a data set's batches as Keras reads them: (inputs, labels), with sample weights where there are some.

    Args:
        dataset: Viviane's, as its ETL writes it.
        batch_size: B; the last batch may be smaller.
        columns: "names": a dict with each dense column, (B, dim), and each categorical one, (B,) or (B, L);
            "matrices": {"dense": (B, N), "ids": (B, F)}, and bags by name.
        lengths: of each bag feature, L: shorter bags are padded with id 0, longer ones are an error.
        shuffle: in an order that depends on seed and epoch.
        seed: of the order.
        first_epoch: whose order comes first, for training that is resumed.

    Example:
        >>> import tempfile
        >>> from viviane.data.synthetic import SyntheticConfig, generate
        >>> folder = tempfile.mkdtemp() + "/data"
        >>> done = generate(SyntheticConfig(rows=10, num_dense=2, cardinalities=(5, 5)), folder)
        >>> inputs, labels = batches(Dataset(folder), 4, columns="matrices")[0]
        >>> inputs["dense"].shape, inputs["ids"].shape, labels.shape
        ((4, 2), (4, 2), (4, 1))
    """
    bags = [column.name for column in dataset.schema.bags]
    missing = [name for name in bags if name not in (lengths or {})]
    if missing:
        raise ConfigError(
            "bags need a length, to which they are padded", value=", ".join(missing), fix="pass lengths={name: L}"
        )
    if columns not in ("names", "matrices"):
        raise ConfigError("no such layout", value=columns, allowed="'names', 'matrices'")
    if columns == "matrices" and (taken := [name for name in bags if name in _MATRICES]):
        raise ConfigError("a bag has the name of a matrix", value=taken[0], fix="columns='names', or rename the column")
    return Batches(dataset, columns, lengths or {}, first_epoch, batch_size=batch_size, shuffle=shuffle, seed=seed)


def to_keras(batch: Batch, columns: str, lengths: Mapping[str, int]) -> tuple[Any, ...]:
    """Return a batch as (inputs, labels) or (inputs, labels, weights) of NumPy arrays."""
    inputs: dict[str, Any] = {}
    if columns == "matrices":
        if batch.dense.shape[1]:
            inputs["dense"] = batch.dense.numpy()
        if batch.one_hot.shape[1]:
            inputs["ids"] = batch.one_hot.numpy()
    else:
        inputs = {name: batch.dense_feature(name).numpy() for name, _ in batch.layout.dense}
        inputs |= {name: batch.one_hot[:, i].numpy() for name, i in batch.layout.one_hot_index.items()}
    inputs |= {name: padded(bag, lengths[name], name, batch.origin) for name, bag in batch.bags.items()}
    labels = batch.labels.numpy()
    return (inputs, labels) if batch.weight is None else (inputs, labels, batch.weight.numpy())


def padded(bag: Bag, length: int, name: str, origin: str = "") -> np.ndarray[Any, Any]:
    """Return a bag's ids as a matrix (B, L), padded with 0.

    Raises:
        DataError: a bag is longer.

    Example:
        >>> padded(Bag.from_lists([[3, 4], [], [5]]), 2, "seen").tolist()
        [[3, 4], [0, 0], [5, 0]]
    """
    lengths, values = bag.lengths.numpy(), bag.values.numpy()
    longest = int(lengths.max(initial=0))
    if longest > length:
        row = int(lengths.argmax())
        raise DataError(
            "a bag is longer than the length it is padded to", where=f"feature {name!r}, row {row}" + (origin and
            f" of {origin}"), value=longest, allowed=f"up to {length}",
        )  # fmt: skip
    out = np.full((len(lengths), length), _PADDING, values.dtype)
    out[np.arange(length) < lengths[:, None]] = values
    return out
