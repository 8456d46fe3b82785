"""Layers and losses: `nn.Module`s with HugeCTR's names and formulas, for graphs and for any PyTorch program."""

from viviane.nn.basic import ELU, Add, Dropout, ReduceMean, ReduceSum, ReLU, Sigmoid, Sub
from viviane.nn.cross import ElementwiseMultiply, FmOrder2, MultiCross, WeightMultiply
from viviane.nn.init import Initializer
from viviane.nn.interaction import Interaction
from viviane.nn.linear import MLP, InnerProduct
from viviane.nn.losses import BinaryCrossEntropyLoss, binary_cross_entropy, regularization_loss
from viviane.nn.norm import BatchNorm, LayerNorm
from viviane.nn.registry import LAYERS, Layer, build_layer
from viviane.nn.shape import Concat, Reshape, Slice

__all__ = [
    "ELU",
    "LAYERS",
    "MLP",
    "Add",
    "BatchNorm",
    "BinaryCrossEntropyLoss",
    "Concat",
    "Dropout",
    "ElementwiseMultiply",
    "FmOrder2",
    "Initializer",
    "InnerProduct",
    "Interaction",
    "Layer",
    "LayerNorm",
    "MultiCross",
    "ReLU",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Sigmoid",
    "Slice",
    "Sub",
    "WeightMultiply",
    "binary_cross_entropy",
    "build_layer",
    "regularization_loss",
]
