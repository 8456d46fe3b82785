"""Replayed steps against eager ones on a CPU: counts, verdicts, what is dropped when, and shapes that come and go."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from click_model import ClickModel, assert_same_bits, make_batch, tensors_of
from replayed_on_cpu import let_replay, replays
from test_captured_step import SCHEMA, bits, differing, fixed_batch, train, train_and_settle

from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, NumericsError
from viviane.embedding import FeatureConfig, TableConfig
from viviane.ops import capture
from viviane.parallel import Group, ShardedCollection, ShardingPlan, TablePlan
from viviane.training import Trainer
from viviane.training.graph import capture as graph_capture
from viviane.training.graph import captured
from viviane.training.graph.capture_rules import ineligible_reasons

__all__ = ["replays"]
BASE = Solver(batch_size=32, lr=0.02, device="cpu", warmup_steps=5, decay_start=8, decay_steps=9, end_lr=1e-3)


def trainer_of(graph: bool | str, **settings: object) -> Trainer:
    solver = BASE.model_copy(update={"cuda_graph": graph, **settings})
    return let_replay(Trainer(ClickModel(), SCHEMA, solver, Adam(), progress=False, tensorboard=False))


SETTINGS = [{}, {"clip_grad_norm": 0.05}, {"ema_decay": 0.9}, {"ema_decay": 0.5, "clip_grad_norm": 0.05}]


def all_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that training moves, and the same under the running mean."""
    found = bits(trainer)
    with trainer.averaged():
        return found | {f"mean.{name}": one for name, one in tensors_of(trainer).items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_replays_move_as_eager_steps(replays, settings):
    eager, replayed, plain = trainer_of(False, **settings), trainer_of(True, **settings), trainer_of(False)
    results = []
    for trainer in (eager, replayed, plain):
        losses = train(trainer, range(12))
        first = all_of(trainer)  # brings the means of all rows up to date
        results.append((losses, first, train(trainer, range(12, 20)), all_of(trainer)))
    for one, other in zip(results[0], results[1], strict=True):
        assert one == other if isinstance(one, list) else not assert_same_bits(one, other)
    assert replayed.cuda_graph == "replayed: 1 shape(s) captured, 19 steps replayed"
    last, without = results[0][3], results[2][3]
    assert bool(settings) == any(not torch.equal(one, without[name]) for name, one in last.items())


@pytest.mark.parametrize("settings", [{"clip_grad_norm": 0.05, "ema_decay": 0.9}, {"clip_grad_norm": 0.05}], ids=str)
@pytest.mark.parametrize("later", [0, 1, 6])
def test_a_bad_step_takes_itself_and_later_ones_back(replays, later, settings):
    bad = {"price": [0.0] * 5 + [float("nan")] + [0.0] * 26}
    eager, replayed = trainer_of(False, **settings), trainer_of(True, **settings)
    for trainer in (eager, replayed):
        train(trainer, range(6))
        trainer.settle()
    with pytest.raises(NumericsError, match="dense column 'price', row 5"):
        train_and_settle(replayed, [fixed_batch(32, 99, **bad), *(fixed_batch(32, seed) for seed in range(later))])
    assert replayed.step == 6
    assert_same_bits(all_of(eager), all_of(replayed))


def test_steps_are_captured_again_when_changed_rows_are_noted(replays, caplog):
    """A graph that was captured before would not mark the rows that it changes, and increments would lack them."""
    trainer = trainer_of(True)
    train(trainer, range(6))
    storages = trainer.module.tables.all_storages()
    for again in (1, 1):  # the second time notes go on in the same place
        for storage in storages:
            storage.follow_changes()
        with caplog.at_level("INFO", "viviane.training.captured"):
            train(trainer, range(6, 10))
        trainer.settle()
        assert caplog.text.count("capturing the training step again") == again
    expected = torch.cat([fixed_batch(32, seed).one_hot[:, 0] for seed in range(6, 10)]).unique()
    [user] = [storage for storage in storages if "user" in storage.tables]
    assert user.changed_rows("user").tolist() == expected.tolist()


def test_a_replay_does_not_go_beside_a_step_from_python(replays):
    """It waits for all of the current stream then: only a replay says from where on it reads nothing of its batch."""
    trainer = trainer_of(True)
    train(trainer, range(4))
    overlap = trainer.stepper.captured._overlap
    assert overlap._input_done is not None
    train(trainer, range(1), num_rows=31)
    assert overlap._input_done is None
    train(trainer, range(4, 6))
    assert overlap._input_done is not None
    with pytest.raises(NumericsError, match="dense column 'price', row 5"):  # found by running the batch from Python
        train_and_settle(trainer, [fixed_batch(32, 9, price=[0.0] * 5 + [float("nan")] + [0.0] * 26)])
    assert overlap._input_done is None


def test_a_shape_that_was_recorded_in_vain_makes_the_next_one_wait_longer(replays, monkeypatch):
    monkeypatch.setattr(captured, "_MAX_GRAPHS", 2)
    recorded = []
    record = replays.record
    monkeypatch.setattr(replays, "record", lambda self, batch, precision: (
        recorded.append(batch.size), record(self, batch, precision))[1])  # fmt: skip
    trainer = trainer_of("auto")
    for turn in range(24):
        for rows in range(4, 12):  # eight shapes in turn, of which two can be kept
            trainer.train_step(fixed_batch(rows, turn))
    # After 3 steps of a shape, then 6, 12, 24: of 192 steps two graphs and three that took the place of others.
    assert len(recorded) <= 5
    assert torch.isfinite(trainer.train_step(fixed_batch(4, 0)))


def test_a_checkpoint_drops_graphs_and_a_table_that_was_replaced_does(replays, tmp_path):
    trainer = trainer_of(True)
    train(trainer, range(4))
    trainer.save_checkpoint(tmp_path / "c")
    steps = trainer.stepper.captured
    assert len(steps._graphs) == 1
    trainer.load_checkpoint(tmp_path / "c")
    assert not steps._graphs
    train(trainer, range(2))
    assert len(steps._graphs) == 1
    ages = trainer.module.tables.all_storages()[0].steps
    content = trainer.module.tables.export_table("user")
    trainer.module.tables.import_table("user", content)
    assert ages.were_set
    trainer.train_step(fixed_batch(32, 9))
    assert steps.num_captured == 0


def test_an_end_of_the_group_lets_graphs_go(replays):
    trainer = trainer_of(True)
    train(trainer, range(4))
    group, steps = trainer.group, trainer.stepper.captured
    held = next(iter(steps._graphs.values())).graph  # as by a frame of some error's traceback
    Group().let_go()  # torch takes all groups down together
    assert held.replay is None
    graph = weakref.ref(held)
    del held
    gc.collect()
    assert graph() is None
    assert trainer.cuda_graph == "replayed: 1 shape(s) captured, 3 steps replayed"
    train(trainer, range(4, 8))
    assert steps._graphs
    group.let_go()  # those of later recordings, too
    assert not steps._graphs
    del trainer, steps
    gc.collect()
    group.let_go()  # of a trainer that is gone nothing is asked


def test_a_group_forgets_methods_of_objects_that_are_gone():
    class Holder:
        called = 0

        def let_go(self):
            Holder.called += 1

    group, one, other = Group(), Holder(), Holder()
    group.before_end(one.let_go)
    group.before_end(one.let_go)
    group.before_end(other.let_go)
    del other
    group.let_go()
    group.let_go()
    assert Holder.called == 1


def test_why_steps_are_not_recorded_is_said_once(replays, monkeypatch, caplog):
    reasons = {"now": "the module is a custom module"}
    monkeypatch.setattr(captured, "ineligible_reason", lambda step: reasons["now"])
    trainer = trainer_of("auto")
    train(trainer, range(3))
    for table in ("user", "item"):  # what a recording takes for given changes: it is asked again
        trainer.module.tables.freeze(table)
        train(trainer, range(3, 5))
    assert [one.message for one in caplog.records] == ["training step: eager: the module is a custom module"]
    reasons["now"] = "the module has hooks"
    trainer.module.tables.unfreeze("user")
    train(trainer, range(5, 7))
    assert [one.message for one in caplog.records][1:] == ["training step: eager: the module has hooks"]


def test_a_recording_that_fails_is_an_error_or_leaves_steps_eager(replays):
    replays.failure = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(ConfigError, match="could not be captured in a CUDA graph"):
        train(trainer_of(True), range(3))
    eager, trainer = trainer_of(False), trainer_of("auto")
    train(eager, range(8))
    train(trainer, range(8))
    assert trainer.cuda_graph == "eager: capture failed: operation not permitted when stream is capturing"
    assert differing(eager, trainer) == []


def test_dense_steps_are_counted_only_where_something_is_trained(replays):
    eager, replayed = trainer_of(False), trainer_of(True)
    for trainer in (eager, replayed):
        for parameter in trainer.module.net.parameters():
            parameter.requires_grad_(False)
        train(trainer, range(4))
        for parameter in trainer.module.net.parameters():
            parameter.requires_grad_(True)
        train(trainer, range(4, 8))
    assert tensors_of(eager)["optimizer.step"] == tensors_of(replayed)["optimizer.step"] == 4
    assert differing(eager, replayed) == []
    assert torch.isfinite(eager.train_step(make_batch(8)))


def test_a_part_that_is_added_begins_anew(replays):
    """Its mode and hooks count from then on: nobody walks over all modules at every step."""
    trainer = trainer_of(True)
    train(trainer, range(3))
    steps = trainer.stepper.captured
    assert steps.num_captured == 1
    extra = torch.nn.Identity()
    trainer.module.net.append(extra)
    train(trainer, range(3, 4))
    assert steps.num_captured == 0
    train(trainer, range(4, 6))
    assert steps.num_captured == 1
    extra.register_forward_hook(lambda *_: None)
    train(trainer, range(6, 7))
    assert steps.num_captured == 0


def test_a_frozen_weight_that_no_kernel_moves_keeps_steps_from_being_recorded():
    """One kernel moves all dense weights or none: a step without it would pass by the gate of its updates."""
    module = ClickModel()
    module.register_parameter("wide", torch.nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False))
    step = Trainer(module, SCHEMA, BASE, Adam(), progress=False, tensorboard=False).stepper
    assert step.optimizer.mover is None
    assert "dense parameters: only float32 parameters have a kernel" in list(ineligible_reasons(step))


