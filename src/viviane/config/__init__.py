"""Frozen, validated settings: the same objects from Python, JSON and the command line."""

from viviane.config.base import Settings, load_json
from viviane.config.optimizers import (
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    AnyOptimizer,
    Ftrl,
    Lamb,
    OptimizerSettings,
    RMSProp,
    RowWiseAdam,
)  # fmt: skip
from viviane.config.solver import Solver

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "AnyOptimizer",
    "Ftrl",
    "Lamb",
    "OptimizerSettings",
    "RMSProp",
    "RowWiseAdam",
    "Settings",
    "Solver",
    "load_json",
]
