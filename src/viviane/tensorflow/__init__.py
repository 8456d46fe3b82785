"""The API of NVIDIA's Sparse Operation Kit on Viviane's tables, for TensorFlow 2.

import viviane.tensorflow as sok
"""

from __future__ import annotations

from viviane.tensorflow.files import dump, load
from viviane.tensorflow.lookup import all2all_dense_embedding, lookup_sparse
from viviane.tensorflow.optimizer import SGD, OptimizerWrapper
from viviane.tensorflow.processes import init, num_gpus, rank, set_comm_tool, size
from viviane.tensorflow.run import run_script
from viviane.tensorflow.variables import (
    DynamicVariable,
    Variable,
    assign,
    export,
    filter_variables,
    incremental_model_dump,
)

__all__ = [
    "SGD",
    "DynamicVariable",
    "OptimizerWrapper",
    "Variable",
    "all2all_dense_embedding",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "incremental_model_dump",
    "init",
    "load",
    "lookup_sparse",
    "num_gpus",
    "rank",
    "run_script",
    "set_comm_tool",
    "size",
]
