"""X and y of scikit-learn as encoded data sets: types inferred, the ETL learned, rows divided into folds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from viviane import etl
from viviane.core.errors import DataError
from viviane.data import Dataset, write_dataset
from viviane.etl.infer import Inferred, infer_config
from viviane.schema import Schema

LABEL: Final = "label"
WEIGHT: Final = "weight"
GROUP: Final = "group"


@dataclass(frozen=True)
class Encoded:
    """Rows as the model reads them.

    Args:
        table: columns of the schema, in the order of the rows that were given.
        schema: of the table.
        etl: the fitted ETL's file.
        inferred: how each column was understood.
        folder: for data sets.
    """

    table: pa.Table
    schema: Schema
    etl: Path
    inferred: Inferred
    folder: Path

    def dataset(self, name: str, rows: NDArray[np.int64]) -> Dataset:
        """Write some of the rows, in this order, as a data set."""
        data = write_dataset(self.folder / name, self.schema, [self.table.take(rows)])
        if not (self.folder / name / self.etl.name).exists():
            (self.folder / name / self.etl.name).hardlink_to(self.etl)
        return data


def own_name(wanted: str, taken: Iterable[str]) -> str:
    """Return a column name that no feature has.

    Example:
        >>> own_name("label", ["label", "site"])
        'label_'
    """
    while wanted in taken:
        wanted += "_"
    return wanted


def encode(
    table: pa.Table,
    labels: Mapping[str, NDArray[np.float64]],
    folder: Path,
    *,
    weight: NDArray[np.float64] | None = None,
    groups: NDArray[Any] | None = None,
    categories: Iterable[str] = (),
    numbers: Iterable[str] = (),
    min_count: int | None = None,
    threads: int | None = None,
) -> Encoded:
    """Infer column types, learn the ETL from all rows, and encode them.

    Args:
        table: the features.
        labels: by name, none of them a feature's; one with missing values, NaN, is optional.
        folder: an empty one, for what is written.
        weight: of each row.
        groups: of each row, such as its query; becomes a categorical column that no model reads.
        categories, numbers, min_count: see `viviane.etl.infer.infer_config`.
        threads: of the ETL.

    Raises:
        DataError: no rows. SchemaError: no column to learn from.
    """
    if not table.num_rows:
        raise DataError("there are no rows to learn from")
    inferred = infer_with(table, labels, weight, groups, categories, numbers, min_count)
    columns: dict[str, Any] = {name: pa.array(values, from_pandas=True) for name, values in labels.items()}
    if weight is not None:
        columns[own_name(WEIGHT, table.column_names)] = pa.array(weight)
    if groups is not None:
        columns[own_name(GROUP, table.column_names)] = pa.array(groups)
    whole = table
    for name, values in columns.items():
        whole = whole.append_column(name, values)
    used = [column.name for column in inferred.config.input.columns]
    etl.run(inferred.config, whole.select(used), folder / "data", threads=threads, overwrite=True)
    data = Dataset(folder / "data" / "train")
    parts = sorted((folder / "data" / "train").glob("part-*.parquet"))
    encoded = pa.concat_tables([pq.read_table(part) for part in parts])
    return Encoded(encoded, data.schema, folder / "data" / "etl.zip", inferred, folder)


def infer_with(
    table: pa.Table,
    labels: Mapping[str, NDArray[np.float64]],
    weight: NDArray[np.float64] | None,
    groups: NDArray[Any] | None,
    categories: Iterable[str],
    numbers: Iterable[str],
    min_count: int | None,
) -> Inferred:
    """Infer the declarative file of features with labels and the columns beside them."""
    whole = table
    for name, values in labels.items():
        whole = whole.append_column(name, pa.array(values, from_pandas=True))
    inferred = infer_config(whole, list(labels), categories=categories, numbers=numbers, min_count=min_count)
    data = inferred.config.to_dict()
    for spec in data["labels"]:
        if np.isnan(labels[spec["name"]]).any():
            spec["optional"] = True
    if weight is not None:
        name = own_name(WEIGHT, table.column_names)
        data["input"]["columns"].append({"name": name, "type": "float"})
        data["sample_weight"] = {"name": name}
    if groups is not None:
        name = own_name(GROUP, table.column_names)
        kind = "int" if np.asarray(groups).dtype.kind in "iu" else "string"
        data["input"]["columns"].append({"name": name, "type": kind})
        data["categorical"].append({"name": name, "encoding": {"type": "categorify"}})
    features = tuple(one for one in inferred.columns if one.name not in labels)
    return Inferred(etl.EtlConfig.from_dict(data), features)


def folds(
    y: NDArray[np.float64], num_folds: int, share: float, seed: int, groups: NDArray[Any] | None = None
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Divide rows by chance into training and held-out rows, with the same share of positives in each.

    Args:
        y: labels, by whose value rows are dealt out.
        num_folds: each row is held out once; 1 holds out one part alone.
        share: of the rows that are held out, where there is one fold.
        seed: another one divides otherwise.
        groups: rows of one group stay together.

    Returns:
        for each fold the training rows, shuffled, and the held-out rows.

    Example:
        >>> [(len(train), len(held)) for train, held in folds(np.array([0.0, 1.0] * 10), 2, 0.1, 0)]
        [(10, 10), (10, 10)]
    """
    chance = np.random.default_rng(seed)
    units, of_row = (np.arange(len(y)), None) if groups is None else np.unique(groups, return_inverse=True)
    order = chance.permutation(len(units))
    if of_row is None:
        order = order[np.argsort(y[order], kind="stable")]
    parts = num_folds if num_folds > 1 else max(2, round(1 / share))
    place = np.empty(len(units), dtype=np.int64)
    place[order] = np.arange(len(units)) % parts
    own = place if of_row is None else place[of_row]
    made = []
    for fold in range(num_folds):
        held, train = np.flatnonzero(own == fold), np.flatnonzero(own != fold)
        if not len(held) or not len(train):
            raise DataError("too few rows to hold some out", value=len(y), fix="give more rows or groups")
        made.append((chance.permutation(train), held))
    return made


def positives(y: NDArray[np.float64]) -> float:
    """Return the number of rows of the rarer class."""
    return float(min(y.sum(), len(y) - y.sum()))


def names_of(columns: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return column names as a tuple."""
    return () if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
