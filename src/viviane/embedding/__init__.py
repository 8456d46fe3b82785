"""Embedding tables: settings, the collection that holds and trains them, and its output."""

from viviane.embedding.collection import EmbeddingCollection
from viviane.embedding.config import (
    ConstantInit,
    FeatureConfig,
    NormalInit,
    TableConfig,
    UniformInit,
    XavierInit,
    ZeroInit,
)
from viviane.embedding.keys import hash_keys
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.state import TableState, TableSummary

__all__ = [
    "ConstantInit",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "FeatureConfig",
    "NormalInit",
    "TableConfig",
    "TableState",
    "TableSummary",
    "UniformInit",
    "XavierInit",
    "ZeroInit",
    "hash_keys",
]
