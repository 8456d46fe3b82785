"""Optimizers of dense parameters and the learning-rate schedule; tables have theirs in `viviane.embedding`."""

from viviane.optim.dense import AdaGrad, Adam, DenseOptimizer, Ftrl, RMSProp, Sgd, build_dense_optimizer
from viviane.optim.schedule import LearningRateSchedule

__all__ = [
    "AdaGrad",
    "Adam",
    "DenseOptimizer",
    "Ftrl",
    "LearningRateSchedule",
    "RMSProp",
    "Sgd",
    "build_dense_optimizer",
]
