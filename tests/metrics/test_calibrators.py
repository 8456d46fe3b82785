"""Calibrators against closed forms and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from viviane.core.errors import ConfigError, DataError
from viviane.metrics.calibrators import IsotonicCalibration, PlattScaling, PriorCorrection, fit_blend, logit, sigmoid

CHANCE = np.random.default_rng(0)


def test_platt_is_logistic_regression_on_the_logit() -> None:
    p = CHANCE.beta(2, 5, 3000)
    y = (CHANCE.random(3000) < sigmoid(0.5 * logit(p) - 1)).astype(int)
    found = PlattScaling.fit(p, y)
    other = LogisticRegression(C=1e6).fit(logit(p)[:, None], y)
    assert found.slope == pytest.approx(other.coef_[0, 0], abs=0.01)
    assert found.shift == pytest.approx(other.intercept_[0], abs=0.02)
    assert found(p).mean() == pytest.approx(y.mean(), abs=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=40))
def test_isotonic_is_scikit_learns(rows: list[tuple[int, int, int]]) -> None:
    p, y, w = (np.array(one, dtype=float) for one in zip(*rows, strict=True))
    own = IsotonicCalibration.fit(p / 20, y, w)(p / 20)
    other = IsotonicRegression(out_of_bounds="clip").fit(p / 20, y, sample_weight=w).predict(p / 20)
    np.testing.assert_allclose(own, other, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.001, 0.999), st.floats(0.01, 1.0))
def test_the_prior_correction_undoes_sampling(p: float, kept: float) -> None:
    sampled = p / (p + (1 - p) * kept)  # what a model learns from rows with a share of the negatives
    correction = PriorCorrection.of_sampling(kept)
    assert correction([sampled])[0] == pytest.approx(p, rel=1e-9)
    assert sigmoid(logit(sampled) + correction.shift) == pytest.approx(p, rel=1e-5)


def test_a_blend_leaves_out_what_harms_and_finds_what_is_right() -> None:
    truth = CHANCE.normal(size=4000)
    y = (CHANCE.random(4000) < sigmoid(truth - 2)).astype(float)
    logits = np.column_stack([truth - 2 + CHANCE.normal(size=4000) * 0.3, CHANCE.normal(size=4000), -truth])
    weights, shift = fit_blend(logits, y)
    assert (weights >= 0).all()
    assert weights[0] > 0.7
    assert weights[2] == 0
    assert sigmoid(logits @ weights + shift).mean() == pytest.approx(y.mean(), abs=1e-3)


def test_a_blend_of_separated_classes_stays_finite() -> None:
    weights, shift = fit_blend(np.array([[-9.0], [9.0]] * 20), [0, 1] * 20)
    assert np.isfinite([*weights, shift]).all()


def test_refuses_what_is_no_predictions() -> None:
    with pytest.raises(DataError, match="one entry per row"):
        PlattScaling.fit([0.5, 0.5], [1])
    with pytest.raises(DataError, match="one entry per row"):
        IsotonicCalibration.fit([], [])
    with pytest.raises(ConfigError, match="fraction of negatives"):
        PriorCorrection.of_sampling(0)
