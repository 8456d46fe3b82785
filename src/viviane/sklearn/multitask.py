"""Several binary labels from one model, such as a click and the purchase after it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin

from viviane.core.errors import DataError, SchemaError
from viviane.core.rows import as_table, is_frame
from viviane.sklearn.base import TableEstimator, check_numbers, checked_share, say, weights_of
from viviane.sklearn.members import Size, named
from viviane.sklearn.table import folds
from viviane.zoo import ZooModel


class CTRMultiTaskClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """Predicts several labels of 0 and 1 with a multi-task model; one part of the rows is held out.

    Args:
        model: "mmoe", "ple", "shared_bottom", or such a model with its settings.
        validation_fraction: share of the rows that is held out for early stopping.
        epochs, batch_size, lr, table_lr: in place of what follows from the number of rows.
        categories, numbers, min_count, random_state, device, num_threads, verbose: as in `CTRClassifier`.

    Attributes:
        labels_: names of the labels, those of y's columns or y0, y1, ...
        classes_: for each label its classes, 0 and 1.
        model_, columns_, etl_config_: as in `CTRClassifier`.
        history_: of the training.
        validation_: figures of the held-out rows.

    Example:
        >>> import pandas as pd
        >>> df = pd.DataFrame({"site": ["a", "b"] * 100, "price": [0.5, 2.0] * 100})
        >>> y = pd.DataFrame({"click": [0, 1] * 100, "buy": [0, 1, 0, 0] * 50})
        >>> clf = CTRMultiTaskClassifier(epochs=1, verbose=0).fit(df, y)
        >>> [p.shape for p in clf.predict_proba(df)]
        [(200, 2), (200, 2)]
    """

    def __init__(
        self,
        model: str | ZooModel = "mmoe",
        *,
        validation_fraction: float = 0.15,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        table_lr: float | None = None,
        categories: Any = None,
        numbers: Any = None,
        min_count: int | None = None,
        random_state: Any = 0,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 1,
    ) -> None:
        self.model = model
        self.validation_fraction = validation_fraction
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.table_lr = table_lr
        self.categories = categories
        self.numbers = numbers
        self.min_count = min_count
        self.random_state = random_state
        self.device = device
        self.num_threads = num_threads
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on rows X with labels y.

        Args:
            X: rows, as `CTRClassifier.fit` takes them.
            y: labels of 0 and 1, (rows, labels): a frame, whose columns name them, or an array. A missing value (None
                or NaN), such as the conversion of a row without a click, counts neither in loss nor in metrics.
            sample_weight: of each row, (rows,).

        Raises:
            DataError: y holds other values, a label without any, or fewer than two labels.
            SchemaError: a label has a feature's name.
        """
        check_numbers(self)
        table = self._table(X, reset=True)
        labels = _labels(y, table.num_rows)
        if both := sorted(set(labels) & set(table.column_names)):
            raise SchemaError("a label has the name of a column of X", value=", ".join(both), fix="leave it out of X")
        weight = weights_of(sample_weight, table.num_rows)
        seed = self._seed()
        first = next(iter(labels.values()))
        with tempfile.TemporaryDirectory(prefix="viviane-fit-") as folder:
            encoded = self._encode(table, labels, Path(folder), weight=weight)
            member = named(self.model, Size.of(encoded.schema, first[~np.isnan(first)]))
            given = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "table_lr")}
            solver = {"device": self.device, "num_threads": int(self.num_threads or 1)}
            member = replace(member, solver=solver, **{k: v for k, v in given.items() if v is not None})
            ((train_rows, held_rows),) = folds(first, 1, checked_share(self.validation_fraction), seed)
            train, held = encoded.dataset("train", train_rows), encoded.dataset("held", held_rows)
            model, self.history_ = member.fit(train, held, lead="log_loss", seed=seed, silent=self.verbose == 0)
            self.validation_ = model.evaluate(held)
            self._keep(model, encoded.etl)
        self.labels_ = tuple(labels)
        self.classes_ = [np.array([0, 1]) for _ in labels]
        if self.verbose > 0:
            say(", ".join(f"{name} {value:.5f}" for name, value in self.validation_.items()))
        return self

    def predict_proba(self, X: Any) -> list[NDArray[np.float64]]:  # noqa: N803
        """Return for each label the probabilities of 0 and 1, (rows, 2)."""
        return [np.column_stack([1 - p, p]) for p in self._probabilities(X).T]

    def predict(self, X: Any) -> NDArray[np.int64]:  # noqa: N803
        """Return the labels, (rows, labels)."""
        found: NDArray[np.int64] = (self._probabilities(X) > 0.5).astype(np.int64)
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = False
        tags.classifier_tags.multi_class = False
        return tags


def _labels(y: Any, rows: int) -> dict[str, NDArray[np.float64]]:
    """Return labels by name; NaN is a missing value.

    Raises:
        DataError: other values than 0 and 1, none at all, another number of rows, or fewer than two labels.
    """
    if isinstance(y, str | bytes) or (hasattr(y, "name") and not hasattr(y, "columns")):  # a name, a series
        raise DataError("y is not a table of labels", value=type(y).__name__, fix="for one label take CTRClassifier")
    if is_frame(y):
        table = as_table(y)
    else:
        array = np.asarray(y)
        if array.ndim != 2:
            fix = "for one label take CTRClassifier"
            raise DataError("y of several labels has two dimensions", value=array.shape, fix=fix)
        table = as_table(array, [f"y{n}" for n in range(array.shape[1])])
    if table.num_rows != rows:
        raise DataError("y has another number of rows than X", value=f"{table.num_rows}, X has {rows}")
    if table.num_columns < 2:
        raise DataError("y has one label", value=table.column_names, fix="take CTRClassifier")
    found = {}
    for name in table.column_names:
        try:
            values = table.column(name).cast(pa.float64()).to_numpy()  # missing values are NaN
        except ValueError as error:
            first = next((str(one) for one in table.column(name).to_pylist() if one is not None), "")
            raise DataError(
                "labels are 0 and 1, or missing", where=f"label {name!r}", value=first,
                fix=f"compare them: y[{name!r}] == {first!r}",
            ) from error  # fmt: skip
        known = values[~np.isnan(values)]
        if not len(known):
            raise DataError("all rows lack a label", where=f"label {name!r}", fix="leave this label out of y")
        if not np.isin(known, (0.0, 1.0)).all():
            value = np.unique(known)[:5].tolist()
            raise DataError("labels are 0 and 1, or missing", where=f"label {name!r}", value=value)
        found[name] = values
    return found
