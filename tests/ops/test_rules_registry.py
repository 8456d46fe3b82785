"""Every optimizer has a rule with all of its parts, and an unknown one is refused."""

from typing import get_args

import pytest

from viviane.config import SGD, AdaGrad, Lamb
from viviane.config.base import Settings
from viviane.config.optimizers import AnyOptimizer, RowWiseAdam
from viviane.core.errors import ConfigError
from viviane.embedding import TableConfig
from viviane.ops.rules import DenseRule, Rule, dense_rules, rule_of, rules
from viviane.ops.rules.rule import MAX_ROW_NUMBERS
from viviane.optim import build_dense_optimizer
from viviane.parallel import ShardingPlan, TablePlan


@pytest.mark.parametrize("kind", get_args(AnyOptimizer), ids=lambda kind: kind.__name__)
def test_every_optimizer_has_a_rule(kind) -> None:
    rule = rule_of(kind())
    assert isinstance(rule, Rule)
    assert rules()[rule.name] is type(rule)
    assert rule.initial().keys() == set(rule.states)


@pytest.mark.parametrize("rule", rules().values(), ids=rules())
def test_every_variant_is_complete(rule) -> None:
    assert {"name", "cpu", "gpu", "gpu_step_numbers"} <= {name for base in rule.__mro__ for name in vars(base)}
    assert rule.per_row <= set(rule.states)
    # Kernels have room for two wide states and one number for each row.
    assert len(rule.states) - len(rule.per_row) <= 2
    assert len(rule.per_row) <= 1
    assert not rule.__abstractmethods__


def test_names_of_variants_are_distinct() -> None:
    found = [variant.name for kind in get_args(AnyOptimizer) for variant in [type(rule_of(kind()))]]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("rule", dense_rules().values(), ids=dense_rules())
def test_dense_parameters_have_no_rows(rule) -> None:
    # The kernel passes no memory for a state with one number for each row.
    assert not rule.per_row


@pytest.mark.parametrize("kind", get_args(AnyOptimizer), ids=lambda kind: kind.__name__)
def test_numbers_fit_into_kernels(kind) -> None:
    assert len(rule_of(kind()).gpu_numbers(0.1, 3)) <= MAX_ROW_NUMBERS


def test_an_unknown_optimizer_is_refused_and_not_treated_as_another() -> None:
    class Other(Settings):
        type: str = "other"

    with pytest.raises(ConfigError, match="no rule implements this optimizer"):
        rule_of(Other())
    with pytest.raises(ConfigError, match="no rule implements"):
        rule_of("adam")


def test_rules_for_tables_only_are_refused_for_dense_parameters() -> None:
    assert not isinstance(rule_of(RowWiseAdam()), DenseRule)
    with pytest.raises(ConfigError, match="for embedding tables"):
        build_dense_optimizer(RowWiseAdam(), [], lr=0.1)


def test_settings_select_the_variant() -> None:
    assert [rule_of(one).name for one in (SGD(), SGD(momentum=0.5), SGD(momentum=0.5, nesterov=True), Lamb())] == [
        "sgd", "momentum", "nesterov", "lamb",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (SGD(), False),
        (SGD(clip_row_norm=1.0), True),
        (AdaGrad(row_wise=True), True),
        (RowWiseAdam(), True),
        (Lamb(), True),
    ],
    ids=repr,
)
def test_optimizers_that_reduce_over_rows_are_not_sharded_by_column(optimizer, whole) -> None:
    table = TableConfig(name="t", num_rows=9, dim=8, optimizer=optimizer)
    plan = ShardingPlan(world_size=2, tables=[TablePlan(table="t", kind="column", ranks=[0, 1])])
    if whole:
        with pytest.raises(ConfigError, match="reduces over whole rows"):
            plan.check({"t": table}, 2)
    else:
        plan.check({"t": table}, 2)
