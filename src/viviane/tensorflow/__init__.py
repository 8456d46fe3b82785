"""The API of NVIDIA's Sparse Operation Kit on Viviane's tables, for TensorFlow 2.

import viviane.tensorflow as sok
"""

from __future__ import annotations

from viviane.core.optional import import_triton_first
from viviane.tensorflow.files import dump, load
from viviane.tensorflow.legacy import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    Init,
    OptimizerScope,
    Saver,
    get_embedding,
    optimizers,
    split_embedding_variable_from_others,
    tf,
)
from viviane.tensorflow.lookup import all2all_dense_embedding, lookup_sparse, sparse_read_and_evict
from viviane.tensorflow.optimizer import SGD, OptimizerWrapper
from viviane.tensorflow.processes import init, num_gpus, rank, set_comm_tool, size
from viviane.tensorflow.run import run_script
from viviane.tensorflow.variables import (
    DistributedVariable,
    DynamicVariable,
    LocalizedVariable,
    Variable,
    assign,
    export,
    filter_variables,
    incremental_model_dump,
)

import_triton_first()  # TensorFlow is imported at first use

__all__ = [
    "SGD",
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DistributedVariable",
    "DynamicVariable",
    "Init",
    "LocalizedVariable",
    "OptimizerScope",
    "OptimizerWrapper",
    "Saver",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "get_embedding",
    "incremental_model_dump",
    "init",
    "load",
    "lookup_sparse",
    "num_gpus",
    "optimizers",
    "rank",
    "run_script",
    "set_comm_tool",
    "size",
    "sparse_read_and_evict",
    "split_embedding_variable_from_others",
    "tf",
]
