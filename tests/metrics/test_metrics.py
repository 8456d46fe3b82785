import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from viviane.core.errors import ConfigError, NumericsError
from viviane.metrics import METRICS, CalibrationHistogram, build_metric, roc_auc

# few distinct scores, so that ties are common; -0.0 equals 0.0 and must tie with it
SCORES = st.sampled_from([-1.5, -0.0, 0.0, 1e-30, 0.1, 0.25, 0.3, 0.9999999, 1.0, 3.0])
ROWS = st.lists(st.tuples(SCORES, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 7.0])), max_size=60)


def columns(rows):
    if not rows:
        return [np.zeros(0, np.float32)] * 3
    return (
        [np.array(column, np.float32) for column in zip(*rows, strict=True)] if rows else [np.zeros(0, np.float32)] * 3
    )


@given(ROWS)
def test_auc_equals_its_definition_over_all_pairs(rows):
    scores, labels, weights = columns(rows)
    for w in (None, weights):
        use = np.ones(len(scores)) if w is None else w.astype(np.float64)
        above = (scores[:, None] > scores[None, :]) + 0.5 * (scores[:, None] == scores[None, :])
        pairs = (use * labels)[:, None] * (use * (1 - labels))[None, :]
        value = roc_auc(scores, labels, w)
        if pairs.sum() == 0:
            assert math.isnan(value)
        else:
            # sums of at most 3600 products in float64
            assert value == pytest.approx((above * pairs).sum() / pairs.sum(), rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_auc_equals_sklearn_on_many_rows(weighted):
    generator = np.random.default_rng(0)
    scores = generator.random(200_000, np.float32).round(4)
    labels = (generator.random(200_000) < scores).astype(np.float32)
    weights = generator.random(200_000).astype(np.float32) if weighted else None
    # both add in float64, in another order
    assert roc_auc(scores, labels, weights) == pytest.approx(
        roc_auc_score(labels, scores, sample_weight=weights), rel=1e-11
    )


def test_auc_of_one_class_is_nan_and_says_why(caplog):
    metric = build_metric("auc")
    metric.update(torch.tensor([0.1, 0.2]), torch.ones(2))
    with caplog.at_level(logging.WARNING, "viviane"):
        assert math.isnan(metric.compute())
    assert "all 2 labels are 1" in caplog.text


def test_auc_of_nothing_is_nan():
    assert math.isnan(build_metric("auc").compute())


def test_a_prediction_that_is_not_finite_names_its_row():
    with pytest.raises(NumericsError, match=r"is not finite[\s\S]*row 1"):
        roc_auc(np.float32([0.1, np.nan]), np.float32([0, 1]))


@pytest.mark.parametrize("name", sorted(set(METRICS) - {"average_loss", "gauc", "mrr"}))
def test_uneven_batches_equal_one_batch_and_reset_forgets(name):
    generator = torch.Generator().manual_seed(1)
    p, y, w = torch.rand(1000, generator=generator), torch.rand(1000, generator=generator).round(), torch.rand(1000)
    if name == "rauc":
        w = torch.ones(1000)  # it counts pairs, and refuses other weights
    whole, parts = build_metric(name), build_metric(name)
    parts.update(1 - p, y, w)
    parts.reset()
    whole.update(p, y, w)
    for piece in torch.arange(1000).split(333):
        parts.update(p[piece], y[piece], w[piece])
    # float64 sums in another order
    assert parts.compute() == pytest.approx(whole.compute(), rel=1e-12)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_nothing_fed_is_nan(name):
    assert math.isnan(build_metric(name).compute())


def test_a_buffer_that_is_reused_after_update_does_not_change_the_metric():
    metric, buffer = build_metric("auc"), torch.tensor([0.1, 0.9])
    metric.update(buffer, torch.tensor([0.0, 1.0]))
    buffer.copy_(torch.tensor([0.9, 0.1]))
    assert metric.compute() == 1.0


def test_log_loss_equals_sklearn_and_clips_certainty():
    generator = np.random.default_rng(2)
    p, y = generator.random(500), generator.integers(0, 2, 500)
    metric = build_metric("log_loss")
    metric.update(torch.tensor(p), torch.tensor(y))
    assert metric.compute() == pytest.approx(log_loss(y, p), rel=1e-12)
    metric.reset()
    metric.update(torch.tensor([1.0]), torch.tensor([0.0]))
    assert metric.compute() == pytest.approx(-math.log(1e-7), rel=1e-7)


def test_ratios_by_hand():
    p, y, w = torch.tensor([0.2, 0.6, 0.5]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])
    expected = {"accuracy": 2 / 4, "calibration": 1.9 / 1.0, "mean_squared_error": (0.04 + 2 * 0.36 + 0.25) / 4}
    for name, value in expected.items():
        metric = build_metric(name)
        metric.update(p, y, w)
        assert metric.compute() == pytest.approx(value, rel=1e-6)  # 0.2 and 0.6 are rounded to float32


def test_the_direction_of_better():
    assert {name: METRICS[name].higher_is_better for name in METRICS} == {
        "auc": True,
        "log_loss": False,
        "accuracy": True,
        "calibration": None,
        "mean_squared_error": False,
        "root_mean_squared_error": False,
        "mean_absolute_error": False,
        "smape": False,
        "average_loss": False,
        "normalized_entropy": False,
        "hit_rate": True,
        "ndcg": True,
        "mrr": True,
        "gauc": True,
        "auprc": True,
        "rauc": True,
    }


def test_an_unknown_metric_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'log_loss'"):
        build_metric("logloss")


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0])), max_size=200), st.integers(1, 30))
def test_the_histogram_loses_no_row(rows, num_bins):
    histogram = CalibrationHistogram(num_bins)
    for p, y in rows:
        histogram.update(torch.tensor([p]), torch.tensor([y]))
    bins = histogram.compute()
    assert sum(one.count for one in bins) == len(rows)
    assert sum(one.count * one.mean_label for one in bins) == pytest.approx(sum(y for _, y in rows))
    assert [one.mean_prediction for one in bins] == sorted(one.mean_prediction for one in bins)
