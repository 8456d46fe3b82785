"""Viviane's embedding tables as Keras 3 layers, on the torch, JAX and TensorFlow backends."""

from __future__ import annotations

from viviane.keras.start import load_keras

load_keras()


from viviane.keras.checkpoints import load_tables, save_tables  # noqa: E402
from viviane.keras.data import batches  # noqa: E402
from viviane.keras.distributed import DistributedEmbedding  # noqa: E402
from viviane.keras.embedding import Embedding, EmbeddingBag  # noqa: E402
from viviane.keras.fit import FastTrainer, fit  # noqa: E402
from viviane.keras.layer import follow_optimizer, table_layers  # noqa: E402
from viviane.keras.stock import stock_model  # noqa: E402

__all__ = [
    "DistributedEmbedding",
    "Embedding",
    "EmbeddingBag",
    "FastTrainer",
    "batches",
    "fit",
    "follow_optimizer",
    "load_tables",
    "save_tables",
    "stock_model",
    "table_layers",
]
