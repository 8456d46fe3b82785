"""Optimizers of dense parameters and the learning-rate schedule; tables have theirs in `viviane.embedding`."""

from viviane.optim.dense import DenseOptimizer, LearningRateSchedule, build_dense_optimizer

__all__ = ["DenseOptimizer", "LearningRateSchedule", "build_dense_optimizer"]
