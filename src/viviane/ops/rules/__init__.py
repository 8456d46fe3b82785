"""The optimizer rules, one file each: state, and arithmetic in plain torch, Numba and Triton.

A file is named after the `type` of its settings (`viviane.config.optimizers`). It has `RULES`, the variants that it
implements, and `rule_of(settings)`, which chooses one. To add an optimizer, write its settings and its file; see
CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import get_args

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.ops.rules.rule import NUM_DENSE_NUMBERS, DenseNumbers, DenseRule, Rule

__all__ = ["NUM_DENSE_NUMBERS", "DenseNumbers", "DenseRule", "Rule", "dense_rules", "rule_of", "rules"]

TYPES: tuple[str, ...] = tuple(kind.model_fields["type"].default for kind in get_args(AnyOptimizer))
"""The optimizers' names."""


@lru_cache(maxsize=1024)
def rule_of(settings: AnyOptimizer) -> Rule:
    """Return the rule of an optimizer's settings.

    Raises:
        ConfigError: no rule implements these settings.

    Example:
        >>> from viviane.config import SGD
        >>> rule_of(SGD(momentum=0.9)).name
        'momentum'
    """
    kind = getattr(settings, "type", None)
    if kind not in TYPES:
        raise ConfigError("no rule implements this optimizer", value=repr(settings), allowed=", ".join(TYPES))
    rule: Rule = importlib.import_module(f"viviane.ops.rules.{kind}").rule_of(settings)
    return rule


@cache
def rules() -> dict[str, type[Rule]]:
    """Return every variant by its name."""
    modules = [importlib.import_module(f"viviane.ops.rules.{kind}") for kind in TYPES]
    return {rule.name: rule for module in modules for rule in module.RULES}


@cache
def dense_rules() -> dict[str, type[DenseRule]]:
    """Return the variants that train dense parameters, by name."""
    return {name: rule for name, rule in rules().items() if issubclass(rule, DenseRule)}
