"""Frozen, validated settings: the same objects from Python, JSON and the command line."""

from viviane.config.base import Settings, load_json
from viviane.config.optimizers import SGD, AdaGrad, Adam, AnyOptimizer, Ftrl, OptimizerSettings, RMSProp
from viviane.config.solver import Solver

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "AnyOptimizer",
    "Ftrl",
    "OptimizerSettings",
    "RMSProp",
    "Settings",
    "Solver",
    "load_json",
]
