"""Average precision, ordered pairs, entropy by segment and recall of classes against plain definitions."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, recall_score

from viviane.core.errors import ConfigError, DataError
from viviane.metrics import MulticlassRecall, SegmentedNormalizedEntropy, build_metric

SCORES = st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9, 1.0])


def fed(name, p, y, w=None, parts=2, **more):
    metric = build_metric(name)
    for rows in np.array_split(np.arange(len(p)), parts):
        weight = None if w is None else torch.tensor(np.float32(w))[rows]
        groups = {"groups": torch.tensor(more["groups"])[rows]} if more else {}
        metric.update(torch.tensor(np.float32(p))[rows], torch.tensor(np.float32(y))[rows], weight, **groups)
    return metric.compute()


@given(st.lists(st.tuples(SCORES, st.sampled_from([0.0, 1.0]), st.sampled_from([0.5, 1.0, 2.0])), min_size=1))
def test_auprc_is_scikit_learns_average_precision(rows):
    p, y, w = np.array(rows).T
    if not y.any():
        assert math.isnan(fed("auprc", p, y))
        return
    assert fed("auprc", p, y) == pytest.approx(average_precision_score(y, np.float32(p)))
    assert fed("auprc", p, y, w) == pytest.approx(average_precision_score(y, np.float32(p), sample_weight=w))


@given(st.lists(st.tuples(SCORES, st.sampled_from([0.0, 1.0, 2.5, 7.0])), min_size=1, max_size=40))
def test_rauc_counts_pairs(rows):
    right = total = 0.0
    for (p, y), (q, z) in combinations(rows, 2):
        if y != z:
            total += 1
            right += 0.5 if p == q else float((p < q) == (y < z))
    value = fed("rauc", *np.array(rows).T)
    assert math.isnan(value) if not total else value == pytest.approx(right / total)


def test_rauc_of_two_labels_is_the_auc():
    chance = np.random.default_rng(0)
    p = chance.random(5000).round(2)
    y = (chance.random(5000) < p).astype(float)
    assert fed("rauc", p, y) == pytest.approx(fed("auc", p, y), abs=1e-12)


def test_rauc_refuses_weights():
    with pytest.raises(ConfigError, match="no weights"):
        fed("rauc", [0.1, 0.2], [0.0, 1.0], [1.0, 2.0])


def test_entropy_by_segment():
    chance = np.random.default_rng(1)
    groups = chance.integers(3, 6, 300)
    p, y = chance.uniform(0.1, 0.9, 300), chance.integers(0, 2, 300)
    y[groups == 5] = 1  # undefined there: left out
    expected = {}
    for one in (3, 4):
        rate = y[groups == one].mean()
        base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        expected[one] = log_loss(y[groups == one], p[groups == one]) / base
    sizes = {one: (groups == one).sum() for one in expected}
    mean = sum(expected[one] * sizes[one] for one in expected) / sum(sizes.values())
    assert fed("normalized_entropy:country", p, y, groups=groups) == pytest.approx(mean, rel=1e-5)
    metric = SegmentedNormalizedEntropy()
    metric.update(torch.tensor(p), torch.tensor(y), groups=torch.tensor(groups))
    found = metric.segments()
    assert math.isnan(found.pop(5))
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="remove the number"):
        build_metric("normalized_entropy@5:country")


def test_no_row_is_nan():
    for name in ("auprc", "rauc", "normalized_entropy:country"):
        assert math.isnan(build_metric(name).compute())
    assert math.isnan(MulticlassRecall(2).compute())
    assert SegmentedNormalizedEntropy().segments() == {}


def test_recall_of_classes_is_scikit_learns():
    chance = np.random.default_rng(2)
    scores, y, w = chance.random((200, 4)), chance.integers(0, 4, 200), chance.random(200)
    metric = MulticlassRecall(4)
    for rows in np.array_split(np.arange(200), 3):
        metric.update(torch.tensor(scores[rows]), torch.tensor(y[rows]), torch.tensor(w[rows]))
    each = recall_score(y, scores.argmax(1), average=None, sample_weight=w)
    assert metric.by_class() == pytest.approx(each)
    assert metric.compute() == pytest.approx(each.mean())
    every = MulticlassRecall(4, k=4)
    every.update(torch.tensor(scores), torch.tensor(y))
    assert every.compute() == 1


def test_wrong_classes_are_refused():
    with pytest.raises(DataError, match="out of range"):
        MulticlassRecall(2).update(torch.zeros(1, 2), torch.tensor([2]))
    with pytest.raises(DataError, match="one column per class"):
        MulticlassRecall(2).update(torch.zeros(1, 3), torch.tensor([0]))
    with pytest.raises(ConfigError, match="recall"):
        MulticlassRecall(2, k=3)
