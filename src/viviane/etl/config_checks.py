"""Checks of derived columns against the rest of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from viviane.core.errors import suggest
from viviane.etl.derivations import ROW_DERIVATIONS, History, TargetEncode

if TYPE_CHECKING:
    from viviane.etl.config import EtlConfig


def check_derived(config: EtlConfig) -> None:
    """What derived columns may be made of and used for; `EtlConfig.derived_columns` has checked their types.

    Raises:
        ValueError: naming the derived column and what to do.
    """
    derived = config.derived_columns
    labels = {spec.name: spec for spec in config.labels}
    label_columns = {spec.source or spec.name for spec in config.labels}
    raw_only = [*label_columns, *(one.weights for one in config.categorical if one.weights)]
    raw_only += [config.sample_weight.source or config.sample_weight.name] if config.sample_weight else []
    raw_only += [one.source or one.name for one in config.dense if one.dim > 1]
    raw_only += [one.sources[0] for one in config.categorical if one.weights]
    late = [one for one in config.derived if not isinstance(one, ROW_DERIVATIONS)]
    late_names = {name for one in late for name, _, _ in one.made(config.column)}
    wrong = [name for name in raw_only if name in derived]
    for name in [*wrong, *(one.column for one in config.filters if one.column in late_names)]:
        raise ValueError(f"{name!r} is derived: labels, weights, vectors and filters need input columns here")
    for one in config.derived:
        # Earlier rows may show their labels: a row does not see its own.
        leaking = [] if isinstance(one, History) else sorted(label_columns & set(one.inputs))
        if leaking:
            raise ValueError(f"{one.name!r} would hold the label of column {leaking[0]!r}: use target_encode")
        if isinstance(one, TargetEncode):
            for name in one.targets.values():
                if name not in labels:
                    raise ValueError(f"{one.name!r}: no label {name!r}; {suggest(name, list(labels))}")
                if any(step.wanted() for step in labels[name].operators):
                    raise ValueError(f"{one.name!r}: label {name!r} has an operator that learns: use another label")
            if one.fold_by in label_columns:
                raise ValueError(f"{one.name!r}: folds by the label would show it: use another fold_by")
            if one.fold_by is not None and (one.fold_by in derived or config.column(one.fold_by).is_list):
                raise ValueError(f"{one.name!r}: fold_by {one.fold_by!r} must be a single-valued input column")
