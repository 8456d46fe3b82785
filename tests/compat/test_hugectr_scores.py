"""Metrics and schedules against plain counting."""

import numpy as np
import pytest

from viviane.compat.hugectr.scores import auc, hit_rate, ndcg, smape
from viviane.compat.hugectr.solver import LearningRateScheduler


@pytest.mark.parametrize("soft", [False, True])
def test_auc_counts_pairs_and_ties_half(soft: bool) -> None:
    random = np.random.default_rng(3)
    scores = random.integers(0, 7, 60) / 7
    labels = random.random(60) if soft else random.integers(0, 2, 60).astype(float)
    won = total = 0.0
    for i in range(60):
        for j in range(60):
            weight = labels[i] * (1 - labels[j])
            total += weight
            won += weight * ((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]))
    # sums of 3600 numbers near 1: rounding stays below 1e-12
    assert auc(scores, labels) == pytest.approx(won / total, abs=1e-12)


def test_metrics_without_rows_to_count_are_nan() -> None:
    ones = np.ones(3)
    assert np.isnan(auc(ones, ones))
    assert np.isnan(hit_rate(0.5 * ones, ones))
    assert np.isnan(ndcg(ones, 0 * ones))
    assert smape(ones, ones) == 0.0


def test_the_schedule_by_hand() -> None:
    schedule = LearningRateScheduler(2.0, 2, 4, 2, 2.0, 0.0)
    assert [schedule.get_next() for _ in range(7)] == [1.0, 2.0, 2.0, 2.0, 0.5, 0.0, 0.0]
