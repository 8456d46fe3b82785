"""Binary classification of click logs and other tables, with defaults that follow the data."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from viviane.core.errors import ConfigError, DataError
from viviane.core.locations import AnyPath
from viviane.metrics.calibrators import IsotonicCalibration, PriorCorrection, fit_blend, logit, sigmoid
from viviane.model import Model
from viviane.sklearn.base import TableEstimator, check_numbers, checked_share, column, plural, say, weights_of
from viviane.sklearn.blend import blend
from viviane.sklearn.members import SMALL_ROWS, Member, Size, automatic, named
from viviane.sklearn.table import LABEL, Encoded, folds, own_name
from viviane.zoo import ZooModel

Fold = tuple[NDArray[np.int64], NDArray[np.int64]]
_MOST_FOLDS = 5
_ROWS_OF_MOST = 20_000  # of more rows, three folds hold out enough


class CTRClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """Predicts the probability of a click, or of any binary label, from the columns of a table.

    `fit` infers the type of each column, learns the ETL, trains, and calibrates. With model="auto" it trains linear
    models, DeepFM and Wide & Deep. Up to 100,000 rows, each is trained on three or five folds, so that every row is
    predicted by a model that was not trained on it; the models are weighed by the log loss of those predictions, and
    together become one graph, `model_`. Of more rows, one part is held out.

    Args:
        model: "auto", "linear", the name of a model of the zoo such as "deepfm", or the model with its settings, such
            as `vv.zoo.DCNv2(dim=16)`.
        num_folds: models of each kind, each with another part held out; for "auto" None takes five up to 20,000 rows
            and three up to 100,000, else 1.
        validation_fraction: share of the rows that is held out, where num_folds is 1.
        epochs, batch_size, lr, table_lr: in place of what follows from the number of rows; lr is that of the dense
            layers, table_lr that of the embedding tables.
        calibration: "platt" fits slope and shift of the logit on held-out rows, "isotonic" a rising function; None
            leaves the probabilities as they are.
        class_weight: weights of the classes in the loss, a dict or "balanced"; probabilities are corrected for them.
        negative_share: share of the negatives that were kept, where they were sampled before; probabilities are
            corrected for it.
        categories, numbers: columns whose kind is known; the others are inferred.
        min_count: values of fewer rows share one id; None decides by the share of positives.
        random_state: seed.
        device: "auto", "cpu", "cuda".
        num_threads: CPU threads; None takes one for layers this small.
        verbose: 0 is silent, 1 prints the columns and the result, 2 each model as well.

    Attributes:
        classes_: the two labels.
        model_: a `vv.Model`, which can be saved, served and exported.
        columns_: how each column was understood.
        etl_config_: the declarative file.
        members_: name, weight and held-out log loss of each kind of model.
        histories_: of each training.
        validation_: log loss and AUC of held-out rows.

    Example:
        >>> import pandas as pd
        >>> df = pd.DataFrame({"site": ["a", "b"] * 100, "price": [0.5, 2.0] * 100})
        >>> clf = CTRClassifier(model="linear", epochs=2, verbose=0).fit(df, [0, 1] * 100)
        >>> clf.predict_proba(df).shape
        (200, 2)
    """

    def __init__(
        self,
        model: str | ZooModel = "auto",
        *,
        num_folds: int | None = None,
        validation_fraction: float = 0.15,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        table_lr: float | None = None,
        calibration: Literal["platt", "isotonic"] | None = "platt",
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        negative_share: float | None = None,
        categories: Any = None,
        numbers: Any = None,
        min_count: int | None = None,
        random_state: Any = 0,
        device: str = "auto",
        num_threads: int | None = None,
        verbose: int = 1,
    ) -> None:
        self.model = model
        self.num_folds = num_folds
        self.validation_fraction = validation_fraction
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.table_lr = table_lr
        self.calibration = calibration
        self.class_weight = class_weight
        self.negative_share = negative_share
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
            X: a pandas, Polars or Arrow table, columns by name, a list of dicts, or an array (rows, columns).
            y: two different labels, numbers or texts, (rows,); "label" columns need no conversion.
            sample_weight: of each row in the loss, (rows,); only their ratios count.

        Raises:
            ConfigError: a setting is not possible. DataError: rows or labels cannot be used.
        """
        self._check_settings()
        if y is None:
            raise ValueError("This CTRClassifier estimator requires y to be passed, but the target y is None")
        check_numbers(self)
        table = self._table(X, reset=True)
        labels = self._classes(y, table.num_rows)
        weight = weights_of(sample_weight, table.num_rows)
        seed = self._seed()
        with tempfile.TemporaryDirectory(prefix="viviane-fit-") as folder:
            name = own_name(LABEL, table.column_names)
            encoded = self._encode(table, {name: labels}, Path(folder), weight=weight)
            size = Size.of(encoded.schema, labels)
            pair = self._class_weights(labels)
            members = [self._adapted(one, pair) for one in self._members(encoded, size)]
            divided = folds(labels, self._num_folds(size), checked_share(self.validation_fraction), seed)
            self._train(encoded, members, divided, labels, weight, pair, seed)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probability of each class, (rows, 2), in the order of `classes_`."""
        p = self._probabilities(X)[:, 0]
        if self.isotonic_ is not None:
            p = self.isotonic_(p)
            if self.negative_share is not None:
                p = PriorCorrection.of_sampling(self.negative_share)(p)
        return np.column_stack([1 - p, p])

    def save(self, folder: str | AnyPath) -> AnyPath:
        """Write the model's folder: what `vv.Model.load`, `viviane serve`, `predict` and `export` read.

        Raises:
            ConfigError: with isotonic calibration, which a model's graph cannot hold.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        self._fitted_model()
        if self.isotonic_ is not None:
            raise ConfigError(
                "isotonic calibration is no part of a model's folder, whose predictions would differ",
                where="calibration", value=self.calibration,
                fix="fit with calibration='platt', pickle the estimator, or save the model without calibration: "
                "clf.model_.save(folder)",
            )  # fmt: skip
        return super().save(folder)

    def decision_function(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return ln(p / (1 - p)) of the second class, (rows,)."""
        return logit(self.predict_proba(X)[:, 1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the more probable class, (rows,)."""
        chosen = (self.predict_proba(X)[:, 1] > 0.5).astype(np.int64)
        found: NDArray[Any] = self.classes_[chosen]
        return found

    # Settings ---------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        if self.calibration not in (None, "platt", "isotonic"):
            raise ConfigError("unknown calibration", value=self.calibration, allowed="platt, isotonic, None")
        if self.negative_share is not None:
            PriorCorrection.of_sampling(self.negative_share)

    def _classes(self, y: Any, rows: int) -> NDArray[np.float64]:
        labels = column(y, rows, "y")
        try:
            check_classification_targets(labels)
            self.classes_, codes = np.unique(labels, return_inverse=True)
        except TypeError as error:
            raise DataError(
                "y has labels of several types", value=str(error), fix="make them all text, or numbers"
            ) from error
        if len(self.classes_) > 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is multiclass: "
                f"{len(self.classes_)} classes"
            )
        if len(self.classes_) < 2:
            raise DataError("y has one class", value=self.classes_.tolist())
        return codes.astype(np.float64)

    def _members(self, encoded: Encoded, size: Size) -> list[Member]:
        if isinstance(self.model, str) and self.model == "auto":
            return automatic(encoded.schema, size)
        return [named(self.model, size)]

    def _num_folds(self, size: Size) -> int:
        wanted = self.num_folds
        if wanted is None:
            folds_of_few = _MOST_FOLDS if size.rows <= _ROWS_OF_MOST else 3
            wanted = folds_of_few if self.model == "auto" and size.rows <= SMALL_ROWS else 1
        return min(int(wanted), max(int(size.positives), 1))

    def _adapted(self, member: Member, pair: tuple[float, float] | None) -> Member:
        given = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "table_lr")}
        solver: dict[str, Any] = {"device": self.device, "num_threads": int(self.num_threads or 1)}
        if pair is not None:
            solver |= {"class_weights": pair, "correct_class_weights": True}
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(member, solver=solver, **chosen)

    def _class_weights(self, labels: NDArray[np.float64]) -> tuple[float, float] | None:
        if self.class_weight is None:
            return None
        if self.class_weight == "balanced":
            low, high = compute_class_weight(
                "balanced", classes=self.classes_, y=self.classes_[labels.astype(np.int64)]
            )
        elif isinstance(self.class_weight, dict) and set(self.class_weight) <= set(self.classes_.tolist()):
            low, high = (self.class_weight.get(one, 1.0) for one in self.classes_.tolist())
        else:
            raise self._no_class_weights()
        if not all(isinstance(one, Real) and 0 < float(one) < np.inf for one in (low, high)):
            raise self._no_class_weights()
        mean = low * (1 - labels.mean()) + high * labels.mean()  # only their ratio counts, as for sample_weight
        return float(low / mean), float(high / mean)

    def _no_class_weights(self) -> ConfigError:
        allowed = f"a dict from the labels {self.classes_.tolist()} to numbers above 0, or 'balanced'"
        return ConfigError("not class weights", where="class_weight", value=self.class_weight, allowed=allowed)

    # Training ---------------------------------------------------------------------------------------------

    def _train(
        self,
        encoded: Encoded,
        members: list[Member],
        divided: list[Fold],
        labels: NDArray[np.float64],
        weight: NDArray[np.float64] | None,
        pair: tuple[float, float] | None,
        seed: int,
    ) -> None:
        logits = np.full((len(members), len(labels)), np.nan)
        models: list[list[Model]] = [[] for _ in members]
        self.histories_ = []
        for fold, (train_rows, held_rows) in enumerate(divided):
            train, held = encoded.dataset(f"train{fold}", train_rows), encoded.dataset(f"held{fold}", held_rows)
            for number, member in enumerate(members):
                model, history = member.fit(train, held, lead="log_loss", seed=seed + fold, silent=self.verbose == 0)
                logits[number, held_rows] = logit(model.predict(held)[:, 0])
                models[number].append(model)
                self.histories_.append(history)
                if self.verbose > 1:
                    best = history.best_row("log_loss")
                    say(f"{member.name}, fold {fold + 1} of {len(divided)}: log loss {best['log_loss']:.5f}, "
                        f"AUC {best['auc']:.5f}")  # fmt: skip
        known = ~np.isnan(logits[0])
        own = None if weight is None else weight[known]
        self._join(encoded, members, models, logits[:, known].T, labels[known], own, pair)
        if self.verbose > 0:
            of = ", ".join(f"{name} {share:.2f}" for name, share, _ in self.members_)
            values = self.validation_
            held_out = f"log loss {values['log_loss']:.5f}, AUC {values['auc']:.5f}"
            say(f"{plural(len(labels), 'row')}, {of}: held-out {held_out}")

    def _join(
        self,
        encoded: Encoded,
        members: list[Member],
        models: list[list[Model]],
        logits: NDArray[np.float64],
        labels: NDArray[np.float64],
        weight: NDArray[np.float64] | None,
        pair: tuple[float, float] | None,
    ) -> None:
        """Weigh the models by the held-out rows, make them one, and calibrate."""
        enough = min(labels.sum(), len(labels) - labels.sum()) >= 5
        if enough and (len(members) > 1 or self.calibration == "platt"):
            shares, shift = fit_blend(logits, labels, weight)
        else:
            shares, shift = np.full(len(members), 1 / len(members)), 0.0
        p = sigmoid(logits @ shares + shift)
        self.isotonic_ = (
            IsotonicCalibration.fit(p, labels, weight) if self.calibration == "isotonic" and enough else None
        )
        self.validation_ = {"log_loss": log_loss(labels, p, weight), "auc": auc(labels, p, weight)}
        self.members_ = [
            (member.name, float(share), log_loss(labels, sigmoid(own), weight))
            for member, share, own in zip(members, shares, logits.T, strict=True)
        ]
        flat = [model for of_kind in models for model in of_kind]
        each = [share / len(of_kind) for of_kind, share in zip(models, shares, strict=True) for _ in of_kind]
        if pair is not None:  # the logits of a graph are those of the weighted data
            shift += PriorCorrection(*pair).shift * float(np.sum(each))
        if self.negative_share is not None and self.isotonic_ is None:
            shift += PriorCorrection.of_sampling(self.negative_share).shift
        solver = flat[0].solver.model_copy(
            update={"class_weights": None, "correct_class_weights": False, "ema_decay": None}
        )
        joined = blend(flat, each, shift, encoded.schema, solver, "auto" if len(members) > 1 else members[0].name)
        self._keep(joined, encoded.etl)


def log_loss(y: NDArray[np.float64], p: NDArray[np.float64], weight: NDArray[np.float64] | None = None) -> float:
    """Return the weighted mean of -ln of the probability of each label."""
    inside = np.clip(p, 1e-7, 1 - 1e-7)
    losses = -(y * np.log(inside) + (1 - y) * np.log1p(-inside))
    return float(np.average(losses, weights=weight))


def auc(y: NDArray[np.float64], p: NDArray[np.float64], weight: NDArray[np.float64] | None = None) -> float:
    """Return the weighted area under the ROC curve; NaN where one class has all the weight."""
    from sklearn.metrics import roc_auc_score

    positive = float(np.average(y, weights=weight))
    return float(roc_auc_score(y, p, sample_weight=weight)) if 0 < positive < 1 else float("nan")
