"""The running mean of weights against a plain recomputation over all weights, and where it is used."""

import numpy as np
import pytest
import torch
from click_model import assert_same_bits, make_batch, make_trainer, tensors_of

from viviane.config import Solver
from viviane.embedding.row_mean import RowMean
from viviane.training.checkpoint.dense_state import dense_tensors
from viviane.training.step.average import WeightMean


def solver(**values):
    return Solver(**{"batch_size": 32, "lr": 0.02, "device": "cpu", "ema_decay": 0.9, **values})


def weights_of(module):
    """All weights by name, tables whole, in float64."""
    dense = {name: one for name, one in dense_tensors(module).items() if one.is_floating_point()}
    tables = {name: module.tables.export_table(name).weight for name in module.tables.tables}
    return {name: one.detach().clone().double() for name, one in {**dense, **tables}.items()}


def eager(mean, weights, step, decay):
    d = min(decay, step / (step + 10))
    return {name: d * mean[name] + (1 - d) * weights[name] for name in mean}


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("look_every", [7, 1000])
def test_the_lazy_mean_equals_the_eager_one(decay, look_every):
    trainer = make_trainer(solver(ema_decay=decay))
    expected = weights_of(trainer.module)
    for step in range(1, 51):
        trainer.train_step(make_batch(5, seed=step))  # five rows: most of the tables rest
        expected = eager(expected, weights_of(trainer.module), step, decay)
        if step % look_every == 0 or step == 50:
            with trainer.averaged():
                found = weights_of(trainer.module)
            for name, value in expected.items():
                # 50 steps of float32 arithmetic on numbers near 1, each rounding to 6e-8
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_row_that_rests_for_long_reaches_its_weight():
    weight = torch.tensor([[1.0], [5.0]])
    mean = RowMean(torch.zeros(2, 1))
    mean.advance(0.9)
    mean.visit(torch.tensor([0]), torch.zeros(1, 1), weight[:1])
    for _ in range(500):
        mean.advance(0.9)
    assert mean.catch_up(weight).mean.flatten().tolist() == [1.0, 5.0]


def test_training_itself_does_not_change(train, valid):
    with_mean, without = make_trainer(solver(epochs=2)), make_trainer(solver(epochs=2, ema_decay=None))
    with_mean.fit(train, valid)
    without.fit(train, valid)
    assert_same_bits(tensors_of(with_mean), tensors_of(without))


def test_evaluation_prediction_and_saving_use_the_mean(train, valid, tmp_path):
    trainer = make_trainer(solver(epochs=2))
    history = trainer.fit(train, valid)
    raw = make_trainer(solver(epochs=2, ema_decay=None))
    raw.fit(train, valid)
    assert not np.array_equal(trainer.predict(valid), raw.predict(valid))
    assert trainer.evaluate(valid)["auc"] == history.last("valid")["auc"]
    trainer.save_checkpoint(tmp_path / "weights", optimizer_state=False)
    loaded = make_trainer(solver(ema_decay=None))
    loaded.load_checkpoint(tmp_path / "weights", weights_only=True)
    assert np.array_equal(loaded.predict(valid), trainer.predict(valid))


def test_resume_gives_the_same_bits(train, valid, tmp_path):
    whole = make_trainer(solver(epochs=3, eval_every=7, checkpoint_every=10), run_folder=tmp_path / "whole")
    whole.fit(train, valid)
    cut = solver(epochs=3, eval_every=7, checkpoint_every=10, max_steps=30)
    make_trainer(cut, run_folder=tmp_path / "cut").fit(train, valid)
    resumed = make_trainer(solver(epochs=3, eval_every=7, checkpoint_every=10), run_folder=tmp_path / "cut")
    resumed.fit(train, valid, resume=True)
    assert_same_bits(tensors_of(resumed), tensors_of(whole))
    assert np.array_equal(resumed.predict(valid), whole.predict(valid))


def test_restore_best_brings_back_the_mean_of_the_best_evaluation(train, valid):
    trainer = make_trainer(solver(epochs=6, lr=0.3, restore_best=True))
    history = trainer.fit(train, valid)
    assert trainer.evaluate(valid)["auc"] == history.best("auc")


def test_an_error_inside_the_block_gives_the_weights_back():
    trainer = make_trainer(solver())
    trainer.train_step(make_batch())
    before = weights_of(trainer.module)
    with pytest.raises(KeyError), trainer.averaged():
        raise KeyError
    after = weights_of(trainer.module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_frozen_and_untouched_weights_keep_their_value():
    trainer = make_trainer(solver())
    start = trainer.module.tables.export_table("user").weight
    trainer.module.tables.freeze("user")
    mean = WeightMean(trainer.module, 0.9)
    mean.advance()
    mean.follow()
    with mean.in_place():
        assert torch.equal(trainer.module.tables.export_table("user").weight, start)
