"""The model: a graph of named layers, or any torch module, with fit, evaluate, predict, save and load."""

import warnings
from typing import Any

from viviane.model.graph import GraphPlan, plan_graph
from viviane.model.model import Model
from viviane.model.module import GraphModule
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding, TableOptions
from viviane.model.plot import graph_svg
from viviane.model.saving import ModelFile, read_model_file
from viviane.model.summary import ModelSummary

__all__ = [
    "DenseLayer",
    "GraphModule",
    "GraphPlan",
    "Input",
    "Model",
    "ModelFile",
    "ModelSummary",
    "Node",
    "SparseEmbedding",
    "TableOptions",
    "graph_svg",
    "plan_graph",
    "read_model_file",
]


def __getattr__(name: str) -> Any:
    """Return `GraphPlan` under its old, deprecated name."""
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.Plan is now GraphPlan", DeprecationWarning, stacklevel=2)
    return GraphPlan
