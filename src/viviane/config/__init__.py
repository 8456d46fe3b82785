"""Frozen, validated settings: the same objects from Python, JSON and the command line.

Optimizers and the solver are imported when they are first used: other settings do not need them.
"""

from typing import TYPE_CHECKING

from viviane.config.base import Settings, load_json
from viviane.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from viviane.config.optimizers import (
        SGD,
        Adadelta,
        AdaGrad,
        Adam,
        Adamax,
        AdamW,
        AnyOptimizer,
        Ftrl,
        Lamb,
        OptimizerSettings,
        RMSProp,
        RowWiseAdam,
    )
    from viviane.config.solver import Solver
else:
    _OPTIMIZERS = ("SGD", "AdaGrad", "Adadelta", "Adam", "AdamW", "Adamax", "AnyOptimizer", "Ftrl", "Lamb",
                   "OptimizerSettings", "RMSProp", "RowWiseAdam")  # fmt: skip
    __getattr__, __dir__ = lazy_names(
        __name__, {"viviane.config.optimizers": _OPTIMIZERS, "viviane.config.solver": ("Solver",)}
    )

__all__ = [
    "SGD",
    "AdaGrad",
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
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
