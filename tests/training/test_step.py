"""One step: the loss, clipping and precision by hand-computed numbers."""

import logging
import math

import pytest
import torch
from click_model import SCHEMA, ClickModel, assert_same_bits, make_batch, make_trainer, tensors_of
from torch import nn

from viviane.batch import Bag, Batch
from viviane.config import SGD, Ftrl, Solver
from viviane.core.errors import ConfigError, DataError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.schema import Schema
from viviane.training import Trainer
from viviane.training.graph.capture_rules import ineligible_reasons
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision

SOLVER = Solver(batch_size=16, lr=1.0, device="cpu")
ONE = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 4}])


class Product(nn.Module):
    """logit = e[c] + w x: one number of a table and one dense weight."""

    def __init__(self):
        super().__init__()
        table = TableConfig(name="c", num_rows=4, dim=1, init="zero")
        self.tables = EmbeddingCollection([table], [FeatureConfig(name="c", table="c")], SGD())
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return self.tables(batch).flat[:, 0] + batch.dense[:, 0] * self.w


def product(**values):
    return Trainer(Product(), ONE, SOLVER.model_copy(update=values), SGD(), progress=False)


def row_of(trainer, key):
    return float(trainer.module.tables.export_table("c").weight[key])


BATCH = Batch.from_columns(ONE, {"y": [1.0, 0.0], "x": [4.0, 0.0], "c": [3, 3]})


def test_a_step_by_hand():
    # At logit 0, d loss / d logit = (0.5 - y) / B: -0.25 and 0.25. Key 3 occurs twice: its gradients sum to 0.
    trainer = product()
    assert float(trainer.train_step(BATCH)) == pytest.approx(math.log(2), rel=1e-6)
    assert row_of(trainer, 3) == 0.0
    assert trainer.module.w.item() == 1.0  # -(4 * -0.25)


def test_clipping_takes_dense_and_rows_together():
    # One row, y = 1, x = 4: gradients -0.5 of the table's row and -2 of w; the joint norm is sqrt(4.25).
    batch = Batch.from_columns(ONE, {"y": [1.0], "x": [4.0], "c": [3]})
    limit = 0.5
    trainer = product(clip_grad_norm=limit)
    trainer.train_step(batch)
    assert row_of(trainer, 3) == pytest.approx(0.5 * limit / math.sqrt(4.25), rel=1e-6)
    assert trainer.module.w.item() == pytest.approx(2.0 * limit / math.sqrt(4.25), rel=1e-6)
    loose = product(clip_grad_norm=3.0)
    loose.train_step(batch)
    assert (row_of(loose, 3), loose.module.w.item()) == (0.5, 2.0)


def test_rows_that_stand_twice_count_once_in_the_norm():
    # Two rows of key 3, y = 1: the row's gradient is 2 * -0.25; separately they would give sqrt(2) * 0.25.
    batch = Batch.from_columns(ONE, {"y": [1.0, 1.0], "x": [0.0, 0.0], "c": [3, 3]})
    trainer = product(clip_grad_norm=0.1)
    trainer.train_step(batch)
    assert row_of(trainer, 3) == pytest.approx(0.1, rel=1e-6)


def test_a_gradient_of_zero_is_not_divided_by():
    trainer = product(clip_grad_norm=1e-3)
    trainer.train_step(Batch.from_columns(ONE, {"y": [1.0, 0.0], "x": [0.0, 0.0], "c": [3, 3]}))
    assert (row_of(trainer, 3), trainer.module.w.item()) == (0.0, 0.0)


def test_class_weights_and_smoothing_train_and_do_not_evaluate():
    weighted = product(class_weights=(1.0, 3.0))
    weighted.train_step(BATCH)
    assert weighted.module.w.item() == 3.0
    smooth = product(label_smoothing=0.5)  # 1 becomes 0.75: the gradient halves
    smooth.train_step(BATCH)
    assert smooth.module.w.item() == 0.5
    objective = Objective(ONE, SOLVER.model_copy(update={"class_weights": (1.0, 3.0), "label_smoothing": 0.1}))
    plain = objective.loss(torch.zeros(2), BATCH, training=False)
    assert float(plain) == pytest.approx(math.log(2), rel=1e-6)


