"""kill -9 while training and while saving, then resume: every bit as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click_model import LONG, assert_same_bits, make_trainer, tensors_of

from viviane.data import Dataset
from viviane.training import read_manifest

SCRIPT = Path(__file__).with_name("click_model.py")


def start(data: Path, run: Path, hidden: int, pause_s: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(SCRIPT), str(data), str(run), str(hidden), str(pause_s)])


def finish(data: Path, run: Path, hidden: int):
    trainer = make_trainer(LONG, hidden=hidden, run_folder=run)
    history = trainer.fit(Dataset(data / "train"), Dataset(data / "valid"), resume=True)
    return trainer, history


def comparable(rows):
    """Rows without what a clock decides."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in rows]


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory):
    return finish(data, tmp_path_factory.mktemp("straight") / "run", 8)


def test_killed_while_training(data, tmp_path, straight, warm):
    run = tmp_path / "run"
    chance = random.Random(4)
    for wanted in (7, 35):  # two kills: at a few steps past the first, and past a later, checkpoint
        process = warm.start([SCRIPT, data, run, 8, 0.01], cwd=tmp_path)
        deadline = time.monotonic() + 60
        while not any(int(p.name[5:]) >= wanted for p in run.glob("checkpoints/step-*")):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        assert process.kill() == -signal.SIGKILL
    done = max(int(p.name[5:]) for p in run.glob("checkpoints/step-*"))
    assert done < straight[0].step, "killed too late to prove anything"
    trainer, history = finish(data, run, 8)
    assert_same_bits(tensors_of(straight[0]), tensors_of(trainer))
    assert comparable(history.rows) == comparable(straight[1].rows)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert comparable(lines) == comparable(straight[1].rows)


@pytest.mark.slow
def test_killed_while_saving(data, tmp_path):
    hidden = 10_000  # about 0.7 MB of weights and 1.4 MB of state, so that a save can be caught at work
    run, caught = tmp_path / "run", 0
    for _ in range(3):
        process = start(data, run, hidden, 0.0)
        deadline = time.monotonic() + 60
        before = {p.name for p in run.glob("checkpoints/.step-*.tmp")}
        while process.poll() is None and time.monotonic() < deadline:
            work = [p for p in run.glob("checkpoints/.step-*.tmp") if p.name not in before]
            if work and (run / "checkpoints/step-00000007").exists():
                os.kill(process.pid, signal.SIGKILL)
                break
        process.wait()
        caught += any(p.name.endswith(".tmp") for p in run.glob("checkpoints/.step-*"))
    assert caught, "no kill hit a save"
    for path in run.glob("checkpoints/step-*"):
        read_manifest(path)
    trainer, _ = finish(data, run, hidden)
    assert not list(run.glob("checkpoints/.*")), "leftovers of killed saves were not cleaned"
    whole = make_trainer(LONG, hidden=hidden)
    whole.fit(Dataset(data / "train"), Dataset(data / "valid"))
    assert_same_bits(tensors_of(whole), tensors_of(trainer))


def test_every_step_can_be_resumed(data, tmp_path, straight):
    """Ends of epochs, steps of evaluations and all between: stop after each step, resume in a new trainer."""
    run = tmp_path / "run"
    train, valid = Dataset(data / "train"), Dataset(data / "valid")
    settings = LONG.model_copy(update={"checkpoint_every": 1})
    last = straight[0].step
    for stop in [1, 2, 10, 11, 12, 37, 38, 39, 75, 76, 77, last]:
        limited = settings.model_copy(update={"max_steps": stop, "eval_every": 11})
        trainer = make_trainer(limited, run_folder=run)
        trainer.fit(train, valid, resume=True)
        assert trainer.step == stop
    assert_same_bits(tensors_of(straight[0]), tensors_of(trainer))
    shutil.rmtree(run)
