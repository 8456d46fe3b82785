"""Answer requests with saved models: sessions, and several models and versions in one process."""

from viviane.serving.columns import ColumnSpec
from viviane.serving.errors import ModelNotFoundError, RowProblem, RowsError, SessionClosedError
from viviane.serving.repository import ModelRepository, ModelStatus
from viviane.serving.session import InferenceSession, PartialPrediction
from viviane.serving.settings import ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.statistics import LatencyHistogram, SessionStatistics

__all__ = [
    "ColumnSpec",
    "InferenceSession",
    "LatencyHistogram",
    "ModelEntry",
    "ModelNotFoundError",
    "ModelRepository",
    "ModelStatus",
    "PartialPrediction",
    "RepositorySettings",
    "RowProblem",
    "RowsError",
    "SessionClosedError",
    "SessionSettings",
    "SessionStatistics",
]
