"""Static sizes of `fit` over several ranks: the same weights as with exchanged sizes."""

import faulthandler
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import group_model
import processes
from group_model import NUM_TRAIN, NUM_VALID, SCHEMA, columns, settings, tensors_of
from test_group import ROUNDING, close

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, DataError, KeyRangeError, NumericsError, ProcessError
from viviane.data import Dataset, write_dataset
from viviane.parallel import Group
from viviane.schema import Schema
from viviane.training import Callback
from viviane.training.graph.capture_rules import shape_mismatch_reason
from viviane.training.graph.captured import CapturedSteps
from viviane.training.step.program import Diagnosis

HOTNESS = 3


def even(num_rows, seed):
    """Columns whose bags have three ids each."""
    seen = np.random.default_rng(seed).integers(3, 31, (num_rows, HOTNESS)).tolist()
    return {**columns(num_rows, seed), "seen": seen}


def schema_of(hotness):
    content = SCHEMA.to_dict()
    content["categorical"][2]["hotness"] = hotness
    return Schema.from_dict(content)


def make_data(folder):
    for name, rows, seed in (("train", NUM_TRAIN, 1), ("valid", NUM_VALID, 2)):
        for kind, hotness in (("said", HOTNESS), ("unsaid", None)):
            write_dataset(folder / kind / name, schema_of(hotness), [even(rows, seed)], rows_per_group=64)


def make_trainer(group, solver, schema, **options):
    """A trainer on a schema of its own."""
    before = group_model.SCHEMA
    group_model.SCHEMA = schema
    try:
        return group_model.make_trainer(group, solver, **options)
    finally:
        group_model.SCHEMA = before


class Watch(Callback):
    """Notes for every step whether its shapes were static; requests a stop after one of them."""

    def __init__(self, stop_at=0, rank=0):
        self.fixed, self.stop_at, self.rank = [], stop_at, rank

    def on_fit_start(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, loss):
        self.fixed.append(self.trainer.stepper.sync.is_static)
        if step == self.stop_at and self.trainer.group.rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(folder, group, kind, solver, watch=None, **options):
    callbacks = {} if watch is None else {"callbacks": [watch]}
    trainer = make_trainer(group, solver, schema_of(HOTNESS if kind == "said" else None), **callbacks, **options)
    data = folder / kind
    trainer.fit(Dataset(data / "train"), Dataset(data / "valid"), resume="run_folder" in options)
    return trainer


def differing(one, other):
    a, b = tensors_of(one), tensors_of(other)
    return [name for name in a if not torch.equal(a[name], b[name])]


def alike(group, folder):
    """Evaluations, a running mean and clipping between steps; against exchanged sizes and against one process."""
    changes = {"eval_every": 7, "ema_decay": 0.9, "epochs": 2}
    note, options = Watch(), {"log_every": 5}
    truth = fit(folder, Group(), "said", settings(**changes), **options)
    free = fit(folder, group, "said", settings(**changes), **options)
    said = fit(folder, group, "said", settings(**changes, fixed_sizes=True), note, **options)
    assert note.fixed == ([True] * 16 + [False]) * 2
    assert not said.stepper.sync.is_static
    assert said.step == truth.step == 34
    for other in (free, truth):
        close(tensors_of(said), tensors_of(other))
        assert len(said.history.rows) == len(other.history.rows)
        for row, expected in zip(said.history.rows, other.history.rows, strict=True):
            for name in ("loss", "log_loss"):
                if name in expected:
                    assert row[name] == pytest.approx(expected[name], rel=ROUNDING[name]), (name, row, expected)
        with said.averaged(), other.averaged():
            close(tensors_of(said), tensors_of(other))


def stopped_and_resumed(group, folder, run):
    """A request to stop travels with the gradients: six steps later all processes stop, and go on to the same bits."""
    straight = fit(folder, group, "said", settings(epochs=2, fixed_sizes=True), dropout=0.3)
    # After step 5 of the last rank: said in 6, heard in 12. After 15: said in 16; before the short batch, the 17th,
    # all that was said is heard. Then to step 20 by max_steps, to 30 by a request, and to the end.
    plan = [(5, 12, "interrupted"), (15, 17, "interrupted"), (0, 20, "max_steps"), (23, 30, "interrupted")]
    for stop_at, last, stopped in [*plan, (0, 34, "epochs")]:
        solver = settings(epochs=2, fixed_sizes=True, max_steps=20 if last == 20 else None)
        note = Watch(stop_at, group.size - 1)
        trainer = fit(folder, group, "said", solver, note, dropout=0.3, run_folder=run)
        assert (trainer.step, trainer.history.stopped) == (last, stopped)
        assert not trainer.stepper.sync.is_static
    assert differing(straight, trainer) == []


