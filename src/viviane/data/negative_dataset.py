"""A data set that adds sampled negatives to its batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import ConfigError
from viviane.data.dataset import Dataset
from viviane.data.negatives import Negatives, Population, check_negatives
from viviane.data.reader import Reader
from viviane.data.run import PendingBatch, Run
from viviane.schema import CategoricalColumn, Schema


class NegativeDataset(Dataset):
    """Rows of a data set with negatives: in a bag column, or as extra rows after each row.

    Negatives are functions of the seed, the epoch and the position of a row in the epoch: redrawn in every epoch, and
    the same after a resume and on any number of processes. They are drawn when a batch is requested. Opening the data
    set reads all rows once to count items.

    Args:
        data: the rows, each a positive.
        negatives: which negatives to draw.
        seen: more data sets (validation, test) whose pairs of user and item are never drawn.

    Raises:
        SchemaError: columns are missing or have the wrong kind.
        DataError: the data have no items.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "user", "num_ids": 5}, {"name": "item", "num_ids": 6}])
        >>> rows = {"y": [1, 1, 1], "user": [3, 3, 4], "item": [3, 4, 5]}
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", schema, [rows])
        >>> drawn = NegativeDataset(data, Negatives(item="item", user="user", num=2)).head(3)
        >>> drawn.bags["negatives"].values.tolist()  # user 3 has not seen 5; user 4 only 5
        [5, 5, 5, 5, 4, 3]
        >>> drawn = NegativeDataset(data, Negatives(item="item", num=1, column=None)).head(4)
        >>> drawn.label("y").tolist()
        [1.0, 0.0, 1.0, 0.0]
    """

    def __init__(self, data: Dataset, negatives: Negatives, seen: Sequence[Dataset] = ()) -> None:
        check_negatives(negatives, data.schema)
        for other in seen:
            if lines := data.schema.difference(other.schema):
                raise ConfigError("a data set of seen pairs has other columns", where=str(other.path), value=lines[0])
        self.data, self.negatives = data, negatives
        self.path, self.format, self.stored, self.storage = data.path, data.format, data.stored, data.storage
        self.files, self.stamps, self.groups = data.files, data.stamps, data.groups
        self.schema = schema_with_negatives(data.schema, negatives)
        self.rows_each = 1 if negatives.column is not None else 1 + negatives.num
        self.num_rows = data.num_rows * self.rows_each
        self.population = Population(negatives, data, seen)
        self.sampler = self.population.sampler(negatives)
        self._others = [other.fingerprint for other in seen]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the rows and the settings of the negatives."""
        content = [self.data.fingerprint, self.negatives.to_dict(), self._others]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def reader(self, batch_size: int, **options: Any) -> Reader:
        """Return a reader; options as for `Dataset.reader`. Negatives in rows: batches have complete groups of 1 + K.

        Raises:
            ConfigError: the batch size is too small for a row and its negatives.
        """
        if batch_size < self.rows_each:
            fix = "use a larger batch_size, or fewer negatives"
            allowed = f"{self.rows_each} rows or more"
            raise ConfigError(
                "the batch size is too small for a row and its negatives", value=batch_size, allowed=allowed, fix=fix
            )
        return NegativeReader(self, batch_size // self.rows_each, **options)

    def add(self, batch: Batch, epoch: int, first_place: int) -> Batch:
        """Return a batch of the data with its negatives.

        Args:
            first_place: position of its first row in the epoch.
        """
        wanted = self.negatives
        items = batch.bag(wanted.item).values.numpy().astype(np.int64)
        users = None if wanted.user is None else batch.bag(wanted.user).values.numpy().astype(np.int64)
        drawn = self.sampler.draw(items, wanted.num, epoch=epoch, first_place=first_place, users=users)
        if wanted.column is not None:
            column = self.schema.categorical_column(wanted.column)
            values = torch.from_numpy(drawn.ravel()).to(getattr(torch, column.dtype))
            offsets = torch.arange(batch.size + 1, dtype=torch.int64) * wanted.num
            bags = {**batch.bags, wanted.column: Bag(values, offsets)}
            return replace(batch, layout=self._layout, bags=bags)
        return self._rows(batch, np.concatenate([items[:, None], drawn], 1))

    @cached_property
    def _layout(self) -> Layout:
        return Layout.of(self.schema)

    def _rows(self, batch: Batch, items: Any) -> Batch:
        """Return each row, followed by a copy with another item for each negative; items (B, 1 + K)."""
        each = self.rows_each
        labels, one_hot = (x.repeat_interleave(each, 0) for x in (batch.labels, batch.one_hot))
        negative = torch.arange(batch.size * each) % each > 0
        labels[negative] = 0.0
        changed = {self.negatives.item: items, **{n: of[items] for n, of in self.population.item_columns.items()}}
        for name, ids in changed.items():
            place = batch.layout.one_hot_index[name]
            one_hot[negative, place] = torch.from_numpy(ids.ravel()).to(one_hot.dtype)[negative]
        bags = {name: _repeated(bag, each) for name, bag in batch.bags.items()}
        return replace(
            batch,
            labels=labels,
            dense=batch.dense.repeat_interleave(each, 0),
            one_hot=one_hot,
            bags=bags,
            weight=None if batch.weight is None else batch.weight.repeat_interleave(each),
        )


class NegativeReader(Reader):
    """Batches of the data with their negatives; the position is that of the reader of the data."""

    def __init__(self, negatives: NegativeDataset, batch_size: int, **options: Any) -> None:
        super().__init__(negatives.data, batch_size, **options)
        self.negatives = negatives
        self.rows_each = negatives.rows_each
        self._pinned = bool(options.get("pin_memory", False))

    def no_device_shuffle_reason(self, device: torch.device) -> str | None:
        """Return why rows cannot be shuffled on a device: negatives are drawn on the host, for rows in order."""
        return "negatives are drawn for them on the host"

    def _pending_batches(self, shuffle_device: torch.device | None = None) -> Generator[PendingBatch, None, None]:
        epoch = self.epoch
        with closing(super()._pending_batches()) as pending_batches:
            for run, number, origin in pending_batches:
                start = (self.position - 1) * self.batch_size
                together = min(self.batch_size, self.dataset.num_rows - start)  # rows of the batch on all ranks
                own = start + together * self.rank // self.num_ranks
                made = self.negatives.add(run.batch(number, origin), epoch, own)
                yield Run.one(made.pin_memory() if self._pinned else made), 0, origin

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "fingerprint": self.negatives.fingerprint}


def schema_with_negatives(schema: Schema, negatives: Negatives) -> Schema:
    """Return the schema of rows with negatives: with the bag column of the negatives, if they have one."""
    if negatives.column is None:
        return schema
    item = schema.categorical_column(negatives.item)
    column = CategoricalColumn(
        name=negatives.column, num_ids=item.num_ids, kind="multi_hot", max_length=negatives.num,
        hotness=negatives.num, vocabulary=item.table, dtype=item.dtype,
    )  # fmt: skip
    # The new column needs no vocabulary: a column without one looks up the table of its name.
    content = schema.to_dict()
    return Schema.from_dict({**content, "categorical": [*content["categorical"], column.to_dict()]})


def _repeated(bag: Bag, each: int) -> Bag:
    """Repeat each row's ids `each` times."""
    lengths = bag.lengths.repeat_interleave(each)
    starts = bag.offsets[:-1].repeat_interleave(each)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    places = torch.arange(int(offsets[-1])) - (offsets[:-1] - starts).repeat_interleave(lengths)
    return Bag(bag.values[places], offsets, None if bag.weights is None else bag.weights[places])