def test_regression_and_several_labels_add_up():
    schema = Schema(
        labels=[{"name": "a"}, {"name": "r", "task": "regression"}], dense=[{"name": "x"}], sample_weight="w"
    )
    batch = Batch.from_columns(schema, {"a": [1, 0], "r": [2.0, 5.0], "x": [0, 0], "w": [1.0, 3.0]})
    objective = Objective(schema, SOLVER)
    loss = objective.loss(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), batch)
    # log 2 for every row of a; (1 * 1 + 3 * 4) / 4 for r.
    assert float(loss) == pytest.approx(math.log(2) + 13 / 4, rel=1e-6)
    outputs = objective.predictions(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), 2)
    assert outputs.tolist() == [[0.5, 1.0], [0.5, 3.0]]


def test_a_loss_of_ones_own():
    trainer = Trainer(
        Product(), ONE, SOLVER, SGD(), loss=lambda z, batch: (z[:, 0] - batch.label("y")).abs().sum(), progress=False
    )
    assert float(trainer.train_step(BATCH)) == 1.0
    with pytest.raises(ConfigError, match="a custom loss"):
        Trainer(Product(), ONE, SOLVER.model_copy(update={"label_smoothing": 0.1}), SGD(), loss=lambda z, b: z.sum())


def test_a_learning_rate_of_ones_own():
    trainer = product()
    trainer.train_step(BATCH, lr=0.25)
    assert trainer.module.w.item() == 0.25
    assert trainer.learning_rate() == 1.0


def test_several_collections_and_frozen_parts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Product(), Product()])
            self.parts[1].w.requires_grad_(False)
            self.parts[1].tables.freeze("c")

        def forward(self, batch):
            return self.parts[0](batch) + self.parts[1](batch)

    trainer = Trainer(Two(), ONE, SOLVER, SGD(), progress=False)
    trainer.train_step(Batch.from_columns(ONE, {"y": [1.0], "x": [1.0], "c": [2]}))
    moved, still = trainer.module.parts
    assert (moved.w.item(), float(moved.tables.export_table("c").weight[2])) == (0.5, 0.5)
    assert (still.w.item(), float(still.tables.export_table("c").weight[2])) == (0.0, 0.0)


def test_bf16_computes_dense_layers_in_bf16_and_keeps_weights_in_float32(train, valid):
    seen = set()
    trainer = make_trainer(Solver(batch_size=32, lr=0.02, precision="bf16", device="cpu", epochs=6))
    trainer.module.net[0].register_forward_hook(lambda m, i, o: seen.add(o.dtype))
    history = trainer.fit(train, valid)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    assert history.best("auc") > 0.6
    same = make_trainer(Solver(batch_size=32, lr=0.02, precision="fp32", device="cpu", epochs=6)).fit(train, valid)
    # bf16 has 8 bits: predictions move by some 1e-2, which the ranking of 200 rows hardly feels.
    assert abs(history.best("auc") - same.best("auc")) < 0.05


def test_auto_precision_disturbs_nothing_and_is_remembered(train, valid, tmp_path, monkeypatch, caplog):
    solver = Solver(batch_size=32, lr=0.02, precision="auto", device="cpu", checkpoint_every=5)
    with caplog.at_level(logging.INFO, logger="viviane"):
        auto = make_trainer(solver, run_folder=tmp_path / "run")
        auto.fit(train, valid)
    assert any(m.startswith("precision auto: ") and "fp32" in m and "ms per batch" in m for m in caplog.messages)
    chosen = auto.precision.name
    fixed = make_trainer(solver.model_copy(update={"precision": chosen}))
    fixed.fit(train, valid)
    assert_same_bits(tensors_of(auto), tensors_of(fixed))
    # A resumed run takes what was chosen, without timing again.
    monkeypatch.setattr("viviane.training.trainer_base.choose_precision", lambda *a: pytest.fail("timed again"))
    again = make_trainer(solver.model_copy(update={"epochs": 2}), run_folder=tmp_path / "run")
    again.fit(train, valid, resume=True)
    assert again.precision == Precision(chosen)


