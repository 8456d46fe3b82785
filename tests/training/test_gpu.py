"""Training on a GPU: the same losses as on the CPU, bits that repeat, the guard before the update."""

import pytest
import torch
from click_model import LONG, SCHEMA, ClickModel, make_batch, make_trainer
from test_guard import BadGradient, with_bad
from torch import Tensor

from viviane.config import Adam, Solver
from viviane.core.errors import KeyRangeError, NumericsError
from viviane.training import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SOLVER = Solver(batch_size=32, lr=0.02, device="cuda", clip_grad_norm=1.0)


def host_tensors(trainer: Trainer) -> dict[str, Tensor]:
    return {name: one.cpu().clone() for name, one in trainer.module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_losses_are_those_of_the_cpu():
    losses = {}
    for device in ("cpu", "cuda"):
        trainer = make_trainer(SOLVER.model_copy(update={"device": device}))
        trainer.module.net[3].p = 0.0  # the two devices draw different dropout
        losses[device] = [float(trainer.train_step(make_batch(64, seed))) for seed in range(5)]
    # Only the order of float32 sums differs.
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "auto"])
def test_a_run_repeats_and_resumes_to_the_bit(train, valid, tmp_path, precision):
    settings = LONG.model_copy(update={"device": "cuda", "precision": precision})
    first = make_trainer(settings, run_folder=tmp_path / "a")
    first.fit(train, valid)
    settings = settings.model_copy(update={"precision": first.precision.name})
    stopped = make_trainer(settings.model_copy(update={"max_steps": 40}), run_folder=tmp_path / "b")
    stopped.fit(train, valid)
    again = make_trainer(settings, run_folder=tmp_path / "b")
    again.fit(train, valid, resume=True)
    assert again.step == first.step
    assert same(host_tensors(first), host_tensors(again))


def test_a_checkpoint_moves_between_devices(tmp_path, valid):
    gpu, cpu = make_trainer(SOLVER), make_trainer(SOLVER.model_copy(update={"device": "cpu"}))
    gpu.train_step(make_batch())
    gpu.save_checkpoint(tmp_path / "c")
    cpu.load_checkpoint(tmp_path / "c")
    assert same(host_tensors(gpu), host_tensors(cpu))
    assert gpu.evaluate(valid)["auc"] == pytest.approx(cpu.evaluate(valid)["auc"], abs=1e-4)


def test_nothing_bad_reaches_a_weight():
    class Bad(ClickModel):
        on = False

        def forward(self, batch):
            x = torch.cat([self.tables(batch).flat, batch.dense], 1)
            return self.net(BadGradient.apply(x) if self.on else x)

    trainer = Trainer(Bad(), SCHEMA, SOLVER, Adam(), progress=False)
    trainer.train_step(make_batch(16, 1))
    before = host_tensors(trainer)
    with pytest.raises(NumericsError, match="dense column 'price', row 5"):
        trainer.train_step(with_bad("price", 5, float("nan")))
    with pytest.raises(KeyRangeError, match="user"):
        trainer.train_step(make_batch(16, 3, user=[77] * 16))
    trainer.module.on = True
    with pytest.raises(NumericsError, match="gradients are NaN or infinite: those of feature 'user'"):
        trainer.train_step(make_batch(16, 2))
    assert same(before, host_tensors(trainer))
    trainer.module.on = False
    assert torch.isfinite(trainer.train_step(make_batch(16, 2)))
