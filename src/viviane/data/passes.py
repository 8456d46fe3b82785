"""Sub-data-sets that are trained on one after another, each with the keys whose rows its pass needs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from viviane.core.errors import ConfigError, SchemaError, expect
from viviane.core.locations import AnyPath
from viviane.data.dataset import Dataset
from viviane.data.key_sets import KEY_SETS_FILE, KeySets, check_key_sets, collect_key_sets, read_key_sets
from viviane.data.plan import RowGroup
from viviane.schema import Schema

Keys: TypeAlias = "Mapping[str, Any] | str | Path | None"


@dataclass(frozen=True)
class DataPass:
    """A sub-data-set of training, and the keys in it.

    Args:
        data: its rows.
        keys: by column, or a file that `viviane keyset` wrote; None: the file in the folder of the data set if there
            is one, else the rows are read once before the pass to collect them.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> schema = Schema(categorical=[{"name": "a", "num_ids": 9}])
        >>> data = write_dataset(tempfile.mkdtemp() + "/train", schema, [{"a": [4, 3, 4]}])
        >>> DataPass(data).key_sets()["a"].tolist()
        [3, 4]
    """

    data: Dataset
    keys: Keys = None

    def key_sets(self) -> KeySets:
        """Return the keys by column.

        Raises:
            DataError: the file of keys is missing, damaged, or of other rows.
            ConfigError: keys lack a column.
        """
        if isinstance(self.keys, Mapping):
            return check_key_sets(self.keys, self.data, f"keys of {self.data.path}")
        if self.keys is not None:
            return read_key_sets(self.keys, self.data)
        if self.data.is_whole and isinstance(self.data.path, Path):
            own = self.data.path / KEY_SETS_FILE
            if self.data.path.is_dir() and own.is_file():
                return read_key_sets(own, self.data)
        return collect_key_sets(self.data)


class DataPasses:
    """Sub-data-sets as one set of training rows: an epoch reads one after the other, each to its end.

    Rows are shuffled within a sub-data-set. Tables in tiers hold the rows of one pass in memory; a model whose tables
    are whole in memory trains on the same batches with the same numbers.

    Args:
        passes: sub-data-sets, with keys or without; all have the same columns.

    Raises:
        ConfigError: there are none.
        SchemaError: their columns differ.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> schema = Schema(categorical=[{"name": "a", "num_ids": 9}])
        >>> parts = [write_dataset(f"{tempfile.mkdtemp()}/{day}", schema, [{"a": [4, 3, day]}]) for day in (5, 6)]
        >>> passes = DataPasses(parts)
        >>> len(passes), len(passes.parts)
        (6, 2)
    """

    def __init__(self, passes: Sequence[DataPass | Dataset]) -> None:
        if not passes:
            raise ConfigError("training in passes needs sub-data-sets", value="an empty list")
        for one in passes:
            expect("passes", one, DataPass, Dataset)
        self.parts = [one if isinstance(one, DataPass) else DataPass(one) for one in passes]
        first = self.parts[0].data
        for one in self.parts:
            if type(one.data) is not Dataset:
                raise ConfigError(
                    "the keys of drawn negatives are not known before a pass", where=str(one.data.path),
                    value=type(one.data).__name__, fix="leave negatives out, or train without passes",
                )  # fmt: skip
        for other in self.parts[1:]:
            if lines := first.schema.difference(other.data.schema):
                raise SchemaError("sub-data-sets have different columns", where=f"{first.path} and {other.data.path}",
                                  value=lines[0])  # fmt: skip

    @classmethod
    def split(cls, data: Dataset, count: int) -> DataPasses:
        """Cut a data set into passes of neighbouring row groups with about equal numbers of rows.

        Raises:
            ConfigError: it has fewer row groups than passes.
        """
        if type(data) is not Dataset:
            return cls([data])  # which says what it refuses
        groups = [group for group in data.groups if group.num_rows]
        if not 1 <= count <= max(1, len(groups)):
            raise ConfigError(
                "the data set has fewer row groups than passes", where=str(data.path), value=count,
                allowed=f"1 to {len(groups)}", fix="use fewer passes, or write it with smaller row groups",
            )  # fmt: skip
        parts: list[list[RowGroup]] = [[] for _ in range(count)]
        seen, rows = 0, sum(group.num_rows for group in groups)
        for place, group in enumerate(groups):
            wanted = min(count - 1, seen * count // max(1, rows))
            least = count - (len(groups) - place)  # every later pass gets a group too
            parts[max(wanted, least, 0)].append(group)
            seen += group.num_rows
        return cls([_with_groups(data, own) for own in parts if own])

    def __len__(self) -> int:
        return sum(len(one.data) for one in self.parts)

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.parts[0].data.schema

    @property
    def path(self) -> AnyPath:
        """The place of the first, for messages."""
        return self.parts[0].data.path

    @cached_property
    def info(self) -> dict[str, Any]:
        """Statistics of the first sub-data-set."""
        return self.parts[0].data.info


def _with_groups(data: Dataset, groups: Sequence[RowGroup]) -> Dataset:
    """Return a data set of some row groups of another; files stay open together."""
    part = copy.copy(data)
    part.groups, part.num_rows = list(groups), sum(group.num_rows for group in groups)
    part.is_whole = False
    rows = f"{data.fingerprint} {[(group.file, group.index) for group in groups]}"
    part.fingerprint = hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()
    return part
