"""Errors, entropy and ranking metrics against scikit-learn, hand values, and loops over all orders of ties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    ndcg_score,
    precision_score,
    roc_auc_score,
)

from viviane.core.errors import ConfigError, NumericsError
from viviane.metrics import MetricName, build_metric, ndcg, roc_auc

GROUPED_NAMES = ["gauc:g", "mrr:g", "mrr@2:g", "ndcg:g", "ndcg@3:g", "hit_rate@2:g"]
ROWS = st.lists(
    st.tuples(st.sampled_from([3, 4, 2**40]), st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from([0.0, 1.0])),
    max_size=20,
)


def fed(name, p, y, weight=None, groups=None):
    metric = build_metric(name)
    more = {} if groups is None else {"groups": torch.tensor(groups)}
    metric.update(torch.tensor(p), torch.tensor(y), None if weight is None else torch.tensor(weight), **more)
    return metric.compute()


def random_rows(count=1000, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random(count), rng.integers(0, 2, count).astype(float), rng.random(count)


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_equal_sklearn(weighted):
    p, y, w = random_rows()
    w = w if weighted else None
    # all in float64, added in another order
    near = {"rel": 1e-12}
    assert fed("mean_absolute_error", p, y, w) == pytest.approx(mean_absolute_error(y, p, sample_weight=w), **near)
    mse = mean_squared_error(y, p, sample_weight=w)
    assert fed("root_mean_squared_error", p, y, w) == pytest.approx(math.sqrt(mse), **near)
    assert fed("hit_rate", p, y, w) == pytest.approx(precision_score(y, p > 0.8, sample_weight=w), **near)
    rate = np.full(len(y), np.average(y, weights=w))
    expected = log_loss(y, p, sample_weight=w) / log_loss(y, rate, sample_weight=w)
    assert fed("normalized_entropy", p, y, w) == pytest.approx(expected, **near)


def test_hugectr_s_metrics_by_hand():
    assert fed("smape", [0.5, 0.0, 0.25], [1.0, 0.0, 0.0]) == pytest.approx((0.5 / 0.75 + 0 + 2) / 3)
    assert fed("hit_rate", [0.79, 0.81, 0.9, 0.95], [1.0, 1.0, 0.0, 1.0]) == pytest.approx(2 / 3)
    assert math.isnan(fed("hit_rate", [0.1], [1.0]))
    dcg, ideal = 1 / math.log2(2) + 1 / math.log2(4), 1 / math.log2(2) + 1 / math.log2(3)
    assert fed("ndcg", [0.9, 0.5, 0.1], [1.0, 0.0, 1.0]) == pytest.approx(dcg / ideal, rel=1e-12)
    average = build_metric("average_loss")
    for loss in (0.5, 0.1, 0.3):
        average.update_loss(torch.tensor(loss))
    assert average.compute() == pytest.approx(0.3, rel=1e-6)  # the losses are float32


def test_normalized_entropy_of_one_class_is_nan():
    assert math.isnan(fed("normalized_entropy", [0.4, 0.6], [1.0, 1.0]))


@pytest.mark.parametrize("k", [None, 1, 5, 100])
def test_ndcg_equals_sklearn_ties_and_graded_labels_included(k):
    rng = np.random.default_rng(3)
    scores = rng.choice(np.float32([0.1, 0.2, 0.3, 0.5]), (20, 9))
    labels = rng.integers(0, 4, (20, 9)).astype(np.float32)
    labels[:, 0] = 1.0  # every group has an ideal
    groups = np.repeat(np.arange(20) * 7, 9)
    order = rng.permutation(180)
    value = ndcg(groups[order], scores.ravel()[order], labels.ravel()[order], k)
    assert value == pytest.approx(ndcg_score(labels, scores, k=k), rel=1e-12)


def loops(name, rows):
    """The definition, group by group."""
    parsed = MetricName.parse(name)
    values, sizes = [], []
    for group in sorted({g for g, _, _ in rows}):
        mine = [(p, y) for g, p, y in rows if g == group]
        p, y = np.float32([a for a, _ in mine]), np.float32([b for _, b in mine])
        if parsed.base == "gauc":
            if 0 < y.sum() < len(y):
                values.append(roc_auc_score(y, p))
                sizes.append(len(y))
            continue
        if y.sum() == 0:
            continue
        sizes.append(1)
        if parsed.base == "ndcg":
            values.append(ndcg_score([y], [p], k=parsed.k) if len(y) > 1 else 1.0)
            continue
        # the worst order of ties: every negative of the same score stands before the positive
        rank = min(1 + sum((p > s) | ((p == s) & (y == 0))) for s in p[y == 1])
        k = parsed.k or len(y)
        values.append((1.0 if parsed.base == "hit_rate" else 1 / rank) if rank <= k else 0.0)
    return float(np.average(values, weights=sizes)) if values else math.nan


@pytest.mark.parametrize("name", GROUPED_NAMES)
@given(rows=ROWS)
def test_metrics_by_group_equal_their_definitions(name, rows):
    metric = build_metric(name)
    for row in rows:  # each row a batch of its own: groups are spread over batches
        g, p, y = (torch.tensor([one]) for one in row)
        metric.update(p, y, groups=g)
    assert metric.compute() == pytest.approx(loops(name, rows), rel=1e-12, nan_ok=True)


def test_ties_in_ndcg_are_the_mean_over_all_orders():
    labels = [1.0, 0.0, 0.0, 2.0]
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    orders = list(itertools.permutations(labels))
    mean = np.mean([sum(y / math.log2(r + 2) for r, y in enumerate(one)) for one in orders])
    assert fed("ndcg", [0.5] * 4, labels) == pytest.approx(mean / ideal, rel=1e-12)


def test_gauc_takes_sample_weights():
    p, y, w = [0.1, 0.4, 0.35, 0.8, 0.5], [0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 2.0, 3.0, 1.0, 0.5]
    groups = [5, 5, 5, 6, 6]
    a = roc_auc(np.float32(p[:3]), np.float32(y[:3]), np.float32(w[:3]))
    assert fed("gauc:g", p, y, w, groups) == pytest.approx((6 * a + 1.5 * 1.0) / 7.5, rel=1e-12)


def test_a_hundred_thousand_rows_of_one_group():
    rng = np.random.default_rng(0)
    p, y = rng.random(100_000).astype(np.float32), rng.integers(0, 2, 100_000).astype(np.float32)
    assert fed("gauc:g", p, y, groups=np.zeros(100_000, np.int64)) == pytest.approx(roc_auc(p, y), rel=1e-12)


@pytest.mark.parametrize("name", GROUPED_NAMES)
def test_nothing_no_positive_and_reset(name):
    metric = build_metric(name)
    assert math.isnan(metric.compute())
    metric.update(torch.zeros(0), torch.zeros(0), groups=torch.zeros(0, dtype=torch.int64))
    assert math.isnan(metric.compute())
    metric.update(torch.tensor([0.5, 0.6]), torch.zeros(2), groups=torch.tensor([1, 1]))
    assert math.isnan(metric.compute())
    metric.reset()
    metric.update(torch.tensor([0.5, 0.6]), torch.tensor([0.0, 1.0]), groups=torch.tensor([1, 1]))
    assert metric.compute() == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("auc:user", "does not support groups[\\s\\S]*gauc"),
        ("ndgc@5:user", "unknown metric by group[\\s\\S]*did you mean 'ndcg'"),
        ("ndcg@x:user", "not a valid metric name"),
        ("ndcg@0:user", "not a valid metric name"),
        ("ndcg:", "not a valid metric name"),
        ("hit_rate:user", "needs a number of rows"),
        ("gauc@3:user", "uses complete groups"),
    ],
)
def test_names_that_say_too_much_or_too_little(name, words):
    with pytest.raises(ConfigError, match=words):
        build_metric(name)


def test_a_metric_by_group_needs_groups_and_finite_scores():
    metric = build_metric("gauc:user")
    with pytest.raises(ConfigError, match="groups="):
        metric.update(torch.zeros(2), torch.zeros(2))
    metric.update(torch.tensor([float("nan")]), torch.zeros(1), groups=torch.tensor([1]))
    with pytest.raises(NumericsError, match="row 0"):
        metric.compute()