def own_batch(group, step, size=8):
    return Batch.from_columns(schema_of(HOTNESS), even(size, 10 * step + group.rank), origin=f"batch {step}")


def loop_of_ones_own(group):
    """`Trainer.fix_sizes`: what it takes, what it refuses, and what batches must then be."""
    rows = 8 * group.size
    trainer = make_trainer(group, settings(), schema_of(HOTNESS))
    trainer.train_step(own_batch(group, 0, size=3 + group.rank))
    trainer.fix_sizes(rows)
    collection = trainer.module.tables
    assert (collection.batch_size, collection.hotness) == (8, {"seen": HOTNESS})
    trainer.train_step(own_batch(group, 1))
    assert trainer.stepper.num_rows == rows
    with pytest.raises(DataError, match=r"static batch shape[\s\S]*batch 2[\s\S]*trainer.fix_sizes"):
        trainer.train_step(own_batch(group, 2, size=7))
    longer = Batch.from_columns(SCHEMA, {**even(8, 0), "seen": [[3, 4]] * 8})
    with pytest.raises(DataError, match=r"number of ids[\s\S]*column 'seen'[\s\S]*3 per row"):
        trainer.train_step(longer)
    trainer.fix_sizes(None)
    trainer.train_step(own_batch(group, 3, size=group.rank))
    with pytest.raises(ConfigError, match="is not divisible by"):
        trainer.fix_sizes(rows + 1)
    unsaid = make_trainer(group, settings(), SCHEMA)
    with pytest.raises(ConfigError, match="bags of 'seen' have no fixed hotness"):
        unsaid.fix_sizes(rows)
    unsaid.fix_sizes(rows, {"seen": HOTNESS})
    unsaid.train_step(own_batch(group, 1))


def one_nan_stops_all(group):
    """No process is asked before the step, and all of them refuse it with the words of the one that has the number."""
    trainer = make_trainer(group, settings(), schema_of(HOTNESS))
    trainer.fix_sizes(8 * group.size)
    trainer.train_step(own_batch(group, 0))
    before, bad = tensors_of(trainer), even(8, group.rank)
    if group.rank == group.size - 1:
        bad["price"][5, 1] = np.nan
    with pytest.raises(NumericsError, match=rf"rank {group.size - 1}: the loss is nan: dense column 'price', row 5"):
        trainer.train_step(Batch.from_columns(schema_of(HOTNESS), bad))
    after = tensors_of(trainer)
    assert trainer.step == 1
    assert all(torch.equal(after[name], part) for name, part in before.items())
    trainer.train_step(own_batch(group, 1))


def settings_that_are_refused(group, folder):
    for kind, changes, words in (
        ("unsaid", {}, "bags of 'seen' have no fixed hotness"),
        ("said", {"batch_size": 31}, "batch_size 31 is not divisible"),
    ):
        with pytest.raises(ConfigError, match=rf"{words}[\s\S]*set fixed_sizes='auto'"):
            fit(folder, group, kind, settings(fixed_sizes=True, **changes))


def dense_sums_in_sixteen_bits(group):
    whole, half = (
        make_trainer(group, settings(dense_wire_dtype=kind), schema_of(HOTNESS)) for kind in ("float32", "bfloat16")
    )
    for step in range(5):
        losses = [float(trainer.train_step(own_batch(group, step))) for trainer in (whole, half)]
        # Adam's steps of lr 0.01 are of one size: a gradient near 0 that rounding turns moves a weight by 2 lr a step.
        assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert half.stepper.exchange.wire_dtype is torch.bfloat16
    assert "net.0.weight" in differing(whole, half)


class FakeSteps(CapturedSteps):
    """The decisions of a recorded step, on a device that records nothing: a replay is the eager step."""

    def __init__(self, step, *, fails=False):
        super().__init__(step)
        self.reason, self._is_disabled, self.fails, self.seen, self.warned = None, False, fails, [], []
        step.captured = self

    def __call__(self, batch, step, precision, lr):
        self.seen.append("eager")
        return super().__call__(batch, step, precision, lr)

    def _reset_if_changed(self):
        pass

    def _record(self, key, batch, precision):
        if not self._all_captured(RuntimeError("no memory\nat all") if self.fails else None):
            return None
        self._graphs[key] = object()
        self.num_captured += 1
        return self._graphs[key]

    def _fail(self, reason, error):
        self._capture_failure = self.reason = reason

    def _warn_eager(self, reason):
        self.warned.append(reason)

    def _replay(self, found, batch, step, precision, lr):
        self.seen[-1] = "replay"


