"""Frozen, validated settings: the same objects from Python, JSON and the command line."""

from viviane.config.base import Settings, load_json
from viviane.config.optimizers import SGD, AdaGrad, Adam, OptimizerSettings
from viviane.config.solver import Solver

__all__ = ["SGD", "AdaGrad", "Adam", "OptimizerSettings", "Settings", "Solver", "load_json"]
