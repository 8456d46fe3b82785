"""Estimators: scikit-learn's contract, rows of any form, calibration, blends that are one graph."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import ndcg_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import viviane as vv
from viviane.core.errors import ConfigError, DataError
from viviane.metrics.calibrators import sigmoid

ROWS = 600


@pytest.fixture(scope="module")
def clicks() -> tuple[pd.DataFrame, np.ndarray]:
    """Clicks that depend on the site and on the price, one in eight."""
    chance = np.random.default_rng(0)
    site = chance.integers(0, 6, ROWS)
    price = chance.lognormal(1.0, 1.0, ROWS)
    logit = np.array([-4.0, -3.0, -2.5, -2.0, -1.0, 0.0])[site] - 0.3 * np.log(price)
    y = (chance.random(ROWS) < sigmoid(logit)).astype(int)
    frame = pd.DataFrame({"site": [f"s{n}" for n in site], "price": price, "device": chance.choice(["m", "d"], ROWS)})
    frame.loc[::17, "price"] = np.nan
    frame.loc[::13, "device"] = None
    return frame, y


@pytest.fixture(scope="module")
def fitted(clicks: tuple[pd.DataFrame, np.ndarray]) -> vv.CTRClassifier:
    frame, y = clicks
    return vv.CTRClassifier(num_folds=2, epochs=3, verbose=0).fit(frame, np.where(y == 1, "yes", "no"))


def test_fits_text_labels_and_predicts_calibrated_probabilities(fitted: Any, clicks: Any) -> None:
    frame, y = clicks
    p = fitted.predict_proba(frame)
    assert list(fitted.classes_) == ["no", "yes"]
    assert p.shape == (ROWS, 2)
    np.testing.assert_allclose(p.sum(1), 1)
    assert abs(p[:, 1].mean() - y.mean()) < 0.03
    assert set(fitted.predict(frame)) <= {"no", "yes"}
    assert fitted.n_features_in_ == 3
    assert list(fitted.feature_names_in_) == ["site", "price", "device"]
    assert fitted.validation_["auc"] > 0.6
    assert [one.kind for one in fitted.columns_] == ["category", "number", "category"]
    assert len(fitted.members_) == 4
    assert len(fitted.histories_) == 8  # four members, two folds


def test_the_blend_is_one_graph_that_predicts_the_weighed_logits(fitted: Any, clicks: Any, tmp_path: Path) -> None:
    frame, _ = clicks
    fitted.save(tmp_path / "model")
    again = vv.Model.load(tmp_path / "model").predict(frame, raw=True)[:, 0]
    np.testing.assert_allclose(again, fitted.predict_proba(frame)[:, 1], atol=1e-6)
    session = vv.InferenceSession(tmp_path / "model", device="cpu")
    rows = frame.where(frame.notna(), None).to_dict("records")[:5]
    np.testing.assert_allclose(np.asarray(session.predict(rows)).reshape(-1), again[:5], atol=1e-5)


def test_rows_of_every_form_give_the_same_predictions(fitted: Any, clicks: Any) -> None:
    frame, _ = clicks
    head = frame.head(40)
    expected = fitted.predict_proba(head)
    arrow = pa.Table.from_pandas(head, preserve_index=False)
    forms = {
        "arrow": arrow,
        "batches": arrow.to_batches(),
        "polars": pl.from_arrow(arrow),
        "lazy": pl.from_arrow(arrow).lazy(),
        "dict": {name: head[name].tolist() for name in head},
        "records": head.to_dict("records"),
        "other order": head[["device", "site", "price"]].assign(more=1),
        "categories": head.astype({"site": "category", "device": "category"}),
    }
    for name, rows in forms.items():
        np.testing.assert_allclose(fitted.predict_proba(rows), expected, rtol=1e-6, err_msg=name)


def test_a_pickle_and_a_copy_predict_the_same_bits(fitted: Any, clicks: Any) -> None:
    frame, _ = clicks
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(frame), fitted.predict_proba(frame))


def test_the_same_seed_gives_the_same_bits(clicks: Any) -> None:
    frame, y = clicks
    one, two = (
        vv.CTRClassifier("deepfm", epochs=1, random_state=3, verbose=0).fit(frame, y).predict_proba(frame)
        for _ in range(2)
    )
    assert np.array_equal(one, two)


def test_works_in_a_pipeline_with_cross_validation(clicks: Any) -> None:
    frame, y = clicks
    pipeline = make_pipeline(FunctionTransformer(), clone(vv.CTRClassifier("linear", epochs=1, verbose=0)))
    assert cross_val_score(pipeline, frame, y, cv=2, scoring="roc_auc").shape == (2,)


def test_class_weights_and_sampled_negatives_leave_probabilities_right(clicks: Any) -> None:
    frame, y = clicks
    weighed = vv.CTRClassifier("linear", epochs=4, class_weight="balanced", verbose=0).fit(frame, y)
    assert abs(weighed.predict_proba(frame)[:, 1].mean() - y.mean()) < 0.05
    keep = (y == 1) | (np.arange(ROWS) % 2 == 0)
    sampled = vv.CTRClassifier("linear", epochs=4, negative_share=0.5, verbose=0).fit(frame[keep], y[keep])
    assert abs(sampled.predict_proba(frame)[:, 1].mean() - y.mean()) < 0.05


def test_isotonic_calibration_rises(clicks: Any) -> None:
    frame, y = clicks
    found = vv.CTRClassifier("linear", epochs=1, calibration="isotonic", verbose=0).fit(frame, y)
    plain = found._probabilities(frame)[:, 0]
    assert (np.diff(found.predict_proba(frame)[np.argsort(plain), 1]) >= 0).all()


def test_prints_the_columns(clicks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frame, y = clicks
    vv.CTRClassifier("linear", epochs=1).fit(frame, y)
    shown = capsys.readouterr().out
    assert "site    category  6 values" in shown
    assert "held-out log loss" in shown


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"calibration": "plat"}, "unknown calibration"),
        ({"num_folds": 0}, r"not a whole number(?s:.)*num_folds"),
        ({"validation_fraction": 0.7}, "not a share of rows"),
        ({"negative_share": 2.0}, "not a valid fraction of negatives"),
        ({"class_weight": {"maybe": 2}}, "not class weights"),
        ({"model": "deepfn"}, "deepfm"),
        ({"categories": ["sight"]}, "site"),
        ({"epochs": 0}, r"at least 1\n.*epochs"),
        ({"batch_size": 1.5}, r"at least 1\n.*batch_size"),
        ({"lr": -1.0}, r"not a learning rate\n.*lr"),
    ],
)
def test_refuses_settings_with_what_is_allowed(settings: dict[str, Any], message: str, clicks: Any) -> None:
    frame, y = clicks
    with pytest.raises(ValueError, match=message):
        vv.CTRClassifier(verbose=0, **settings).fit(frame, y)


def test_refuses_rows_and_labels_that_cannot_be(clicks: Any, fitted: Any) -> None:
    frame, y = clicks
    with pytest.raises(NotFittedError):
        vv.CTRClassifier().predict(frame)
    with pytest.raises(DataError, match="y has one class"):
        vv.CTRClassifier(verbose=0).fit(frame, np.zeros(ROWS))
    with pytest.raises(ValueError, match="binary"):
        vv.CTRClassifier(verbose=0).fit(frame, np.arange(ROWS) % 3)
    with pytest.raises(DataError, match="another number of rows"):
        vv.CTRClassifier(verbose=0).fit(frame, y[:-1])
    with pytest.raises(ConfigError, match="lacks columns"):
        fitted.predict(frame.drop(columns="site"))
    with pytest.raises(DataError, match="X has no rows"):
        vv.CTRClassifier(verbose=0).fit(frame.iloc[:0], [])
    weights = np.ones(ROWS)
    for weight, message in ((weights[1:], "another number of rows"), (0 * weights, "weights are zero")):
        with pytest.raises(DataError, match=message):
            vv.CTRClassifier(verbose=0).fit(frame, y, sample_weight=weight)
    weights[7] = -2
    with pytest.raises(DataError, match=r"(?s)finite number.*row 7.*-2"):
        vv.CTRClassifier(verbose=0).fit(frame, y, sample_weight=weights)


def test_whole_numbers_may_be_missing_in_prediction_alone() -> None:
    """A frame turns such a column into floats."""
    frame = pd.DataFrame({"age": np.arange(200) % 50, "site": ["a", "b"] * 100, "old": np.arange(200) % 50 > 25})
    frame["site_id"] = np.arange(200) % 7
    clf = vv.CTRClassifier("linear", epochs=1, num_folds=1, verbose=0).fit(frame, np.arange(200) % 2)
    few = frame.head(4).copy()
    expected = clf.predict_proba(few)
    few["age"] = few["age"].astype(float)
    few["old"] = few["old"].astype(float)
    np.testing.assert_array_equal(clf.predict_proba(few), expected)
    few.loc[1, "age"] = np.nan
    missing = frame.head(4).astype({"age": "Int64"})
    missing.loc[1, "age"] = pd.NA
    found = clf.predict_proba(few)
    np.testing.assert_array_equal(found, clf.predict_proba(missing))
    np.testing.assert_array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    few["site_id"] = [1.0, 2.0, 1.5, 3.0]
    with pytest.raises(DataError, match=r"(?s)not a whole number.*row 2, column 'site_id'.*1.5"):
        clf.predict_proba(few)


def test_a_loader_that_shuffles_is_refused_where_order_matters(fitted: Any, clicks: Any) -> None:
    loader = torch.utils.data.DataLoader(clicks[0].to_dict("records"), batch_size=50, shuffle=True, collate_fn=list)
    for predict in (fitted.predict_proba, fitted.model_.predict, lambda x: vv.CTRClassifier().fit(x, clicks[1])):
        with pytest.raises(ConfigError, match="shuffle=False"):
            predict(loader)


def test_an_array_without_names_has_the_columns_of_fit_in_their_order() -> None:
    frame = pd.DataFrame({"b": np.arange(100.0), "a": np.arange(100.0)[::-1]})
    clf = vv.CTRClassifier("linear", epochs=1, num_folds=1, verbose=0).fit(frame, np.arange(100) % 2)
    with pytest.warns(UserWarning, match="feature names"):
        found = clf.predict_proba(frame.to_numpy())
    np.testing.assert_array_equal(found, clf.predict_proba(frame))


def test_ranks_rows_of_groups_without_the_group_in_prediction() -> None:
    frame = pd.DataFrame({"item": ["a", "b", "c", "d"] * 60})
    ranker = vv.CTRRanker("linear", epochs=3, verbose=0).fit(frame, [1, 0, 0, 0] * 60, group=[4] * 60)
    scores = ranker.predict(frame).reshape(-1, 4)
    assert (scores.argmax(1) == 0).all()
    assert ranker.validation_["ndcg@10:group"] == 1.0
    with pytest.raises(ConfigError, match="once"):
        vv.CTRRanker().fit(frame, [1, 0, 0, 0] * 60)


def test_a_ranker_scores_by_ndcg_of_its_groups() -> None:
    random = np.random.default_rng(0)
    users, relevant = np.repeat(np.arange(60), 5), (random.random(300) < 0.2).astype(int)
    rows = pd.DataFrame({"item": random.integers(0, 9, 300).astype(str), "price": random.normal(size=300)})
    ranker = vv.CTRRanker("linear", k=3, epochs=1, verbose=0).fit(rows, relevant, qid=users)
    scores = ranker.predict(rows)
    groups = [np.flatnonzero(users == user) for user in range(60)]
    known = [ndcg_score([relevant[own]], [scores[own]], k=3) for own in groups if relevant[own].any()]
    assert 0 < len(known) < 60
    mixed = random.permutation(300)
    for found in (
        ranker.score(rows, relevant, group=[5] * 60),
        ranker.score(rows.iloc[mixed], relevant[mixed], qid=users[mixed]),
        ranker.score(rows, relevant, qid=[f"user {user}" for user in users]),
    ):
        assert found == pytest.approx(np.mean(known), abs=1e-12)  # sums in another order
    with pytest.raises(ConfigError, match="give the groups once"):
        ranker.score(rows, relevant)
    with pytest.raises(DataError, match="y holds 0 and 1"):
        ranker.score(rows, relevant * 0, qid=users)


def test_labels_may_be_missing() -> None:
    random = np.random.default_rng(1)
    rows = pd.DataFrame({"a": random.integers(0, 4, 400).astype(str)})
    clicked = (random.random(400) < 0.4).astype(float)
    bought = np.where(clicked > 0, (rows["a"] == "1").astype(float), np.nan)
    settings = {"epochs": 3, "verbose": 0, "random_state": 3}
    first = vv.CTRMultiTaskClassifier(**settings).fit(rows, pd.DataFrame({"click": clicked, "buy": bought}))
    assert np.isfinite(list(first.validation_.values())).all()
    whole = vv.CTRMultiTaskClassifier(**settings).fit(
        rows, pd.DataFrame({"click": clicked, "buy": np.nan_to_num(bought)})
    )
    # Missing is not 0: of the clicked rows alone, more were bought than of all.
    assert first.predict_proba(rows)[1][:, 1].mean() > 1.5 * whole.predict_proba(rows)[1][:, 1].mean()
    labels = pa.table({"click": clicked, "buy": pa.array(bought, from_pandas=True).cast(pa.int8())})
    again = vv.CTRMultiTaskClassifier(**settings).fit(rows, labels)
    np.testing.assert_array_equal(first.predict_proba(rows), again.predict_proba(rows))
    with pytest.raises(DataError, match=r"all rows lack a label(.|\n)*'buy'"):
        vv.CTRMultiTaskClassifier(**settings).fit(rows, pd.DataFrame({"click": clicked, "buy": bought * np.nan}))
    with pytest.raises(DataError, match="labels are 0 and 1, or missing"):
        vv.CTRMultiTaskClassifier(**settings).fit(rows, np.column_stack([clicked, bought + 1]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, np.nan, 1, 0]),
        np.array([0, np.inf, 1, 0]),
        np.array(["no", None, "yes", "no"], object),
        pd.Series([0, None, 1, 0], dtype="Int64"),
        pd.Series(["no", None, "yes", "no"], dtype="category"),
        pl.Series([False, None, True, False]),
        pa.chunked_array([["no", None], ["yes", "no"]]),
    ],
    ids=["nan", "inf", "object", "nullable", "category", "polars", "arrow"],
)
def test_a_missing_label_or_group_is_refused_with_its_row(labels: Any) -> None:
    rows = pd.DataFrame({"site": ["a", "b", "a", "b"]})
    with pytest.raises(DataError, match=r"Input y contains NaN(?s:.*)row 1(?s:.*)1 of 4 rows"):
        vv.CTRClassifier("linear", epochs=1, verbose=0).fit(rows, labels)
    with pytest.raises(DataError, match=r"Input qid contains NaN(?s:.*)row 1"):
        vv.CTRRanker("linear", epochs=1, verbose=0).fit(rows, [0, 1, 0, 1], qid=labels)


def test_learns_several_labels() -> None:
    frame = pd.DataFrame({"site": ["a", "b"] * 150, "price": [0.5, 2.0, 1.0] * 100})
    y = pd.DataFrame({"click": [0, 1] * 150, "buy": [0, 1, 0, 0, 0, 0] * 50})
    clf = vv.CTRMultiTaskClassifier(epochs=2, verbose=0).fit(frame, y)
    assert clf.labels_ == ("click", "buy")
    assert clf.predict(frame).shape == (300, 2)
    assert [p.shape for p in clf.predict_proba(frame)] == [(300, 2), (300, 2)]
    with pytest.raises(DataError, match="0 and 1"):
        vv.CTRMultiTaskClassifier(verbose=0).fit(frame, y + 1)


@pytest.mark.slow
@parametrize_with_checks(
    [vv.CTRClassifier("linear", epochs=25, verbose=0)],
    expected_failed_checks=lambda estimator: {
        "check_sample_weight_equivalence_on_dense_data": "a weight of 2 is not a row twice in shuffled batches",
        "check_class_weight_classifiers": "class weights leave probabilities right, so predictions do not move",
    },
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_columns_that_say_nothing_give_a_constant() -> None:
    """The best weight of every model is 0: the prediction is the rate of the label."""
    chance = np.random.default_rng(0)
    frame = pd.DataFrame({"a": chance.integers(0, 5, 40), "b": chance.normal(size=40)})
    y, weight = chance.integers(0, 2, 40), chance.random(40)
    clf = vv.CTRClassifier(epochs=1, verbose=0, random_state=0).fit(frame, y, weight)
    p = clf.predict_proba(frame)[:, 1]
    assert [share for _, share, _ in clf.members_] == [0.0] * len(clf.members_)
    assert np.ptp(p) == 0
    assert abs(p[0] - np.average(y, weights=weight)) < 0.05
