"""Recommendations from a complete catalogue: candidates of several sources, ranked by a second model."""

from viviane.retrieval.candidates import Candidates, CandidateSource
from viviane.retrieval.early_stopping import CatalogueEvaluation, catalogue_metrics
from viviane.retrieval.evaluation import CatalogueMetrics, evaluate_vectors
from viviane.retrieval.faiss_index import IndexSettings
from viviane.retrieval.histories import Histories, leave_one_out
from viviane.retrieval.index import ItemIndex
from viviane.retrieval.item_knn import ItemKNN, ItemKNNSettings
from viviane.retrieval.popularity import Popularity
from viviane.retrieval.ranking import Ranker
from viviane.retrieval.recommender import Recommendations, Recommender
from viviane.retrieval.two_stage import TwoStage, TwoStageSettings, fit_two_stage, ranking_schema
from viviane.retrieval.vector_source import VectorSource, build_index, index_folder, model_version

__all__ = [
    "CandidateSource",
    "Candidates",
    "CatalogueEvaluation",
    "CatalogueMetrics",
    "Histories",
    "IndexSettings",
    "ItemIndex",
    "ItemKNN",
    "ItemKNNSettings",
    "Popularity",
    "Ranker",
    "Recommendations",
    "Recommender",
    "TwoStage",
    "TwoStageSettings",
    "VectorSource",
    "build_index",
    "catalogue_metrics",
    "evaluate_vectors",
    "fit_two_stage",
    "index_folder",
    "leave_one_out",
    "model_version",
    "ranking_schema",
]
