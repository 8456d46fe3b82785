"""The model: a graph of named layers, or any torch module, with fit, evaluate, predict, save and load."""

from viviane.model.graph import Plan, plan_graph
from viviane.model.model import Model
from viviane.model.module import GraphModule
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding, TableOptions
from viviane.model.plot import graph_svg
from viviane.model.saving import ModelFile, read_model_file
from viviane.model.summary import ModelSummary

__all__ = [
    "DenseLayer",
    "GraphModule",
    "Input",
    "Model",
    "ModelFile",
    "ModelSummary",
    "Node",
    "Plan",
    "SparseEmbedding",
    "TableOptions",
    "graph_svg",
    "plan_graph",
    "read_model_file",
]
