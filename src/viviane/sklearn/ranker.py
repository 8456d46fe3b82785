"""Rows in order within their query, user or session."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError
from viviane.core.whole_numbers import whole_numbers
from viviane.etl import FittedEtl
from viviane.metrics.calibrators import logit
from viviane.metrics.ranking import ndcg
from viviane.model import Model
from viviane.schema import Schema
from viviane.sklearn.base import TableEstimator, check_numbers, checked_share, column, is_whole, say, weights_of
from viviane.sklearn.blend import blend
from viviane.sklearn.members import Size, named
from viviane.sklearn.table import GROUP, LABEL, Encoded, folds, own_name
from viviane.zoo import ZooModel


class CTRRanker(TableEstimator):
    """Scores rows so that the relevant ones of each group come first.

    It learns the probability that a row is relevant and keeps the weights that order the rows of held-out groups best,
    by NDCG@k; a group is never divided.

    Args:
        model: the name of a model of the zoo, "linear", or a model with its settings.
        k: of NDCG@k, which decides when to stop.
        validation_fraction: share of the groups that is held out.
        epochs, batch_size, lr, table_lr: in place of what follows from the number of rows.
        categories, numbers, min_count, random_state, device, num_threads, verbose: as in `CTRClassifier`.

    Attributes:
        model_, columns_, etl_config_, history_, validation_: as in `CTRMultiTaskClassifier`.

    Example:
        >>> import pandas as pd
        >>> df = pd.DataFrame({"item": ["a", "b", "c", "d"] * 50, "user": [n // 4 for n in range(200)]})
        >>> ranker = CTRRanker("linear", epochs=1, verbose=0).fit(df, [1, 0, 0, 0] * 50, qid=df["user"])
        >>> ranker.predict(df).shape
        (200,)
    """

    def __init__(
        self,
        model: str | ZooModel = "deepfm",
        *,
        k: int = 10,
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
        self.k = k
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

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        qid: Any = None,
        group: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Train on rows X with relevance y.

        Args:
            X: rows, as `CTRClassifier.fit` takes them.
            y: 1 where the row is relevant to its group, else 0, (rows,).
            qid: the group of each row, (rows,), such as its user; rows may come in any order.
            group: or, as LightGBM takes it, the number of rows of each group, in the order of the rows.
            sample_weight: of each row, (rows,).

        Raises:
            ConfigError: neither or both of qid and group. DataError: y holds other values than 0 and 1.
        """
        self._check_k()
        check_numbers(self)
        table = self._table(X, reset=True)
        relevance = _relevance(y, table.num_rows)
        groups = _groups(qid, group, table.num_rows)
        weight = weights_of(sample_weight, table.num_rows)
        seed = self._seed()
        with tempfile.TemporaryDirectory(prefix="viviane-fit-") as folder:
            label = own_name(LABEL, table.column_names)
            beside = own_name(GROUP, table.column_names)
            encoded = self._encode(table, {label: relevance}, Path(folder), weight=weight, groups=groups)
            member = named(self.model, Size.of(encoded.schema, relevance))
            given = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "table_lr")}
            solver = {"device": self.device, "num_threads": int(self.num_threads or 1)}
            recipe = _Without(member.recipe, beside)
            member = replace(member, recipe=recipe, solver=solver, **{k: v for k, v in given.items() if v is not None})
            ((train_rows, held_rows),) = folds(relevance, 1, checked_share(self.validation_fraction), seed, groups)
            train, held = encoded.dataset("train", train_rows), encoded.dataset("held", held_rows)
            model, self.history_ = member.fit(
                train, held, lead=f"ndcg@{self.k}:{beside}", seed=seed, silent=self.verbose == 0
            )
            self.validation_ = model.evaluate(held)
            self._keep(*_without(model, encoded, beside, Path(folder)))
        if self.verbose > 0:
            say(", ".join(f"{name} {value:.5f}" for name, value in self.validation_.items()))
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return scores, (rows,); of the rows of a group, the higher ones come first."""
        return logit(self._probabilities(X)[:, 0])

    def score(self, X: Any, y: Any, *, qid: Any = None, group: Any = None) -> float:  # noqa: N803
        """Return the mean over groups of NDCG@k; groups without a relevant row do not count.

        Args:
            X, y, qid, group: as in `fit`.

        Raises:
            ConfigError: neither or both of qid and group. DataError: y holds other values than 0 and 1.
        """
        self._check_k()
        scores = self.predict(X)
        relevance, groups = _relevance(y, len(scores)), _groups(qid, group, len(scores))
        numbers = np.unique(groups, return_inverse=True)[1].astype(np.int64)
        return ndcg(numbers, scores.astype(np.float32), relevance.astype(np.float32), self.k)

    def _check_k(self) -> None:
        if not is_whole(self.k):
            raise ConfigError("k of NDCG is a number from 1", value=self.k)


class _Without:
    """A recipe whose graph does not read one column."""

    def __init__(self, recipe: Any, name: str) -> None:
        self.recipe, self.name = recipe, name

    def nodes(self, schema: Any) -> Any:
        """Return the graph over the other columns."""
        kept = [column for column in schema.column_names if column not in (self.name, schema.sample_weight)]
        nodes = list(self.recipe.nodes(schema.select(kept)))
        first = nodes[0]
        if isinstance(first.sparse, str):
            columns = tuple(one.name for one in schema.categorical if one.name != self.name)
            nodes[0] = first.model_copy(update={"sparse": {first.sparse: columns} if columns else "cats"})
        return nodes


def _without(model: Model, encoded: Encoded, group: str, folder: Path) -> tuple[Model, Path]:
    """Return model and ETL without the column of groups, which rows to be ranked need not have."""
    schema = encoded.schema
    kept = schema.select([name for name in schema.column_names if name not in (group, schema.sample_weight)])
    fitted = FittedEtl.load(encoded.etl)
    columns = tuple(one for one in fitted.config.categorical if one.name != group)
    config = fitted.config.model_copy(update={"categorical": columns})
    smaller = FittedEtl(config, fitted.states, fitted.borders, fitted.vocabularies, fitted.groups)
    solver = model.solver.model_copy(update={"ema_decay": None})
    etl = Path(str(smaller.save(folder / "smaller" / encoded.etl.name)))
    plain = Schema(labels=kept.labels, dense=kept.dense, categorical=kept.categorical)
    return blend([model], [1.0], 0.0, plain, solver, model.name), etl


def _relevance(y: Any, rows: int) -> NDArray[np.float64]:
    relevance: NDArray[np.float64] = column(y, rows, "y").astype(np.float64)
    if not np.isin(relevance, (0.0, 1.0)).all() or len(np.unique(relevance)) < 2:
        fix = "say from which grade on a row is relevant: y = grade >= 3"
        raise DataError("y holds 0 and 1, both of them", value=np.unique(relevance)[:5].tolist(), fix=fix)
    return relevance


def _groups(qid: Any, group: Any, rows: int) -> NDArray[Any]:
    if (qid is None) == (group is None):
        raise ConfigError("give the groups once", allowed="qid=..., the group of each row; or group=..., their sizes")
    if qid is not None:
        found = column(qid, rows, "qid")
        return found if found.dtype.kind in "iu" else found.astype(str)
    sizes = whole_numbers(group, np.int64, "group")
    if sizes.ndim != 1 or (sizes < 1).any() or sizes.sum() != rows:
        raise DataError("sizes of groups add up to the rows", value=f"{sizes.sum()} of {rows}")
    return np.repeat(np.arange(len(sizes)), sizes)
