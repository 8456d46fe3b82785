"""Metrics over a whole evaluation: exact AUC, log loss, accuracy, calibration."""

from viviane.metrics.auc import Auc, roc_auc
from viviane.metrics.means import (
    Accuracy,
    Calibration,
    CalibrationHistogram,
    HistogramBin,
    LogLoss,
    MeanSquaredError,
)
from viviane.metrics.registry import METRICS, Metric, build_metric

__all__ = [
    "METRICS",
    "Accuracy",
    "Auc",
    "Calibration",
    "CalibrationHistogram",
    "HistogramBin",
    "LogLoss",
    "MeanSquaredError",
    "Metric",
    "build_metric",
    "roc_auc",
]
