"""What the estimators have in common: rows of any form, encoding, a model folder inside a pickle."""

from __future__ import annotations

import io
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, check_random_state, column_or_1d, validate_data

from viviane.core.errors import ConfigError, DataError, suggest
from viviane.core.locations import AnyPath
from viviane.core.rows import as_table, is_frame, refuse_shuffled
from viviane.model import Model
from viviane.sklearn.table import Encoded, encode, names_of

_MODEL: Final = "model_"
_ZIPPED: Final = "_zipped_model"
_EXACT: Final = 2.0**53  # whole numbers below it are exact as floats


class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """Base: turns X into an Arrow table, keeps the scikit-learn attributes, and puts the model into pickles."""

    model: Any
    categories: Any
    numbers: Any
    min_count: int | None
    random_state: Any
    verbose: int
    num_threads: int | None

    # Rows -------------------------------------------------------------------------------------------------

    def _table(self, X: Any, *, reset: bool) -> pa.Table:  # noqa: N803 - scikit-learn's name
        """Return rows as a table, with scikit-learn's checks of names and numbers of columns.

        Args:
            X: rows in any form that `viviane.core.rows.as_table` reads.
            reset: whether to remember the columns (in fit) or to compare them.
        """
        refuse_shuffled(X)
        if not is_frame(X):
            array = validate_data(
                self, X, reset=reset, dtype=None, ensure_all_finite=False, ensure_min_samples=1, accept_sparse=False
            )
            # As in scikit-learn: columns without names are those of fit, in their order.
            known = () if reset else getattr(self, "feature_names_in_", ())
            return _settled(as_table(array, [*known] or [f"x{n}" for n in range(array.shape[1])]), learn=reset)
        table = as_table(X)
        if reset and not table.num_columns:
            raise DataError("X has no columns", value=type(X).__name__)
        if reset and not table.num_rows:
            raise DataError("X has no rows", value=f"0 rows, columns {', '.join(table.column_names[:10])}")
        if reset and "" in table.column_names:
            raise DataError("a column of X has no name", where=f"column {table.column_names.index('')}", fix="name it")
        if reset:
            self.feature_names_in_ = np.array(table.column_names, dtype=object)
            self.n_features_in_ = len(table.column_names)
        elif hasattr(self, "feature_names_in_"):
            missing = [name for name in self.feature_names_in_ if name not in table.column_names]
            if missing:
                raise ConfigError(
                    "X lacks columns that the estimator was fitted with", value=", ".join(missing[:10]),
                    fix="give the columns of fit, by the same names",
                )  # fmt: skip
            table = table.select(list(self.feature_names_in_))
        elif len(table.column_names) != self.n_features_in_:
            raise ConfigError(
                f"X has {len(table.column_names)} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        else:
            table = table.rename_columns([f"x{n}" for n in range(self.n_features_in_)])
        return _settled(table, learn=reset)

    def _encode(self, table: pa.Table, labels: dict[str, NDArray[np.float64]], folder: Path, **more: Any) -> Encoded:
        for name in ("categories", "numbers"):
            for one in names_of(getattr(self, name)):
                if one not in table.column_names:
                    fix = suggest(one, table.column_names)
                    raise ConfigError("X has no such column", where=name, value=one, fix=fix)
        encoded = encode(
            table, labels, folder, categories=names_of(self.categories), numbers=names_of(self.numbers),
            min_count=None if self.min_count is None else int(self.min_count),
            threads=None if self.num_threads is None else int(self.num_threads), **more,
        )  # fmt: skip
        self.columns_ = encoded.inferred.columns
        self.etl_config_ = encoded.inferred.config
        if self.verbose > 0:
            say(encoded.inferred.describe())
        return encoded

    def _probabilities(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the model's predictions, (rows, labels)."""
        check_is_fitted(self, _MODEL)
        table = self._table(X, reset=False)
        found: NDArray[np.float64] = self._fitted_model().predict(table, raw=True).astype(np.float64)
        return found

    def _fitted_model(self) -> Model:
        check_is_fitted(self, _MODEL)
        model: Model = self.model_
        return model

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(0, 2**31 - 1))

    # Saving -----------------------------------------------------------------------------------------------

    def _keep(self, model: Model, etl: Path) -> None:
        """Keep a trained model, and its ETL in a folder that lives as long as the model."""
        own = _folder_of(model) / etl.name
        own.write_bytes(etl.read_bytes())
        model.etl = own
        self.model_ = model

    def save(self, folder: str | AnyPath) -> AnyPath:
        """Write the model's folder: what `vv.Model.load`, `viviane serve`, `predict` and `export` read.

        Raises:
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        return self._fitted_model().save(folder)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state = dict(state)
        model = state.pop(_MODEL, None)
        if model is not None:
            state[_ZIPPED] = _zipped(model)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        zipped = state.pop(_ZIPPED, None)
        super().__setstate__(state)
        if zipped is not None:
            with tempfile.TemporaryDirectory(prefix="viviane-estimator-") as folder:
                place = Path(folder) / "model"
                with zipfile.ZipFile(io.BytesIO(zipped)) as file:
                    file.extractall(place)
                self._keep(Model.load(place, device=getattr(self, "device", "auto")), place / "etl.zip")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, _MODEL)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.non_deterministic = False
        return tags

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(self.__getstate__())
        return copied


def _folder_of(model: Model) -> Path:
    """Return a new folder that is removed when the model is."""
    folder = tempfile.mkdtemp(prefix="viviane-estimator-")
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def say(text: str) -> None:
    """Write lines where a user looks: the terminal or the notebook's output."""
    from rich.console import Console

    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def weights_of(sample_weight: Any, rows: int) -> NDArray[np.float64] | None:
    """Return checked sample weights, scaled to a mean of 1: what they are multiplied with has no effect.

    Raises:
        DataError: there is not one for each row, or one is negative or not finite.
    """
    if sample_weight is None:
        return None
    try:
        weights: NDArray[np.float64] = np.asarray(sample_weight, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError("sample_weight holds no numbers", value=str(error)) from error
    if weights.ndim == 0:
        raise DataError("sample_weight is one value, not one for each row", value=str(sample_weight)[:80])
    weights = column_or_1d(weights)
    if len(weights) != rows:
        raise DataError("sample_weight has another number of rows than X", value=f"{len(weights)}, X has {rows}")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise DataError(
            "a sample weight is not a finite number of at least 0", where=f"sample_weight, row {wrong[0]}",
            value=float(weights[wrong[0]]),
        )  # fmt: skip
    if not weights.any():
        raise DataError("all sample weights are zero", fix="leave sample_weight out, or weight some rows")
    scaled: NDArray[np.float64] = weights / weights.mean()
    return scaled


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def check_numbers(estimator: Any) -> None:
    """Refuse settings that are out of range, by the estimator's own names for them.

    Raises:
        ConfigError: a count is no whole number from 1, a learning rate none above 0, a share none between 0 and 1/2,
            or columns are no names, or both categories and numbers.
    """
    for name in ("epochs", "batch_size", "num_threads", "min_count", "num_folds"):
        value = getattr(estimator, name, None)
        if value is not None and not is_whole(value):
            raise ConfigError("not a whole number of at least 1", where=name, value=value, allowed="1 or more, None")
    for name in ("lr", "table_lr"):
        value = getattr(estimator, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < np.inf
        ):
            raise ConfigError("not a learning rate", where=name, value=value, allowed="a number above 0, None")
    checked_share(estimator.validation_fraction)
    named = {}
    for name in ("categories", "numbers"):
        value = getattr(estimator, name)
        if value is not None and not isinstance(value, Iterable):
            raise ConfigError("not names of columns", where=name, value=value, allowed="a list of names, a name, None")
        named[name] = set(names_of(getattr(estimator, name)))
    if both := sorted(map(str, named["categories"] & named["numbers"])):
        raise ConfigError("a column is a category or a number", where="categories, numbers", value=", ".join(both))


def column(values: Any, rows: int, what: str) -> NDArray[Any]:
    """Return one value for each row, from an array, list, series or frame of one column.

    Raises:
        DataError: another number of values, or a missing one: None, NaN or infinity.
    """
    if isinstance(values, str | bytes):
        raise DataError(
            f"{what} is text, not values", value=values[:80], fix=f"give the column: frame[{values[:80]!r}]"
        )
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy()
    found: NDArray[Any] = column_or_1d(values, warn=True)
    if len(found) != rows:
        raise DataError(f"{what} has another number of rows than X", value=f"{len(found)}, X has {rows}")
    if found.dtype.kind == "f":
        missing = ~np.isfinite(found)
    elif found.dtype == object:
        missing = np.array([_is_missing(one) for one in found], bool)
    else:
        missing = np.isnat(found) if found.dtype.kind in "mM" else np.zeros(rows, bool)
    if missing.any():
        first = int(missing.argmax())
        raise DataError(
            f"Input {what} contains NaN, infinity or missing values",
            where=f"row {first}",
            value=f"{found[first]}; {int(missing.sum())} of {rows} rows",
            fix="leave these rows out",
        )
    return found


def _is_missing(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        return not np.isfinite(value)
    return value is None or type(value).__name__ in {"NAType", "NaTType"}  # of pandas, which is not imported for this


def _settled(table: pa.Table, *, learn: bool) -> pa.Table:
    """Return a table whose NaN are missing values, without infinite ones.

    Args:
        learn: whether column types are inferred from it: whole numbers that are floats because one of them is missing,
            or by an array's common type, are whole numbers then.
    """
    import pyarrow.compute as pc

    arrays: list[Any] = []
    for name, values in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_floating(values.type):
            values = cast(Any, pc.if_else(pc.is_nan(values), None, values))  # noqa: PLW2901
            infinite: Any = pc.fill_null(pc.is_inf(values), False)
            if pc.any(infinite).as_py():
                raise DataError(
                    "Input X contains infinity", where=f"column {name!r}, row {pc.index(infinite, True).as_py()}",
                    value=f"{pc.sum(infinite).as_py()} of {len(values)} rows", fix="make these values missing (NaN)",
                )  # fmt: skip
            size: Any = pc.abs(values)
            whole: Any = pc.and_(pc.equal(size, pc.floor(size)), pc.less(size, pa.scalar(_EXACT)))
            if learn and pc.all(whole).as_py():
                values = values.cast(pa.int64())  # noqa: PLW2901
        arrays.append(values)
    return pa.table(arrays, names=table.column_names)


def _zipped(model: Model) -> bytes:
    with tempfile.TemporaryDirectory(prefix="viviane-estimator-") as folder:
        target = Path(folder) / "model"
        model.save(target)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(target.rglob("*")):
                if path.is_file():
                    file.write(path, path.relative_to(target).as_posix())
        return content.getvalue()


def checked_share(value: Any) -> float:
    """Return the share of rows that are held out.

    Raises:
        ConfigError: it is not between 0 and 1/2.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 0.5:
        raise ConfigError("not a share of rows", where="validation_fraction", value=value, allowed="0 < x <= 0.5")
    return float(value)


def plural(count: int, word: str) -> str:
    """Return a count with its word.

    Example:
        >>> plural(1, "fold"), plural(2, "fold")
        ('1 fold', '2 folds')
    """
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return arrays (rows,) as columns, (rows, M)."""
    return np.column_stack(parts).astype(np.float64)