def decisions(group, folder, *, fails=False, kind="said", between=None, **changes):
    """Return what a fit did in each of its steps: in all processes the same."""
    callbacks = [] if between is None else [between]
    schema = schema_of(HOTNESS if kind == "said" else None)
    trainer = make_trainer(group, settings(**{"epochs": 1, **changes}), schema, callbacks=callbacks)
    fake = FakeSteps(trainer.stepper, fails=fails and group.rank == group.size - 1)
    trainer.fit(Dataset(folder / kind / "train"))
    every = group.gather_data([fake.seen, fake.describe()])
    assert all(one == every[0] for one in every)
    # Only lasting reasons are logged, not that the last batch of an epoch is shorter.
    lasts = fake.describe().startswith("eager: several processes")
    assert {f"eager: {reason}" for reason in fake.warned} == ({fake.describe()} if lasts else set())
    return fake.seen, fake.describe()


class Loads(Callback):
    """Goes back to a checkpoint of its own after step 10."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, loss):
        if step == 10:
            self.trainer.save_checkpoint(self.folder)
            self.trainer.stepper.load(self.folder)


def alike_decisions(group, folder, run):
    """Every process records and replays in the same steps, also where one of them cannot record."""
    first = ["eager"] * 3 + ["replay"] * 13 + ["eager"]
    seen, words = decisions(group, folder, fixed_sizes=True, epochs=2)
    assert seen == first + ["replay"] * 16 + ["eager"]
    assert words.startswith("replayed: 1 shape(s)")
    seen, words = decisions(group, folder, fixed_sizes=True, fails=True)
    assert seen == ["eager"] * 17
    assert words == f"eager: capture failed on rank {group.size - 1}: no memory"
    seen, _ = decisions(group, folder, fixed_sizes=True, between=Loads(run))
    assert seen == ["eager"] * 3 + ["replay"] * 7 + ["eager"] * 3 + ["replay"] * 3 + ["eager"]
    for kind, changes, why in (
        ("said", {}, "on CPUs only solver.fixed_sizes=True makes them static"),
        ("said", {"fixed_sizes": False}, "solver.fixed_sizes is False"),
    ):
        seen, words = decisions(group, folder, kind=kind, **changes)
        assert set(seen) == {"eager"}
        assert words == f"eager: several processes train together, and batch shapes are not static: {why}"


def bags_that_no_table_reads(group):
    """Their lengths differ from process to process, and so would the shapes that a graph is found by."""
    trainer = make_trainer(group, settings(), schema_of(HOTNESS))
    assert "trainer.fix_sizes was not called" in shape_mismatch_reason(trainer.stepper, own_batch(group, 0))
    trainer.fix_sizes(8 * group.size)
    batch = own_batch(group, 0)
    assert shape_mismatch_reason(trainer.stepper, batch) is None
    more = replace(batch, bags={**batch.bags, "liked": Bag.from_lists([[3]] * 8)})
    assert "bags of 'liked' have no fixed hotness" in shape_mismatch_reason(trainer.stepper, more)
    trainer.fix_sizes(None)
    assert "shorter" in shape_mismatch_reason(trainer.stepper, batch)


def one_key_is_told_to_all(group):
    """The check of a refused step: each process raises, the others with the words of the one that has the key."""
    trainer = make_trainer(group, settings(), schema_of(HOTNESS))
    Diagnosis(trainer.stepper, 1).check_keys()
    if group.rank == group.size - 1:

        def check():
            raise KeyRangeError("key out of range", where="feature 'user'", value=60)

        trainer.module.tables.check = check
    kind = KeyRangeError if group.rank == group.size - 1 else ProcessError
    words = "" if kind is KeyRangeError else f"rank {group.size - 1}: "
    with pytest.raises(kind, match=rf"^{words}key out of range[\s\S]*'user'[\s\S]*60"):
        Diagnosis(trainer.stepper, 1).check_keys()


def everything(folder, run):
    faulthandler.dump_traceback_later(500)  # of a process that hangs
    group = Group.world()
    alike(group, folder)
    stopped_and_resumed(group, folder, run / "run")
    loop_of_ones_own(group)
    one_nan_stops_all(group)
    settings_that_are_refused(group, folder)
    dense_sums_in_sixteen_bits(group)
    alike_decisions(group, folder, run / "loaded")
    bags_that_no_table_reads(group)
    one_key_is_told_to_all(group)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sizes")
    make_data(made)
    return made


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fits_with_sizes_said_beforehand(size, folder, tmp_path):
    processes.run(size, everything, folder, tmp_path)
