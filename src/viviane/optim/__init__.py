"""Optimizers of dense parameters and the learning-rate schedule; tables have theirs in `viviane.embedding`."""

from viviane.optim.dense import AdaGrad, Adam, DenseOptimizer, Sgd, build_dense_optimizer
from viviane.optim.schedule import LearningRateSchedule

__all__ = ["AdaGrad", "Adam", "DenseOptimizer", "LearningRateSchedule", "Sgd", "build_dense_optimizer"]