def test_what_a_branch_reads_is_kept_until_branches_are_joined(monkeypatch):
    class Stream:
        def wait_stream(self, other):
            self.waited = other

        def record_event(self):
            return None

    device, main, side = torch.device("cpu"), Stream(), Stream()
    monkeypatch.setattr(capture, "is_capturing", lambda device: True)
    monkeypatch.setattr(capture, "_stream", lambda device, name, priority: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    gradient = torch.ones(4)
    kept = weakref.ref(gradient)
    with capture.branch(device, "look", reads=(gradient,)):
        pass
    del gradient
    assert kept() is not None
    capture.join_branches(device)
    assert kept() is None


def test_a_branch_of_the_same_gpu_by_another_name_is_joined(monkeypatch):
    """A solver says "cuda", a tensor "cuda:0"; what is not joined makes the capture fail."""

    class Stream:
        wait_stream = record_event = lambda self, *_: None

    waited, side = [], Stream()
    monkeypatch.setattr(capture, "is_capturing", lambda device: True)
    monkeypatch.setattr(capture, "_stream", lambda device, name, priority: side)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=waited.append))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for one, other in (("cuda:0", "cuda"), ("cuda", "cuda:0")):
        with capture.branch(torch.device(one), "sums"):
            pass
        capture.join_branches(torch.device(other))
    assert waited == [side, side]


