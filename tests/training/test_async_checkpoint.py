"""Checkpoints written beside training: the same bits as synchronous ones, named errors, never a partial one."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from click_model import assert_same_bits, make_trainer, tensors_of

from viviane.config import Solver
from viviane.core.errors import CheckpointError
from viviane.data import Dataset
from viviane.embedding import Storage, row_snapshot
from viviane.training import Callback, Trainer, read_manifest, verify_checkpoint
from viviane.training.checkpoint.background import BackgroundWriter
from viviane.training.checkpoint.held_rows import HeldRows
from viviane.training.checkpoint.store import CheckpointStore
from viviane.training.checkpoint.tools import compare_checkpoints

HERE = Path(__file__).parent


def solver(**changes):
    base = {"batch_size": 16, "epochs": 2, "checkpoint_every": 9, "keep_checkpoints": 20, "num_threads": 1}
    return Solver(**{**base, "lr": 0.01, "device": "cpu", "async_checkpoint": True, **changes})


class SlowDisk:
    """A writer that reads each table half, and then waits for training: for a step, or for being waited for.

    Attributes:
        kept: bytes that steps kept of each table while it was being written.
    """

    def __init__(self, monkeypatch):
        self.kept, self._moved = [], threading.Condition()
        self._steps, self._awaited = 0, False
        pieces, step = HeldRows.pieces, Trainer.train_step

        def slowly(held):
            for number, piece in enumerate(pieces(held)):
                yield piece
                if number == 1:
                    self._next_step()
            self.kept.append(held._snapshot.kept_bytes)

        def stepping(trainer, batch):
            loss = step(trainer, batch)
            with self._moved:
                self._steps += 1
                self._moved.notify_all()
            return loss

        def waited_for(wait):
            def waiting(*given):
                with self._moved:
                    self._awaited = True
                    self._moved.notify_all()
                wait(*given)
                self._awaited = False

            return waiting

        monkeypatch.setattr(row_snapshot, "PIECE_BYTES", 64)
        monkeypatch.setattr(HeldRows, "pieces", slowly)
        monkeypatch.setattr(Trainer, "train_step", stepping)
        monkeypatch.setattr(BackgroundWriter, "wait", waited_for(BackgroundWriter.wait))
        monkeypatch.setattr(Storage, "settle", waited_for(Storage.settle))

    def _next_step(self):
        with self._moved:
            now = self._steps
            assert self._moved.wait_for(lambda: self._awaited or self._steps > now, 200)


@pytest.fixture
def slow_disk(monkeypatch):
    return SlowDisk(monkeypatch)


def fit(data, run, settings, *callbacks, resume=False):
    trainer = make_trainer(settings, run_folder=run, callbacks=callbacks)
    history = trainer.fit(Dataset(data / "train"), Dataset(data / "valid"), resume=resume)
    return trainer, history


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.9, "eval_every": 4, "restore_best": True}])
def test_every_bit_is_that_of_a_save_that_waits(data, tmp_path, slow_disk, changes):
    one, _ = fit(data, tmp_path / "sync", solver(async_checkpoint=False, **changes))
    assert not slow_disk.kept
    other, _ = fit(data, tmp_path / "async", solver(**changes))
    assert max(slow_disk.kept) > 0, "no step moved a row while it was waiting to be written"
    assert_same_bits(tensors_of(one), tensors_of(other))
    folders = [CheckpointStore(tmp_path / kind / "checkpoints", 20) for kind in ("sync", "async")]
    assert folders[0].steps() == folders[1].steps()
    assert len(folders[0].steps()) > 8
    for step in folders[0].steps():
        assert not compare_checkpoints(folders[0].path(step), folders[1].path(step))
    # And the way back from the middle.
    for step in folders[1].steps():
        if step > 9:
            shutil.rmtree(folders[1].path(step))
    again, _ = fit(data, tmp_path / "async", solver(**changes), resume=True)
    assert_same_bits(tensors_of(one), tensors_of(again))


def test_the_running_mean_lies_beside_the_rows(data, tmp_path):
    fit(data, tmp_path / "run", solver(ema_decay=0.9))
    path = CheckpointStore(tmp_path / "run/checkpoints", 20).latest_whole()
    assert all(table.has_mean for table in read_manifest(path).tables.values())
    fit(data, tmp_path / "other", solver())
    plain = CheckpointStore(tmp_path / "other/checkpoints", 20).latest_whole()
    trainer = make_trainer(solver(ema_decay=0.9))
    trainer.load_checkpoint(plain)  # of a run without a mean: it begins at the weights
    assert not any(table.has_mean for table in read_manifest(plain).tables.values())


def save_ends():
    """Wait until no thread writes a checkpoint."""
    for thread in threading.enumerate():
        if thread.name == "viviane-checkpoint":
            thread.join()


class Steps(Callback):
    """Counts steps, and does something at one of them."""

    def __init__(self, at=0, do=None):
        self.at, self.do, self.last = at, do, 0

    def on_step_end(self, step, loss):
        self.last = step
        if step == self.at:
            self.do()


def test_an_error_ends_training_at_the_next_step_and_names_the_checkpoint(data, tmp_path, monkeypatch):
    calls, release = [], threading.Event()
    truth = HeldRows.pieces

    def failing(self):
        calls.append(1)
        if len(calls) > 6:  # the first save holds six tensors of tables
            assert release.wait(200)
            raise OSError(28, "No space left on device")
        yield from truth(self)

    monkeypatch.setattr(HeldRows, "pieces", failing)

    def fails():
        release.set()
        save_ends()

    steps = Steps(21, fails)
    with pytest.raises(CheckpointError, match=r"(?s)disk is full.*step-00000018.*bytes needed"):
        fit(data, tmp_path / "run", solver(), steps)
    assert steps.last == 21, "the callbacks of step 22 saw it, though the error was there before it began"
    folder = tmp_path / "run/checkpoints"
    assert CheckpointStore(folder, 2).steps() == [9]
    assert verify_checkpoint(folder / "step-00000009").step == 9
    assert not list(folder.glob(".*"))


def test_a_vanished_folder_is_named_at_the_end(data, tmp_path, monkeypatch):
    folder, truth = tmp_path / "run/checkpoints", HeldRows.pieces

    def vanishing(self):
        yield from truth(self)
        if folder.exists():
            folder.rename(folder.with_name("elsewhere"))

    monkeypatch.setattr(HeldRows, "pieces", vanishing)
    with pytest.raises(CheckpointError, match=r"could not be written[\s\S]*step-0000000"):
        fit(data, tmp_path / "run", solver(max_steps=9))


@pytest.mark.slow
def test_a_file_that_may_not_grow_ends_the_run(data, tmp_path, warm):
    code = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from click_model import *; from viviane.training import Callback\n"
        "class Limit(Callback):\n"
        "    def on_step_end(self, step, loss):\n"
        "        if step == 8:\n"
        "            while not Path(sys.argv[2], 'checkpoints/step-00000005').exists(): time.sleep(0.01)\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "solver = Solver(batch_size=32, checkpoint_every=5, device='cpu', async_checkpoint=True)\n"
        "trainer = make_trainer(solver, hidden=200, run_folder=sys.argv[2], callbacks=[Limit()])\n"
        "trainer.fit(Dataset(Path(sys.argv[1]) / 'train'))\n"
    )
    done = warm.run(["-c", code, data, tmp_path / "run", HERE], cwd=tmp_path)
    assert done.returncode == 1
    assert "exceeds the file system's size limit" in done.stderr
    assert "step-00000010" in done.stderr
    assert CheckpointStore(tmp_path / "run/checkpoints", 2).steps() == [5]
    assert verify_checkpoint(tmp_path / "run/checkpoints/step-00000005").step == 5


def test_killed_while_a_thread_writes(data, tmp_path, warm):
    code = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from click_model import *; from viviane.training.checkpoint.held_rows import HeldRows\n"
        "pieces, calls = HeldRows.pieces, []\n"
        "def slowly(self):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 8: os.kill(os.getpid(), signal.SIGKILL)\n"  # in the second save
        "    yield from pieces(self)\n"
        "HeldRows.pieces = slowly\n"
        "solver = Solver(batch_size=16, checkpoint_every=9, device='cpu', async_checkpoint=True, num_threads=1)\n"
        "make_trainer(solver, run_folder=sys.argv[2]).fit(Dataset(Path(sys.argv[1]) / 'train'))\n"
    )
    run = tmp_path / "run"
    assert warm.run(["-c", code, data, run, HERE], cwd=tmp_path).returncode == -signal.SIGKILL
    store = CheckpointStore(run / "checkpoints", 2)
    assert store.steps() == [9]
    assert list((run / "checkpoints").glob(".step-00000018.*.tmp")), "the kill hit no save"
    assert verify_checkpoint(store.path(9)).step == 9
    settings = Solver(batch_size=16, checkpoint_every=9, device="cpu", num_threads=1)
    again = make_trainer(settings, run_folder=run)
    again.fit(Dataset(data / "train"), resume=True)
    whole = make_trainer(settings)
    whole.fit(Dataset(data / "train"))
    assert_same_bits(tensors_of(whole), tensors_of(again))
    assert not list((run / "checkpoints").glob(".*"))


def test_one_save_is_in_work_at_a_time_and_an_interrupt_waits_for_it(data, tmp_path, slow_disk):
    together = []

    class Counts(Steps):
        def on_step_end(self, step, loss):
            together.append(len(list((tmp_path / "run/checkpoints").glob(".step-*.tmp"))))
            if step == 20:
                os.kill(os.getpid(), signal.SIGINT)

    trainer, history = fit(data, tmp_path / "run", solver(checkpoint_every=2), Counts())
    assert history.interrupted
    assert max(together) == 1
    store = CheckpointStore(tmp_path / "run/checkpoints", 20)
    assert store.steps()[-1] == trainer.step == 20
    assert all(verify_checkpoint(store.path(step)).step == step for step in store.steps())
    assert not list(store.folder.glob(".*"))
