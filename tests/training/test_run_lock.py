"""One job writes a run folder at a time; a run that is refused changes nothing."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from click_model import LONG, make_trainer

from viviane.config import Solver
from viviane.core.errors import ConfigError, VivianeError
from viviane.training import Callback, CheckpointStore, Progress

SCRIPT = Path(__file__).with_name("click_model.py")
SOLVER = Solver(batch_size=32, lr=0.02, epochs=1, device="cpu", keep_checkpoints=9)


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (one for one in folder.rglob("*") if one.is_file())
    return {str(one.relative_to(folder)): (one.read_bytes(), one.stat().st_mtime_ns) for one in files}


def wait_until_held(run: Path) -> None:
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_run_is_refused_and_says_which_is_at_it(data, train, valid, tmp_path, warm):
    run = tmp_path / "run"
    first = warm.start([SCRIPT, data, run, 8, 0.5], cwd=tmp_path)
    try:
        wait_until_held(run)
        for resume in (False, True):
            with pytest.raises(ConfigError, match="another process is writing here") as caught:
                make_trainer(LONG, run_folder=run).fit(train, valid, resume=resume)
            assert f"process {first.pid} on " in str(caught.value)
            assert str(run) in str(caught.value)
    finally:
        first.kill()
    make_trainer(LONG.model_copy(update={"max_steps": 8}), run_folder=run).fit(train, valid, resume=True)
    assert not list(tmp_path.glob(".*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)


def test_threads_of_one_process_do_not_share_a_run(train, tmp_path):
    started, go_on, said = threading.Event(), threading.Event(), []

    class Wait(Callback):
        def on_fit_start(self, trainer) -> None:
            started.set()
            go_on.wait(60)

    def first() -> None:
        make_trainer(SOLVER, run_folder=tmp_path / "run", callbacks=[Wait()]).fit(train)

    thread = threading.Thread(target=first)
    thread.start()
    started.wait(60)
    try:
        make_trainer(SOLVER, run_folder=tmp_path / "run").fit(train)
    except VivianeError as error:
        said.append(str(error))
    go_on.set()
    thread.join()
    assert "another thread of this process" in said[0]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("what", ["another model", "another batch size", "damaged", "not a resume"])
def test_a_refused_run_changes_nothing(train, tmp_path, what):
    run = tmp_path / "run"
    make_trainer(SOLVER, run_folder=run, config={"mine": 1}, files={"train.json": {"lr": 1}}).fit(train)
    (run / "checkpoints/.step-00000009.left.tmp").mkdir()
    if what == "damaged":
        shutil.rmtree(next(run.glob("checkpoints/step-*")) / "tables")
    before = tree(run)
    changes = {"lr": 0.5, "epochs": 3, "batch_size": 16 if what == "another batch size" else 32}
    other = make_trainer(
        SOLVER.model_copy(update=changes), run_folder=run, files={"train.json": {"lr": 2}},
        hidden=9 if what == "another model" else 8,
    )  # fmt: skip
    with pytest.raises(VivianeError):
        other.fit(train, resume=what != "not a resume")
    assert tree(run) == before
    assert (run / "checkpoints/.step-00000009.left.tmp").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_resume_that_goes_on_writes_its_settings(train, tmp_path):
    run = tmp_path / "run"
    make_trainer(SOLVER, run_folder=run, files={"train.json": {"lr": 1}}).fit(train)
    make_trainer(SOLVER.model_copy(update={"epochs": 2}), run_folder=run, files={"train.json": {"lr": 2}}).fit(
        train, resume=True
    )
    assert json.loads((run / "train.json").read_text()) == {"lr": 2}
    assert json.loads((run / "config.json").read_text())["solver"]["epochs"] == 2


@pytest.mark.parametrize("higher", [True, False])
def test_of_equal_scores_the_earlier_checkpoint_is_the_best(train, tmp_path, higher):
    trainer = make_trainer(SOLVER)
    store = CheckpointStore(tmp_path, keep=1, higher_is_better=higher)
    for step, score in ((1, 0.5), (2, 0.7 if higher else 0.3), (3, 0.7 if higher else 0.3), (4, 0.5)):
        store.save(trainer.module, None, Progress(step=step, values={"score": score}))
        assert store.best_path() == tmp_path / f"step-{min(step, 2):08d}"
    assert store.steps() == [2, 4]
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["best"]["folder"] == "step-00000002"