def test_what_is_made_ahead_is_taken_once_and_waited_for(monkeypatch):
    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            pass

        def wait_event(self, event):
            self.waited.append(event)

        def record_event(self):
            return next(events)

    events, device, main, side = iter("ab"), torch.device("cpu"), Stream(), Stream()
    capture.run_ahead(device, "first", lambda: pytest.fail("no graph is recorded"))
    monkeypatch.setattr(capture, "is_capturing", lambda device: True)
    monkeypatch.setattr(capture, "_stream", lambda device, name, priority: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    made = torch.ones(1)
    capture.run_ahead(device, "first", lambda: made)
    capture.run_ahead(device, "nobody's", lambda: torch.zeros(1))
    assert capture.take_ahead(device, "another") is None
    assert main.waited == []
    assert capture.take_ahead(device, "first") is made
    assert main.waited == ["a"]
    assert capture.take_ahead(device, "first") is None
    capture.join_ahead(device)
    assert main.waited == ["a", "b"]
    capture.join_ahead(device)
    assert main.waited == ["a", "b"]


class Graph:
    def __init__(self):
        self.was_reset = False

    def reset(self):
        self.was_reset = True


@pytest.mark.parametrize(
    ("first", "fails", "was_taken", "elsewhere", "again"),
    [
        (True, False, True, False, False),
        (True, False, False, False, True),
        (True, False, True, True, True),
        (False, False, False, False, False),
        (False, True, False, False, True),
    ],
    ids=["taken", "not taken", "not taken by another process", "nothing to resolve", "failed"],
)
def test_keys_are_not_resolved_ahead_where_that_is_in_vain(first, fails, was_taken, elsewhere, again):
    """All ranks then capture again without it, for this shape and all later ones."""
    recorder = graph_capture.GraphCapture.__new__(graph_capture.GraphCapture)
    group = SimpleNamespace(gather_data=lambda own: [own, elsewhere])
    recorder.step, recorder._separates_input = SimpleNamespace(group=group), True
    graphs, asked = [Graph(), Graph()], []

    def record(batch, precision):
        asked.append(recorder._separates_input)
        has_first = first and recorder._separates_input
        recorder._input_graph_is_unused = recorder._separates_input and (fails or (has_first and not was_taken))
        if fails and recorder._separates_input:
            return None, ValueError("the batch lacks a feature")
        return graph_capture.CapturedGraph(graphs[0], None, None, None, [], graphs[1] if has_first else None), None

    recorder._record = record
    batch = SimpleNamespace(wait=lambda: None)
    made, failure = recorder.record(batch, None)
    assert failure is None
    assert asked == ([True, False] if again else [True])
    assert (made.first is None) == (again or not first)
    assert [one.was_reset for one in graphs] == [again and first] * 2
    recorder.record(batch, None)
    assert asked[-1] != again


@pytest.mark.parametrize(
    ("setting", "reason", "asks"),
    [
        (True, "the processes are on several machines", 1),
        (True, None, 1),
        ("auto", "the processes are on several machines", 1),
        ("auto", None, 1),
        (False, None, 0),
    ],
)
def test_memory_of_other_gpus_is_asked_for_as_the_solver_says(setting, reason, asks):
    """True refuses what prevents it, "auto" leaves the exchange to NCCL then; nothing asks where it is False."""
    plan = ShardingPlan(world_size=1, tables=[TablePlan(table="item", kind="table", ranks=[0])])
    tables = [TableConfig(name="item", num_rows=4, dim=2)]
    emb = ShardedCollection(tables, [FeatureConfig(name="item", table="item")], Adam(), plan=plan)
    asked = []

    def open_peers():
        asked.append(1)
        return reason

    emb.exchanges.open_peers = open_peers
    recorder = graph_capture.GraphCapture.__new__(graph_capture.GraphCapture)
    solver = BASE.model_copy(update={"peer_memory": setting})
    recorder.step = SimpleNamespace(solver=solver, collections={"emb": emb}, group=Group())
    if setting is True and reason is not None:
        with pytest.raises(ConfigError, match=r"solver.peer_memory[\s\S]*several machines[\s\S]*'auto'"):
            recorder._open_peers()
    else:
        recorder._open_peers()
    assert len(asked) == asks


def test_a_fixed_loss_scale_is_replayed(replays):
    settings = {"precision": "fp16", "loss_scale": 1024.0, "clip_grad_norm": 0.05}
    eager, replayed = trainer_of(False, **settings), trainer_of(True, **settings)
    train(eager, range(8))
    train(eager, range(8))
    train(replayed, range(8))
    train(replayed, range(8))
    assert differing(eager, replayed) == []
    assert replayed.stepper.captured.num_replays == 15
    before = bits(replayed)
    replayed.stepper.loss_scale.value = 2.0**24
    with pytest.raises(NumericsError, match=r"loss scale of 1.67772e\+07[\s\S]*dynamic"):
        train_and_settle(replayed, [fixed_batch(32, seed) for seed in range(3)])
    assert all(torch.equal(before[name], one) for name, one in bits(replayed).items())
    assert replayed.step == 16
