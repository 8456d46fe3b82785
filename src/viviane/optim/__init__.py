"""Optimizers of dense parameters and the learning-rate schedule; tables have theirs in `viviane.embedding`."""

from viviane.optim.dense import DenseOptimizer, build_dense_optimizer
from viviane.optim.schedule import LearningRateSchedule

__all__ = ["DenseOptimizer", "LearningRateSchedule", "build_dense_optimizer"]
