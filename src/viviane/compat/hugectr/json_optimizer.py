"""HugeCTR's optimizer clause in JSON, in all its spellings."""

from __future__ import annotations

from typing import Any, Final

from viviane.compat.hugectr.enums import Optimizer_t, Update_t
from viviane.compat.hugectr.json_files import check_keys
from viviane.compat.hugectr.solver import OptParams
from viviane.core.errors import ConfigError, suggest

_HPARAMS: Final = {
    "Adam": ("adam_hparam", ("beta1", "beta2", "epsilon")),
    "AdaGrad": ("adagrad_hparam", ("initial_accu_value", "epsilon")),
    "RMSProp": ("rmsprop_hparam", ("beta", "epsilon")),
    "MomentumSGD": ("momentum_sgd_hparam", ("momentum_factor",)),
    "Nesterov": ("nesterov_hparam", ("momentum_factor",)),
    "SGD": ("sgd_hparam", ("atomic_update",)),
    "Ftrl": ("ftrl_hparam", ("beta", "lambda1", "lambda2")),
}
"""The section of each optimizer, and the arguments of CreateOptimizer in it."""
_SPELLINGS: Final = {"Adagrad": "AdaGrad", "MomentumSgd": "MomentumSGD", "Sgd": "SGD", "FTRL": "Ftrl",
                     "initial_accumulator_value": "initial_accu_value"}  # fmt: skip
_SCHEDULE: Final = ("warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
_RATES: Final = ("learning_rate", "alpha", "lr")


def optimizer_to_json(given: OptParams) -> dict[str, Any]:
    """Return an optimizer as a clause of JSON.

    Example:
        >>> optimizer_to_json(OptParams(optimizer_type=Optimizer_t.SGD, update_type=Update_t.Local))
        {'type': 'SGD', 'update_type': 'Local', 'sgd_hparam': {'atomic_update': True}}
    """
    kind = given.optimizer_type.name
    section, names = _HPARAMS[kind]
    values = {name: getattr(given, name) for name in names}
    return {"type": kind, "update_type": given.update_type.name, section: values}


def optimizer_from_json(clause: dict[str, Any]) -> OptParams:
    """Return the optimizer of a clause; its learning rate belongs to the solver.

    Raises:
        ConfigError: the optimizer is unknown.
    """
    kind = _SPELLINGS.get(str(clause.get("type")), clause.get("type"))
    if kind not in _HPARAMS:
        raise ConfigError("unknown optimizer", where="optimizer", value=kind, fix=suggest(str(kind), _HPARAMS))
    _, names = _HPARAMS[kind]
    given = {}
    for key, value in _section(clause).items():
        name = _SPELLINGS.get(key, key)
        if name in names:
            given[name] = value
    check_keys(_section(clause), [*names, *_SPELLINGS, *_RATES, *_SCHEDULE], f"optimizer {kind}")
    update = clause.get("update_type", "Global" if clause.get("global_update") else "Local")
    if update not in Update_t.__members__:
        raise ConfigError(
            "unknown update_type", where="optimizer", value=update, fix=suggest(update, Update_t.__members__)
        )
    return OptParams(optimizer_type=Optimizer_t[kind], update_type=Update_t[update], **given)


def schedule_from_json(clause: dict[str, Any]) -> dict[str, Any]:
    """Return the learning rate, as `lr`, and its schedule.

    Example:
        >>> schedule_from_json({"type": "Adam", "adam_hparam": {"alpha": 0.1, "warmup_steps": 5}})
        {'lr': 0.1, 'warmup_steps': 5}
    """
    section = {**clause, **_section(clause)}
    rate = next((section[name] for name in _RATES if name in section), 0.001)
    return {"lr": rate, **{name: section[name] for name in _SCHEDULE if name in section}}


def _section(clause: dict[str, Any]) -> dict[str, Any]:
    """Return the section of hyperparameters, whatever its name."""
    for key, value in clause.items():
        if key.endswith("_hparam") and isinstance(value, dict):
            return value
    return {}
