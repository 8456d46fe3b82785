"""The rows that `evaluate` and `predict` read: a data set folder, or raw files that the model's ETL reads."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from viviane.core.errors import DataError, DataNotFoundError
from viviane.core.locations import AnyPath
from viviane.core.remote.published import published_location
from viviane.data import Dataset
from viviane.model import Model
from viviane.schema import SCHEMA_FILE


@contextmanager
def open_rows(
    path: str | AnyPath, model: Model, *, with_labels: bool, without: Collection[str] = ()
) -> Iterator[Dataset]:
    """Yield the rows as a data set, every one of them, in their order.

    Raw files go through the model's ETL into a temporary folder; its filters, which choose rows to train on, do
    not apply. A malformed row is an error, not left out.

    Args:
        path: a data set folder; or a raw file, a folder of such, or a pattern.
        without: categorical columns that raw files need not have; the rows then lack them.

    Raises:
        DataError: raw files, and the model carries no ETL; or a folder of data sets.
    """
    place = published_location(path)
    is_pattern = any(sign in str(path) for sign in "*?[")
    if not place.exists() and not is_pattern:
        raise DataNotFoundError("no such input", where=str(place), allowed="a data set folder, or raw files")
    if place.is_dir() and (place / SCHEMA_FILE).exists():
        yield Dataset(place)
        return
    if place.is_dir() and (parts := sorted(one.name for one in place.iterdir() if (one / SCHEMA_FILE).exists())):
        fix = f"name one of them: {place / parts[0]}"
        raise DataError("this folder holds data sets, and is none", where=str(place), value=", ".join(parts), fix=fix)
    if model.etl is None:
        raise DataError(
            "these are raw rows, and the model carries no ETL to read them",
            where=str(place),
            fix="give a data set folder with schema.json, or train on data that `viviane etl` wrote",
        )
    from viviane.etl import FittedEtl
    from viviane.etl.stage import MalformedRowError

    fitted = FittedEtl.load(model.etl)
    columns = tuple(spec for spec in fitted.config.categorical if spec.name not in without)
    unfiltered = replace(fitted, config=fitted.config.model_copy(update={"filters": (), "categorical": columns}))
    with tempfile.TemporaryDirectory(prefix="viviane-rows-") as folder:
        try:
            unfiltered.transform(place, Path(folder) / "rows", labels=True if with_labels else None)
        except MalformedRowError as error:  # the original suggests an option that only `viviane etl` has
            fix = "correct it: every row of the input is used"
            raise DataError(error.what, where=error.where, value=error.value, fix=fix) from None
        yield Dataset(Path(folder) / "rows")
