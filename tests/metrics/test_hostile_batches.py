"""Metrics of batches of which only some carry weights, and of predictions that are no numbers."""

import math

import numpy as np
import pytest
import torch

from viviane.core.errors import NumericsError
from viviane.metrics import build_metric
from viviane.metrics.auc import roc_auc
from viviane.metrics.means import CalibrationHistogram

P = torch.tensor([0.1, 0.8, 0.4, 0.6, 0.3, 0.9])
Y = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
W = torch.tensor([2.0, 0.5])
GROUPS = torch.tensor([3, 3, 3, 3, 4, 4])
FED = [(slice(0, 2), W), (slice(2, 4), None), (slice(4, 6), None)]
RATIOS = ["accuracy", "log_loss", "calibration", "hit_rate", "mean_squared_error", "mean_absolute_error", "smape"]


@pytest.mark.parametrize("fed", [FED, FED[::-1], [FED[1], FED[0], FED[2]]])
@pytest.mark.parametrize("name", ["auc", "gauc:user", *RATIOS])
def test_a_batch_without_weights_counts_one_for_each_row(name, fed):
    some, every = build_metric(name), build_metric(name)
    for rows, weight in fed:
        groups = {"groups": GROUPS[rows]} if ":" in name else {}
        some.update(P[rows], Y[rows], weight, **groups)
        every.update(P[rows], Y[rows], torch.ones(2) if weight is None else weight, **groups)
    assert some.compute() == pytest.approx(every.compute(), nan_ok=True)


def test_auc_of_partly_weighted_batches():
    auc = build_metric("auc")
    for rows, weight in FED:
        auc.update(P[rows], Y[rows], weight)
    weights = np.concatenate([W.numpy(), np.ones(4, np.float32)])
    assert auc.compute() == roc_auc(P.numpy(), Y.numpy(), weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["auc", *RATIOS, "root_mean_squared_error", "normalized_entropy"])
def test_predictions_that_are_no_numbers_are_refused(name, bad):
    metric = build_metric(name)
    metric.update(P, Y)
    metric.update(torch.tensor([0.5, bad]), torch.tensor([0.0, 1.0]))
    with pytest.raises(NumericsError, match="is not finite"):
        metric.compute()
    metric.reset()
    metric.update(P, Y)
    assert math.isfinite(metric.compute())


@pytest.mark.parametrize("name", RATIOS)
def test_labels_that_are_no_numbers_are_refused(name):
    metric = build_metric(name)
    metric.update(torch.tensor([0.5, 0.9]), torch.tensor([0.0, math.nan]))
    with pytest.raises(NumericsError, match="is not finite"):
        metric.compute()


def test_a_histogram_has_no_bin_for_what_is_no_number():
    with pytest.raises(NumericsError, match="is not finite"):
        CalibrationHistogram().update(torch.tensor([math.nan]), torch.tensor([1.0]))
