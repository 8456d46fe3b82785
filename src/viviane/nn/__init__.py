"""Layers and losses: `nn.Module`s with HugeCTR's names and formulas, for graphs and for any PyTorch program."""

from viviane.nn.attention import MultiHeadAttention, SequenceMask, Softmax, masked_softmax
from viviane.nn.basic import ELU, Add, Dropout, LeakyReLU, ReduceMean, ReduceSum, ReLU, Sigmoid, SiLU, Sub
from viviane.nn.cross import ElementwiseMultiply, FmOrder2, MultiCross, WeightMultiply
from viviane.nn.cross_entropy import (
    CrossEntropyLoss,
    MeanSquaredErrorLoss,
    MultiCrossEntropyLoss,
    cross_entropy,
    multi_cross_entropy,
    squared_error,
)
from viviane.nn.dice import PReLU_Dice
from viviane.nn.frequency import EMPTY_ID, LogFrequency
from viviane.nn.fused import FusedInnerProduct, GroupFusedInnerProduct
from viviane.nn.init import Initializer
from viviane.nn.interaction import Interaction
from viviane.nn.linear import MLP, InnerProduct
from viviane.nn.loss import Loss
from viviane.nn.losses import BinaryCrossEntropyLoss, binary_cross_entropy, regularization_loss
from viviane.nn.next_item import CausalMask, LastPlace, NextItemSoftmax
from viviane.nn.norm import BatchNorm, LayerNorm
from viviane.nn.older_names import OLDER_NAMES
from viviane.nn.pairs import PairInnerProduct
from viviane.nn.places import MaskPlaces, MeanPlaces, PositionEmbedding, TimeEmbedding
from viviane.nn.pointwise import PointwiseAttention
from viviane.nn.registry import LAYERS, Layer, build_layer
from viviane.nn.retrieval import L2Normalize, SampledSoftmax, SampledSoftmaxLoss
from viviane.nn.rows import Rows, RowShape
from viviane.nn.select import Cast, Gather, MatrixMultiply, Select
from viviane.nn.sequence import GRU, FusedReshapeConcat, FusedReshapeConcatGeneral, Scale
from viviane.nn.shape import Concat, Reshape, Slice

__all__ = [
    "ELU",
    "EMPTY_ID",
    "GRU",
    "LAYERS",
    "MLP",
    "OLDER_NAMES",
    "Add",
    "BatchNorm",
    "BinaryCrossEntropyLoss",
    "Cast",
    "CausalMask",
    "Concat",
    "CrossEntropyLoss",
    "Dropout",
    "ElementwiseMultiply",
    "FmOrder2",
    "FusedInnerProduct",
    "FusedReshapeConcat",
    "FusedReshapeConcatGeneral",
    "Gather",
    "GroupFusedInnerProduct",
    "Initializer",
    "InnerProduct",
    "Interaction",
    "L2Normalize",
    "LastPlace",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "LogFrequency",
    "Loss",
    "MaskPlaces",
    "MatrixMultiply",
    "MeanPlaces",
    "MeanSquaredErrorLoss",
    "MultiCross",
    "MultiCrossEntropyLoss",
    "MultiHeadAttention",
    "NextItemSoftmax",
    "PReLU_Dice",
    "PairInnerProduct",
    "PointwiseAttention",
    "PositionEmbedding",
    "ReLU",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "RowShape",
    "Rows",
    "SampledSoftmax",
    "SampledSoftmaxLoss",
    "Scale",
    "Select",
    "SequenceMask",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "Sub",
    "TimeEmbedding",
    "WeightMultiply",
    "binary_cross_entropy",
    "build_layer",
    "cross_entropy",
    "masked_softmax",
    "multi_cross_entropy",
    "regularization_loss",
    "squared_error",
]
