"""Viviane: train and serve large deep-learning recommenders in Python.

    import viviane as vv

    data = vv.Dataset("criteo/train")
    model = vv.Model(vv.Solver(batch_size=16384, lr=1e-3), data)
    model.add(vv.zoo.DCNv2(dim=16))
    model.compile(optimizer=vv.Adam(), metrics=["auc"])
    model.fit(data, validation=vv.Dataset("criteo/valid"))

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from viviane.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from viviane import export, nn, optim, retrieval, zoo
    from viviane.batch import Bag, Batch
    from viviane.config import Solver
    from viviane.config.optimizers import (
        SGD,
        Adadelta,
        AdaGrad,
        Adam,
        Adamax,
        AdamW,
        Ftrl,
        Lamb,
        RMSProp,
        RowWiseAdam,
    )  # fmt: skip
    from viviane.core.errors import VivianeError
    from viviane.data import DataPass, DataPasses, Dataset, write_dataset
    from viviane.embedding import EmbeddingBag, EmbeddingCollection, FeatureConfig, TableConfig
    from viviane.model import DenseLayer, Input, Model, SparseEmbedding
    from viviane.retrieval import Recommender
    from viviane.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema
    from viviane.serving import InferenceSession, ModelRepository
    from viviane.serving.server.python_server import Server
    from viviane.sklearn import CTRClassifier, CTRMultiTaskClassifier, CTRRanker
    from viviane.training import Callback, History, Trainer

    __version__: str

__all__ = [
    "SGD",
    "AdaGrad",
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
    "Bag",
    "Batch",
    "CTRClassifier",
    "CTRMultiTaskClassifier",
    "CTRRanker",
    "Callback",
    "CategoricalColumn",
    "DataPass",
    "DataPasses",
    "Dataset",
    "DenseColumn",
    "DenseLayer",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FeatureConfig",
    "Ftrl",
    "History",
    "InferenceSession",
    "Input",
    "LabelColumn",
    "Lamb",
    "Model",
    "ModelRepository",
    "RMSProp",
    "Recommender",
    "RowWiseAdam",
    "Schema",
    "Server",
    "Solver",
    "SparseEmbedding",
    "TableConfig",
    "Trainer",
    "VivianeError",
    "export",
    "nn",
    "optim",
    "retrieval",
    "write_dataset",
    "zoo",
]

_HOMES: Final = {
    "viviane.batch": ("Bag", "Batch"),
    "viviane.config": ("Solver",),
    "viviane.config.optimizers": (
        "SGD",
        "AdaGrad",
        "Adadelta",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lamb",
        "RMSProp",
        "RowWiseAdam",
    ),
    "viviane.core.errors": ("VivianeError",),
    "viviane.data": ("DataPass", "DataPasses", "Dataset", "write_dataset"),
    "viviane.embedding": ("EmbeddingBag", "EmbeddingCollection", "FeatureConfig", "TableConfig"),
    "viviane.model": ("DenseLayer", "Input", "Model", "SparseEmbedding"),
    "viviane.retrieval": ("Recommender",),
    "viviane.schema": ("CategoricalColumn", "DenseColumn", "LabelColumn", "Schema"),
    "viviane.serving": ("InferenceSession", "ModelRepository"),
    "viviane.serving.server.python_server": ("Server",),
    "viviane.sklearn": ("CTRClassifier", "CTRMultiTaskClassifier", "CTRRanker"),
    "viviane.training": ("Callback", "History", "Trainer"),
}
_from_modules, _ = lazy_names(__name__, _HOMES)
_PACKAGES: Final = frozenset({"export", "nn", "optim", "retrieval", "zoo"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes longer to import than the rest of this file

        return version("viviane")
    if name in _PACKAGES:
        return importlib.import_module(f"viviane.{name}")
    return _from_modules(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
