"""Columns of every type that frames have, and what becomes of numbers, weights and settings."""

from __future__ import annotations

import datetime
import decimal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import viviane as vv
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.core.rows import as_table
from viviane.metrics.calibrators import PriorCorrection

ROWS = 240


def classifier(**settings: Any) -> vv.CTRClassifier:
    return vv.CTRClassifier("linear", **{"epochs": 1, "num_folds": 1, "verbose": 0, **settings})


@pytest.fixture(scope="module")
def rows() -> tuple[pd.DataFrame, np.ndarray]:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.integers(18, 80, ROWS), "user_id": random.integers(0, 12, ROWS)})
    frame["site"] = random.choice(["a", "b", "c"], ROWS)
    return frame, (random.random(ROWS) < 0.2 + 0.4 * (frame["site"] == "a")).astype(int).to_numpy()


DAY = pd.Timestamp("2024-01-01")
HOURS = DAY + pd.to_timedelta(np.arange(ROWS) * 7, unit="h")
COLUMNS: dict[str, tuple[Callable[[], Any], str]] = {
    "dates": (lambda: [one.date() for one in HOURS], "time"),
    "times": (lambda: [datetime.time(n % 24) for n in range(ROWS)], "number"),
    "times as text": (lambda: [f"{one}" for one in HOURS], "time"),
    "times with offsets as text": (lambda: [f"{one}+02:00" for one in HOURS], "time"),
    "dates as text": (lambda: [str(one.date()) if n % 9 else None for n, one in enumerate(HOURS)], "time"),
    "text that begins as dates": (lambda: ["2024-01-01"] * (ROWS - 9) + ["2024-13-01"] * 9, "category"),
    "durations": (lambda: HOURS - DAY, "number"),
    "periods": (lambda: HOURS.to_period("D"), "time"),
    "intervals": (lambda: pd.cut(np.arange(ROWS) % 50, 4), "category"),
    "bytes": (lambda: [b"a", b"b", None] * (ROWS // 3), "category"),
    "decimals": (lambda: [decimal.Decimal(n) / 4 for n in range(ROWS)], "number"),
    "hashes": (lambda: np.arange(ROWS, dtype=np.uint64) % 5 + np.uint64(2**63), "category"),
    "sparse": (lambda: pd.arrays.SparseArray(np.arange(ROWS) % 2), "boolean"),
    "structs": (lambda: [{"a": 1}, {"a": 2}] * (ROWS // 2), "ignored"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_this_type_is_learned_and_predicted(name: str, rows: Any) -> None:
    values, kind = COLUMNS[name]
    frame = rows[0].assign(x=values())
    clf = classifier().fit(frame, rows[1])
    assert {one.name: one.kind for one in clf.columns_}["x"] == kind
    whole = clf.predict_proba(frame)
    np.testing.assert_array_equal(clf.predict_proba(frame.iloc[5:9]), whole[5:9])


def test_text_is_the_time_that_it_says(rows: Any) -> None:
    frame, y = rows
    given = {kind: frame.assign(at=values) for kind, values in (("time", HOURS), ("text", [f"{one}" for one in HOURS]))}
    found = {kind: classifier().fit(one, y) for kind, one in given.items()}
    assert found["time"].columns_ == found["text"].columns_
    np.testing.assert_array_equal(*(found[kind].predict_proba(given[kind]) for kind in given))


def test_a_column_of_another_type_than_in_fit_is_refused_with_what_to_do(rows: Any) -> None:
    clf = classifier().fit(*rows)
    with pytest.raises(DataError, match=r"frame\['site'\].astype\(str\)") as refused:
        clf.predict_proba(rows[0].assign(site=1))
    assert "input.columns" not in str(refused.value)


def test_a_silent_estimator_says_nothing_of_an_undefined_auc(rows: Any, caplog: Any) -> None:
    ones = np.ones((ROWS, 2)) * [1, 0]
    ones[::7, 1] = 1
    for verbose in (0, 1):
        caplog.clear()
        vv.CTRMultiTaskClassifier(epochs=1, verbose=verbose).fit(rows[0], ones)
        warnings_of = [one for one in caplog.records if one.levelname == "WARNING"]
        assert bool(warnings_of) == bool(verbose)


def test_durations_are_seconds_in_every_unit() -> None:
    ticks = pa.chunked_array([pa.array([1500, None], pa.int64())])
    for unit, type_of, seconds in [("ms", pa.duration, 1.5), ("us", pa.time64, 0.0015), ("ms", pa.time32, 1.5)]:
        kind = type_of(unit)
        values = ticks.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
        assert as_table(pa.table({"x": values})).to_pydict() == {"x": [seconds, None]}


def test_whole_numbers_are_the_same_as_floats_and_with_missing_ones(rows: Any) -> None:
    """pandas makes whole numbers floats as soon as one is missing; an id stays an id, and a number a number."""
    frame, y = rows
    gaps = frame.assign(
        age=frame["age"].astype("Int64").mask(frame["age"] < 25),
        user_id=frame["user_id"].astype("Int64").mask(frame["age"] > 70),
    )
    for given in (frame, gaps):
        floats = given.assign(age=given["age"].astype(float), user_id=given["user_id"].astype(float))
        one, other = classifier().fit(given, y), classifier().fit(floats, y)
        assert one.columns_ == other.columns_
        assert {c.name: c.kind for c in other.columns_}["user_id"] == "category"
        np.testing.assert_array_equal(one.predict_proba(given), other.predict_proba(floats))


def test_a_number_may_have_a_fraction_in_prediction(rows: Any) -> None:
    clf = classifier().fit(*rows)
    few = rows[0].head(3).assign(age=[30.0, 30.5, 31.0])
    low, middle, high = clf.decision_function(few.assign(user_id=1, site="a"))
    assert min(low, high) <= middle <= max(low, high)


@pytest.mark.parametrize("as_array", [False, True])
def test_infinity_is_refused_with_column_and_row(rows: Any, as_array: bool) -> None:
    frame = rows[0][["age"]].astype(float)
    clf = classifier().fit(frame, rows[1])
    frame.loc[7, "age"] = np.inf
    given = frame.to_numpy() if as_array else frame
    for call in (lambda: classifier().fit(given, rows[1]), lambda: clf.predict_proba(given)):
        with (
            pytest.raises(DataError, match=r"(?s)contains infinity.*row 7.*1 of 240"),
            warnings.catch_warnings(action="ignore"),
        ):
            call()


def test_only_ratios_of_weights_count(rows: Any) -> None:
    frame, y = rows
    weight = np.where(frame["age"] > 40, 2.0, 1.0)
    expected = classifier().fit(frame, y, sample_weight=weight).predict_proba(frame)
    for factor in (2.0**-10, 2.0**6):  # powers of two, so that the products are exact
        found = classifier().fit(frame, y, sample_weight=weight * factor).predict_proba(frame)
        np.testing.assert_array_equal(found, expected)
    plain = classifier().fit(frame, y).predict_proba(frame)
    np.testing.assert_array_equal(
        classifier().fit(frame, y, sample_weight=np.full(ROWS, 8.0)).predict_proba(frame), plain
    )
    classes = [classifier(class_weight={0: 1 * n, 1: 5 * n}).fit(frame, y).predict_proba(frame) for n in (1, 64)]
    np.testing.assert_array_equal(*classes)


@pytest.mark.parametrize("name", ["num_folds", "epochs", "batch_size", "min_count", "num_threads"])
def test_counts_may_be_numpys_and_nothing_else(name: str, rows: Any) -> None:
    classifier(**{name: np.int64(2)}).fit(*rows)
    for wrong in (True, 2.0, "2", 0, -1):
        with pytest.raises(ConfigError, match=rf"(?s)not a whole number.*{name}"):
            classifier(**{name: wrong}).fit(*rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_fraction": "a"}, "not a share of rows"),
        ({"negative_share": "x"}, "not a valid fraction of negatives"),
        ({"categories": 3}, r"not names of columns(?s:.)*categories"),
        ({"categories": ["sit"]}, r"X has no such column(?s:.)*categories(?s:.)*did you mean 'site'"),
        ({"categories": ["age"], "numbers": ["age"]}, "a category or a number"),
        ({"class_weight": {0: -1, 1: 2}}, "not class weights"),
        ({"class_weight": {0: "a", 1: 2}}, "not class weights"),
    ],
)
def test_settings_are_refused_by_their_own_names(settings: dict[str, Any], message: str, rows: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        classifier(**settings).fit(*rows)


def test_numbers_may_be_named_as_categories_and_text_not_as_numbers(rows: Any) -> None:
    frame = rows[0].assign(rate=rows[0]["age"] % 5 / 2)
    clf = classifier(categories=["rate", "age"]).fit(frame, rows[1])
    assert [one.kind for one in clf.columns_] == ["category"] * 4
    np.testing.assert_array_equal(clf.predict_proba(frame.iloc[:3]), clf.predict_proba(frame)[:3])
    with pytest.raises(SchemaError, match=r"(?s)named as a number.*column 'site'"):
        classifier(numbers="site").fit(*rows)


def test_a_saved_model_predicts_as_the_estimator_does(rows: Any, tmp_path: Path) -> None:
    frame, y = rows
    variants: list[dict[str, Any]] = [
        {"negative_share": 0.1}, {"negative_share": 0.1, "calibration": None}, {"class_weight": {0: 1, 1: 6}},
    ]  # fmt: skip
    for n, settings in enumerate(variants):
        clf = classifier(**settings).fit(frame, y)
        clf.save(tmp_path / str(n))
        found = vv.Model.load(tmp_path / str(n)).predict(frame)[:, 0]
        np.testing.assert_allclose(found, clf.predict_proba(frame)[:, 1], rtol=1e-6)  # float32 beside float64
    sampled, plain = (classifier(negative_share=share).fit(frame, y).decision_function(frame) for share in (0.1, None))
    np.testing.assert_allclose(sampled, plain + np.log(0.1), atol=1e-5)
    isotonic = classifier(calibration="isotonic", negative_share=0.1).fit(frame, y)
    uncorrected = classifier(calibration="isotonic").fit(frame, y).predict_proba(frame)[:, 1]
    expected = PriorCorrection.of_sampling(0.1)(uncorrected)
    np.testing.assert_allclose(isotonic.predict_proba(frame)[:, 1], expected, rtol=1e-12)
    with pytest.raises(ConfigError, match=r"(?s)isotonic.*model_.save"):
        isotonic.save(tmp_path / "isotonic")


def test_weights_that_are_none_are_refused(rows: Any) -> None:
    for wrong, message in ((2.0, "one value"), ("age", "no numbers"), (["a"] * ROWS, "no numbers"), ([None], "rows")):
        with pytest.raises(DataError, match=f"sample_weight.*{message}"):
            classifier().fit(*rows, sample_weight=wrong)


def test_several_labels_are_named_in_every_mistake(rows: Any) -> None:
    frame, y = rows
    tasks = vv.CTRMultiTaskClassifier(epochs=1, verbose=0)
    both = pd.DataFrame({"add to cart": y, "buy/now": y})
    assert tasks.fit(frame, both).labels_ == ("add to cart", "buy/now")
    with pytest.raises(DataError, match=r"(?s)0 and 1, or missing.*label 'buy/now'.*'no'.*y\['buy/now'\] == 'no'"):
        tasks.fit(frame, both.assign(**{"buy/now": np.where(y == 1, "yes", "no")}))
    for single in (pd.Series(y), "click"):
        with pytest.raises(DataError, match="take CTRClassifier"):
            tasks.fit(frame, single)


def test_refuses_labels_and_columns_that_cannot_be(rows: Any) -> None:
    frame, y = rows
    with pytest.raises(DataError, match=r"(?s)y is text.*frame\['click'\]"):
        classifier().fit(frame, "click")
    with pytest.raises(DataError, match="labels of several types"):
        classifier().fit(frame, pd.Series(["a", 1] * (ROWS // 2), dtype=object))
    with pytest.raises(DataError, match="X has no columns"):
        classifier().fit(frame[[]], y)
    with pytest.raises(DataError, match="has no name"):
        classifier().fit(frame.rename(columns={"age": ""}), y)
    with pytest.raises(SchemaError, match="no column to learn from") as caught:
        classifier().fit(pd.DataFrame({"k": ["a"] * ROWS}), y)
    assert "label" not in str(caught.value)
