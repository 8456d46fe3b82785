"""A recorded training step against the eager one, to the bit, and what a bad batch does to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from click_model import SCHEMA, ClickModel, columns, make_trainer, tensors_of
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import SGD, Adadelta, AdaGrad, Adam, Adamax, Ftrl, RMSProp, Solver
from viviane.core.errors import ConfigError, KeyRangeError, NumericsError
from viviane.training import Trainer
from viviane.training.graph.static_batch import StaticBatch, batch_shape

ON_GPU = torch.cuda.is_available()
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
BASE = Solver(batch_size=32, lr=0.02, device="cuda", warmup_steps=5, decay_start=8, decay_steps=9, end_lr=1e-3)
RULES = {
    "sgd": SGD(weight_decay=1e-3),
    "momentum": SGD(momentum=0.9),
    "nesterov": SGD(momentum=0.9, nesterov=True),
    "adagrad": AdaGrad(initial_accumulator=0.1),
    "rmsprop": RMSProp(epsilon_inside_root=True),
    "adamax": Adamax(),
    "adadelta": Adadelta(),
    "adam": Adam(weight_decay=1e-3),
    "ftrl": Ftrl(lambda1=1e-3, lambda2=0.1, beta=1.0),
}


def fixed_batch(num_rows: int = 32, seed: int = 0, **changed: object) -> Batch:
    """Rows with three ids each in the bag feature, so that all batches of a size are alike."""
    seen = np.random.default_rng(seed).integers(3, 30, (num_rows, 3)).tolist()
    return Batch.from_columns(SCHEMA, {**columns(num_rows, seed), "seen": seen, **changed}, origin=f"batch {seed}")


def trainer_of(graph: bool | str, rule: object = None, **settings: object) -> Trainer:
    solver = BASE.model_copy(update={"cuda_graph": graph, **settings})
    return Trainer(ClickModel(), SCHEMA, solver, rule or Adam(), progress=False, tensorboard=False)


def bits(trainer: Trainer) -> dict[str, Tensor]:
    trainer.settle()
    return {name: one.cpu() for name, one in tensors_of(trainer).items()}


def differing(one: Trainer, other: Trainer) -> list[str]:
    a, b = bits(one), bits(other)
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def train(trainer: Trainer, seeds: range, num_rows: int = 32) -> list[float]:
    return [float(trainer.train_step(fixed_batch(num_rows, seed))) for seed in seeds]


def train_and_settle(trainer: Trainer, batches: list[Batch]) -> None:
    for batch in batches:
        trainer.train_step(batch)
    trainer.settle()


# Any machine --------------------------------------------------------------------------------------------


def test_batches_are_alike_by_their_shapes_alone():
    one, other = fixed_batch(8, 1), fixed_batch(8, 2)
    assert batch_shape(one) == batch_shape(other)
    assert batch_shape(one) != batch_shape(fixed_batch(9, 1))
    longer = fixed_batch(8, 1, seen=[[3]] * 7 + [[3, 4]])
    assert batch_shape(one) != batch_shape(longer)


def test_a_static_batch_takes_every_number_of_the_next():
    first, second = fixed_batch(8, 1), fixed_batch(8, 2)
    static = StaticBatch(first)
    places = [static.batch.labels, static.batch.dense, static.batch.one_hot, static.batch.bags["seen"].values]
    addresses = [one.data_ptr() for one in places]
    static.fill(torch.tensor(static.words(static.sources(second)), dtype=torch.int64))
    truth = [second.labels, second.dense, second.one_hot, second.bags["seen"].values]
    assert all(torch.equal(a, b) for a, b in zip(places, truth, strict=True))
    assert [one.data_ptr() for one in places] == addresses
    assert not torch.equal(first.dense, second.dense)


def test_a_cpu_says_why_it_records_nothing():
    trainer = make_trainer()
    trainer.train_step(fixed_batch())
    assert trainer.cuda_graph == "eager: no GPU: training runs on cpu"
    with pytest.raises(ConfigError, match=r"cannot be captured in a CUDA graph\n  where:   solver.cuda_graph"):
        make_trainer(Solver(device="cpu", cuda_graph=True))


# A GPU --------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"precision": "tf32"}, {"precision": "fp16", "loss_scale": 1024.0}],
    ids=lambda one: one.get("precision", "fp32"),
)
@pytest.mark.parametrize("name", RULES)
def test_replays_give_the_bits_of_eager_steps(name, settings):
    eager, recorded = (trainer_of(graph, RULES[name], **settings) for graph in (False, True))
    losses = []
    for trainer in (eager, recorded):  # one after the other: dropout draws from one generator
        losses.append(train(trainer, range(20)))
    assert losses[0] == losses[1]
    assert differing(eager, recorded) == []
    assert recorded.cuda_graph == "replayed: 1 shape(s) captured, 19 steps replayed"
    assert eager.cuda_graph == "eager: solver.cuda_graph is False"
    assert len(set(losses[0])) == 20


@gpu
@pytest.mark.parametrize("settings", [{"clip_grad_norm": 0.05}, {"ema_decay": 0.9, "clip_grad_norm": 0.05}], ids=str)
def test_clipping_and_running_means_in_a_graph(settings):
    eager, recorded = trainer_of(False, **settings), trainer_of(True, **settings)
    found = []
    for trainer in (eager, recorded):
        losses = train(trainer, range(20))
        moved = bits(trainer)
        with trainer.averaged():
            found.append((losses, moved, {name: one.cpu() for name, one in tensors_of(trainer).items()}))
    assert recorded.stepper.captured.num_replays == 19
    assert found[0][0] == found[1][0]
    for one, other in ((found[0][i], found[1][i]) for i in (1, 2)):
        assert [name for name in one if one[name].numpy().tobytes() != other[name].numpy().tobytes()] == []
    plain = trainer_of(False)
    train(plain, range(20))
    assert differing(plain, eager) != []


@gpu
def test_shapes_evaluations_and_freezing_between_replays(valid):
    eager, recorded = trainer_of(False), trainer_of(True)
    scores = []
    for trainer in (eager, recorded):
        train(trainer, range(4))
        train(trainer, range(4, 6), num_rows=7)  # the uneven last batch
        scores.append(trainer.evaluate(valid))
        train(trainer, range(6, 9))
        trainer.module.tables.freeze("user")
        train(trainer, range(9, 12))
        trainer.module.tables.unfreeze("user")
        trainer.module.net[0].bias.requires_grad_(False)
        train(trainer, range(12, 15))
    assert scores[0] == scores[1]
    assert differing(eager, recorded) == []
    assert recorded.stepper.captured.num_replays == 3 + 1 + 3 + 2 + 2


@gpu
def test_a_run_resumes_from_a_checkpoint_to_the_bit(tmp_path):
    whole, first, second = trainer_of(True), trainer_of(True), trainer_of(True)
    train(whole, range(12))
    train(first, range(6))
    first.save_checkpoint(tmp_path / "c")
    train(second, range(50, 53))  # has a graph of its own already
    second.load_checkpoint(tmp_path / "c")
    train(second, range(6, 12))
    assert second.step == 12
    assert differing(whole, second) == []


@gpu
@pytest.mark.parametrize("later", [0, 1, 6])
@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"price": [0.0] * 5 + [float("nan")] + [0.0] * 26}, NumericsError, "dense column 'price', row 5"),
        ({"user": [9] * 31 + [77]}, KeyRangeError, r"feature 'user', table 'user', row 31.*batch 99"),
    ],
)
def test_a_bad_batch_moves_nothing_and_is_named(bad, error, match, later):
    eager, recorded = trainer_of(False), trainer_of(True)
    for trainer in (eager, recorded):
        train(trainer, range(6))
    with pytest.raises(error, match=match):
        train_and_settle(recorded, [fixed_batch(32, 99, **bad), *(fixed_batch(32, seed) for seed in range(later))])
    assert recorded.step == 6
    assert differing(eager, recorded) == []
    torch.cuda.manual_seed(5)  # the refused steps drew dropout
    train(recorded, range(6, 9))
    torch.cuda.manual_seed(5)
    train(eager, range(6, 9))
    assert differing(eager, recorded) == []


@gpu
def test_bad_gradients_are_found_in_the_graph():
    class Bad(ClickModel):
        def forward(self, batch):
            x = torch.cat([self.tables(batch).flat, batch.dense], 1)
            price = batch.dense_feature("price")
            # The square root's slope is infinite at 0, and the loss is not.
            return self.net(x) + 0 * x[:, :1] * (price.clamp_min(0) * (1 + x[:, :1])).sqrt()

    trainer = Trainer(Bad(), SCHEMA, BASE.model_copy(update={"cuda_graph": True}), Adam(), progress=False)
    good = {"price": [1.0] * 32}
    for seed in range(4):
        trainer.train_step(fixed_batch(32, seed, **good))
    before = bits(trainer)
    with pytest.raises(NumericsError, match="gradients are NaN or infinite: those of feature 'user'"):
        train_and_settle(trainer, [fixed_batch(32, 5, price=[0.0] * 32)])
    after = bits(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@gpu
def test_auto_records_known_layers_and_says_what_stops_it():
    trainer = trainer_of("auto")
    train(trainer, range(6))
    assert "(ClickModel) is a custom module" in trainer.cuda_graph

    class Waits(ClickModel):
        def forward(self, batch):
            return super().forward(batch) * (1.0 if float(batch.dense.sum()) < 1e9 else 0.5)

    solver = BASE.model_copy(update={"cuda_graph": True})
    trainer = Trainer(Waits(), SCHEMA, solver, Adam(), progress=False)
    with pytest.raises(ConfigError, match=r"could not be captured(.|\n)*remove GPU synchronization"):
        train(trainer, range(3))
    assert torch.isfinite(trainer.train_step(fixed_batch()))
    hooked = trainer_of(True)
    train(hooked, range(3))
    handle = hooked.module.net[0].register_forward_hook(lambda *_: None)
    train(hooked, range(3))
    assert hooked.cuda_graph == "eager: module 'net.0' has hooks, which a replay does not run"
    handle.remove()
    train(hooked, range(3))
    assert hooked.cuda_graph.startswith("replayed")


@gpu
def test_a_module_without_tables_is_recorded_too():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)

        def forward(self, batch):
            return self.layer(batch.dense)

    trainers = []
    for graph in (False, True):
        solver = BASE.model_copy(update={"cuda_graph": graph, "clip_grad_norm": 0.01})
        trainers.append(Trainer(Plain(), SCHEMA, solver, Adam(), progress=False))
        train(trainers[-1], range(8))
    assert differing(*trainers) == []
    assert trainers[1].stepper.captured.num_replays == 7


@gpu
def test_a_batch_that_is_on_its_way_is_waited_for():
    """A loop copies batches on a stream of its own; steps from Python and replays take them once they are there."""
    plain, *others = (trainer_of(graph) for graph in (False, False, True))
    truth = train(plain, range(12))
    copies = torch.cuda.Stream()
    for trainer in others:
        losses, held = [], [fixed_batch(32, seed).pin_memory() for seed in range(12)]
        for batch in held:
            with torch.cuda.stream(copies):
                torch.cuda._sleep(5_000_000)  # some milliseconds
                there = batch.to("cuda", non_blocking=True)
                event = copies.record_event()
            losses.append(trainer.train_step(there.ready_after(event)))
            del there
        assert [float(one) for one in losses] == truth
        assert differing(plain, trainer) == []
    assert others[1].stepper.captured.num_replays == 11


@gpu
def test_batches_whose_tensors_lie_anywhere_are_taken_as_they_are():
    """Columns of wider tensors, and rows that begin at no multiple of 16 bytes: what a graph cannot read is copied."""
    eager, recorded = (trainer_of(graph) for graph in (False, True))
    losses: list[list[float]] = []
    for trainer in (eager, recorded):
        losses.append([])
        for seed in range(12):
            batch = fixed_batch(32, seed).to("cuda")
            wide = torch.zeros(32, batch.dense.shape[1] + 3, device="cuda")
            wide[:, 3:] = batch.dense
            ids = torch.zeros(batch.one_hot.numel() + 1, dtype=batch.one_hot.dtype, device="cuda")
            ids[1:] = batch.one_hot.flatten()
            moved = replace(batch, dense=wide[:, 3:], one_hot=ids[1:].view(batch.one_hot.shape))
            del wide, ids
            losses[-1].append(float(trainer.train_step(moved)))
    assert losses[0] == losses[1]
    assert differing(eager, recorded) == []
    assert recorded.stepper.captured.num_replays == 11
