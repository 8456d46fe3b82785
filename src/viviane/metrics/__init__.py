"""Metrics over a whole evaluation: exact AUC, log loss, errors, calibration, and ranking by group."""

from viviane.metrics.auc import Auc, roc_auc
from viviane.metrics.errors import MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError, Smape
from viviane.metrics.means import (
    Accuracy,
    AverageLoss,
    Calibration,
    CalibrationHistogram,
    HistogramBin,
    HitRate,
    LogLoss,
    NormalizedEntropy,
)
from viviane.metrics.pairs import Auprc, MulticlassRecall, Rauc, SegmentedNormalizedEntropy
from viviane.metrics.ranking import Gauc, GroupHitRate, GroupNdcg, Mrr, Ndcg, ndcg
from viviane.metrics.registry import METRICS, Metric, MetricName, build_metric
from viviane.metrics.score_curve import ScoreCurve

__all__ = [
    "METRICS",
    "Accuracy",
    "Auc",
    "Auprc",
    "AverageLoss",
    "Calibration",
    "CalibrationHistogram",
    "Gauc",
    "GroupHitRate",
    "GroupNdcg",
    "HistogramBin",
    "HitRate",
    "LogLoss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "MetricName",
    "Mrr",
    "MulticlassRecall",
    "Ndcg",
    "NormalizedEntropy",
    "Rauc",
    "RootMeanSquaredError",
    "ScoreCurve",
    "SegmentedNormalizedEntropy",
    "Smape",
    "build_metric",
    "ndcg",
    "roc_auc",
]
