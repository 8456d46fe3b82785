"""Recommending from a whole catalogue: candidates by nearest neighbours and other sources, ranked by a second model."""

from viviane.retrieval.candidates import Candidates, CandidateSource
from viviane.retrieval.early_stopping import CatalogueEvaluation, catalogue_metrics
from viviane.retrieval.evaluation import CatalogueMetrics, evaluate_vectors
from viviane.retrieval.histories import Histories, leave_one_out
from viviane.retrieval.item_knn import ItemKNN, ItemKNNSettings
from viviane.retrieval.popularity import Popularity

__all__ = [
    "CandidateSource",
    "Candidates",
    "CatalogueEvaluation",
    "CatalogueMetrics",
    "Histories",
    "ItemKNN",
    "ItemKNNSettings",
    "Popularity",
    "catalogue_metrics",
    "evaluate_vectors",
    "leave_one_out",
]
