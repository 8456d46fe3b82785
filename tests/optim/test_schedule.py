import pytest

from viviane.config import Solver
from viviane.core.errors import ConfigError
from viviane.optim import LearningRateSchedule


def test_every_phase_by_hand():
    solver = Solver(lr=0.8, warmup_steps=4, decay_start=6, decay_steps=4, decay_power=2.0, end_lr=0.1)
    schedule = LearningRateSchedule(solver)
    # warm-up 1-3, flat 4-5, decay 6-9 with (left / 4)^2, then end_lr
    expected = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.45, 0.2, 0.1, 0.1, 0.1]
    assert [schedule.lr(n) for n in range(1, 12)] == pytest.approx(expected)
    assert schedule.factor(2) == pytest.approx(0.5)


def test_defaults_are_constant():
    schedule = LearningRateSchedule(Solver(lr=0.3))
    assert {schedule.lr(n) for n in (1, 2, 10**9)} == {0.3}


def test_steps_count_from_one():
    with pytest.raises(ConfigError, match="steps count from 1"):
        LearningRateSchedule(Solver()).lr(0)
