"""fp16 and its loss scale: the same steps but for rounding, overflows that move nothing, and what is refused."""

import sys
from pathlib import Path

import group_model
import pytest
import torch
from click_model import make_batch, make_trainer, tensors_of

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.batch import Batch
from viviane.config import Solver
from viviane.core.errors import ConfigError, NumericsError, VivianeError
from viviane.parallel import Group
from viviane.training.step import loss_scale
from viviane.training.step.loss_scale import LossScale
from viviane.training.step.precision import Precision


def solver(**changes):
    return Solver.from_dict({"batch_size": 32, "lr": 0.01, "device": "cpu", "precision": "fp16", **changes})


def train(trainer, steps, **changes):
    return [float(trainer.train_step(make_batch(32, seed, **changes))) for seed in steps]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_scale_halves_at_once_and_doubles_after_many_good_steps(monkeypatch):
    scale = LossScale("dynamic")
    for value in (2.0**15, 2.0**14):
        scale.overflow("step 7")
        assert scale.value == value
    for _ in range(loss_scale.INTERVAL - 1):
        scale.hold()
    assert scale.value == 2.0**14
    scale.hold()
    assert (scale.value, scale.num_skipped) == (2.0**15, 2)
    monkeypatch.setattr(loss_scale, "INTERVAL", 1)
    for _ in range(20):
        scale.hold()
    assert scale.value == loss_scale.LARGEST
    scale.value = 1.0
    with pytest.raises(NumericsError, match=r"loss scale of 1\b[\s\S]*lower lr"):
        scale.overflow("step 8")
    fixed = LossScale(1024)
    fixed.hold()
    assert fixed.value == 1024
    with pytest.raises(NumericsError, match=r"1024[\s\S]*dynamic"):
        fixed.overflow("step 1")


def test_good_steps_are_counted_from_the_last_change_of_the_scale(monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 5)
    scale = LossScale("dynamic")
    values = []
    for is_good in [True] * 4 + [False] + [True] * 4 + [False] + [True] * 11:
        if is_good:
            scale.hold()
        else:
            scale.overflow("step 1")
        values.append(scale.value / loss_scale.FIRST)
    assert values == [1] * 4 + [0.5] * 5 + [0.25] * 5 + [0.5] * 5 + [1] * 2
    assert (scale.state(), scale.num_skipped) == ([loss_scale.FIRST, 1], 2)
    for good in range(5):  # a resumed run continues the count
        again = LossScale("dynamic")
        again.restore([8.0, good])
        for _ in range(4 - good):
            again.hold()
        assert again.value == 8.0
        again.hold()
        assert again.state() == [16.0, 0]


@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.1}, {"nan_guard": False}, {"ema_decay": 0.9}])
def test_a_power_of_two_changes_no_bit_where_nothing_is_rounded_to_sixteen_bits(monkeypatch, changes):
    """Scaling is exact in float32, so all that multiplies and divides must cancel: dense layers, tables, the norm."""
    plain = make_trainer(solver(precision="fp32", **changes))
    scaled = make_trainer(solver(loss_scale=2.0**20, **changes))
    monkeypatch.setattr(Precision, "context", lambda self, device: torch.autocast("cpu", enabled=False))
    assert train(plain, range(6)) == train(scaled, range(6))
    assert same(tensors_of(plain), tensors_of(scaled))


def test_a_step_that_doubles_the_scale_is_divided_by_the_scale_that_it_had(monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    monkeypatch.setattr(Precision, "context", lambda self, device: torch.autocast("cpu", enabled=False))
    for changes in ({}, {"clip_grad_norm": 0.1}):
        plain, scaled = make_trainer(solver(precision="fp32", **changes)), make_trainer(solver(**changes))
        assert train(plain, range(8)) == train(scaled, range(8))
        assert same(tensors_of(plain), tensors_of(scaled))
        assert scaled.stepper.loss_scale.state() == [2.0**20, 0]


def test_fp16_trains_what_fp32_trains_but_for_rounding():
    plain, half = make_trainer(solver(precision="fp32")), make_trainer(solver())
    losses = [train(one, range(30)) for one in (plain, half)]
    # Layers round to 2^-11; their sums of some ten terms and 30 steps of Adam leave about a hundredth.
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=0)
    assert losses[0] != losses[1]
    assert half.stepper.loss_scale.num_skipped == 0


