"""Embedding tables: settings, the collection that holds and trains them, and its output."""

from viviane.embedding.base import TableCollection
from viviane.embedding.cache_sizes import CacheSettings
from viviane.embedding.cached_storage import CachedStorage
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
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import (
    CountAdmission,
    DynamicOptions,
    DynamicTableConfig,
    FilterAdmission,
    ProbabilityAdmission,
)
from viviane.embedding.dynamic_storage import DynamicStorage
from viviane.embedding.embedding_bag import EmbeddingBag
from viviane.embedding.keys import hash_keys
from viviane.embedding.output import EmbeddingOutput
from viviane.embedding.row_mean import RowMean
from viviane.embedding.state import TableState, TableSummary
from viviane.embedding.storage import Storage
from viviane.embedding.table_storage import TableStorage

__all__ = [
    "CacheSettings",
    "CachedStorage",
    "ConstantInit",
    "CountAdmission",
    "DynamicOptions",
    "DynamicStorage",
    "DynamicTable",
    "DynamicTableConfig",
    "EmbeddingBag",
    "EmbeddingCollection",
    "EmbeddingOutput",
    "FeatureConfig",
    "FilterAdmission",
    "NormalInit",
    "ProbabilityAdmission",
    "RowMean",
    "Storage",
    "TableCollection",
    "TableConfig",
    "TableState",
    "TableStorage",
    "TableSummary",
    "UniformInit",
    "XavierInit",
    "ZeroInit",
    "hash_keys",
]