def test_auto_precision_in_a_loop_of_ones_own():
    auto = make_trainer(Solver(batch_size=32, lr=0.02, precision="auto", device="cpu"))
    auto.train_step(make_batch())
    fixed = make_trainer(Solver(batch_size=32, lr=0.02, precision=auto.precision.name, device="cpu"))
    fixed.train_step(make_batch())
    assert_same_bits(tensors_of(auto), tensors_of(fixed))


def test_switches_of_torch_come_back(train):
    threads, seen = torch.get_num_threads(), []

    class Watch(ClickModel):
        def forward(self, batch):
            seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
            return super().forward(batch)

    for deterministic in (True, False):
        solver = SOLVER.model_copy(update={"num_threads": 2, "deterministic": deterministic, "max_steps": 1})
        Trainer(Watch(), SCHEMA, solver, SGD(), progress=False).fit(train)
    assert seen == [(2, True), (2, False)]
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_bag_of_one_key_many_times():
    trainer = make_trainer(SOLVER)
    batch = make_batch(4)
    many = Bag(torch.full((100_000,), 7), torch.tensor([0, 0, 100_000, 100_000, 100_000]))
    full = Batch(batch.layout, batch.labels, batch.dense, batch.one_hot, {"seen": many}, origin="one key")
    assert torch.isfinite(trainer.train_step(full))


class Recorder:
    """A step hook that notes when it is called, and may fail."""

    def __init__(self, trainer):
        self.trainer, self.seen, self.failure = trainer, [], None
        self.weight = trainer.module.net[0].weight

    def before_lookup(self, batch, step):
        self.before = self.weight.detach().clone()
        self.seen.append(("before", batch.size, step))
        if self.failure is not None:
            raise self.failure

    def after_update(self, batch, step):
        self.seen.append(("after", batch.size, step))
        assert not torch.equal(self.weight, self.before)
        assert not self.trainer.stepper.gradients.named()


def test_hooks_are_called_around_lookups_and_updates():
    """And an error in the first of them leaves weights and batch statistics as they were."""
    trainer = make_trainer()
    hook = Recorder(trainer)
    trainer.stepper.hooks.append(hook)
    trainer.train_step(make_batch())
    assert hook.seen == [("before", make_batch().size, 1), ("after", make_batch().size, 1)]
    found = list(ineligible_reasons(trainer.stepper))
    assert "a step hook (Recorder) runs Python around every step" in found
    before, hook.failure = tensors_of(trainer), DataError("the cache cannot load its rows")
    with pytest.raises(DataError, match="cannot load its rows"):
        trainer.train_step(make_batch())
    assert_same_bits(before, tensors_of(trainer))
    assert trainer.step == 1
    assert hook.seen[2:] == [("before", make_batch().size, 2)]


@pytest.mark.parametrize("where", ["dense", "tables", "schedule"])
def test_ftrl_refuses_a_rate_of_zero(where):
    module, solver = Product(), SOLVER.model_copy(update={"decay_start": 2, "decay_steps": 1})
    if where != "dense":
        table = TableConfig(name="c", num_rows=4, dim=1, optimizer=Ftrl())
        module.tables = EmbeddingCollection([table], [FeatureConfig(name="c", table="c")], SGD())
    trainer = Trainer(module, ONE, solver, Ftrl() if where == "dense" else SGD(), progress=False, tensorboard=False)
    trainer.train_step(BATCH)
    trainer.train_step(BATCH, 1e-3)
    before = tensors_of(trainer)
    with pytest.raises(ConfigError, match=r"FTRL divides by the learning rate, which is 0[\s\S]*step 3[\s\S]*end_lr"):
        trainer.train_step(BATCH, None if where == "schedule" else 0.0)
    assert_same_bits(tensors_of(trainer), before)