def test_an_overflow_moves_nothing_and_training_goes_on():
    trainer = make_trainer(solver())
    train(trainer, range(2))
    before, scale = tensors_of(trainer), trainer.stepper.loss_scale
    scale.value = 2.0**24  # gradients of some hundredths do not fit times that
    train(trainer, [2])
    assert same(before, tensors_of(trainer))
    assert (scale.value, scale.num_skipped, trainer.step) == (2.0**23, 1, 3)
    for seed in range(3, 20):
        train(trainer, [seed])
        if not same(before, tensors_of(trainer)):
            break
    assert scale.num_skipped > 1
    assert not any(one.all_storages()[0].has_gradients for one in trainer.stepper.collections.values())


def test_a_fixed_scale_that_overflows_is_an_error_and_moves_nothing():
    trainer = make_trainer(solver(loss_scale=2.0**24))
    before = tensors_of(trainer)
    with pytest.raises(NumericsError, match=r"loss scale of 1.67772e\+07[\s\S]*step 1, batch in memory"):
        train(trainer, [0])
    assert same(before, tensors_of(trainer))


def test_bad_numbers_are_still_named():
    trainer = make_trainer(solver())
    price = make_batch(32, 0).dense_feature("price").view(-1).clone()
    price[3] = torch.nan
    with pytest.raises(NumericsError, match=r"dense column 'price', row 3"):
        train(trainer, [0], price=price.numpy())
    assert trainer.stepper.loss_scale.num_skipped == 0


def test_a_resumed_run_has_the_same_bits_and_scale(tmp_path):
    straight = make_trainer(solver())
    straight.stepper.loss_scale.value = 2.0**24
    train(straight, range(20))
    first = make_trainer(solver())
    first.stepper.loss_scale.value = 2.0**24
    train(first, range(9))
    first.save_checkpoint(tmp_path / "c")
    second = make_trainer(solver())
    second.load_checkpoint(tmp_path / "c")
    assert second.stepper.loss_scale.state() == first.stepper.loss_scale.state() != LossScale("dynamic").state()
    train(second, range(9, 20))
    assert same(tensors_of(straight), tensors_of(second))
    assert straight.stepper.loss_scale.state() == second.stepper.loss_scale.state()
    fixed = make_trainer(solver(loss_scale=1024.0))
    fixed.load_checkpoint(tmp_path / "c")
    assert fixed.stepper.loss_scale.value == 1024


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"TF32[\s\S]*on cpu[\s\S]*bf16"):
        make_trainer(solver(precision="tf32"))
    for changes in ({"loss_scale": 8.0, "precision": "bf16"}, {"loss_scale": 0.0}, {"loss_scale": "half"}):
        with pytest.raises(VivianeError, match="loss_scale"):
            solver(**changes)


def test_tf32_is_a_mode_of_the_step_alone():
    before = torch.get_float32_matmul_precision()
    with Precision("tf32").products():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with Precision("fp32").products():
        assert torch.get_float32_matmul_precision() == before


def together():
    group = Group.world()
    trainer = group_model.make_trainer(group, group_model.settings(precision="fp16", device="cpu"))
    scale = trainer.stepper.loss_scale
    for step in range(8):
        if step == 2:
            scale.value = 2.0**24
        columns = group_model.columns(8, 10 * step + group.rank)
        if step == 2 and group.rank:
            columns["weight"][:] = 0.0  # nothing of its own overflows: it must hear of it
        trainer.train_step(Batch.from_columns(group_model.SCHEMA, columns))
    every = group.gather_data([scale.state(), scale.num_skipped, [float(p.sum()) for p in trainer.module.parameters()]])
    assert every[0] == every[1]
    assert scale.num_skipped > 0


def test_processes_agree_on_overflows():
    processes.run(2, together)
