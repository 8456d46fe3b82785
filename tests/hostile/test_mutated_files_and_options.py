"""Mutated files and command lines: every one succeeds or ends with a VivianeError, which the command line exits 2 with.

A case is drawn from a seed, and the seed is in the message of a failure: `run_case(seed, ...)` repeats it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import mutate
from typer.testing import CliRunner

from viviane.cli import main
from viviane.core.errors import VivianeError
from viviane.core.machine_errors import as_own_error

SLOW_CASES = int(os.environ.get("VIVIANE_FUZZ_CASES", "10000"))
WORDS = [
    "", "0", "-1", "1e999", "nan", "inf", "9" * 400, "\0", "\ud800", "../x", ".", "a=b",
    "=", "--", "-", "x" * 5000, "cuda:99", "cpu", "hash:click:train=2",
    "time:x:y@z", "rows:train=1e999", "4GB", "-4GB",
    "1.5.2 GB", "s3://", "s3://a:b@c/d", "file://", "{}", "[]", "solver.lr=NaN", "solver.seed=1e999",
    "model=3", "data.train.x=1",
    "solver=[]", "model.zoo=[]", "model.zoo=\"dlrm\"", "solver.plan=3", "metrics=3", "é", "*", "[",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw rows, the data set and fitted ETL of them, a config, and a saved model with its checkpoint."""
    from viviane.config import Solver
    from viviane.data import Dataset
    from viviane.etl import EtlConfig, run
    from viviane.model import Model
    from viviane.zoo import DeepFM

    folder = tmp_path_factory.mktemp("whole")
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},{rng.choice(['pen', 'ink', 'cup'])},{rng.normal():.3f}" for _ in range(60)]
    (folder / "raw.csv").write_text("click,item,price\n" + "\n".join(lines) + "\n")
    columns = [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]
    dense = [{"name": "price", "operators": [{"type": "fill", "value": "mean"}, {"type": "standardize"}]}]
    config = {
        "input": {"columns": columns}, "labels": [{"name": "click"}], "categorical": [{"name": "item"}], "dense": dense,
    }  # fmt: skip
    (folder / "etl.json").write_text(json.dumps(config))
    run(EtlConfig.from_dict(config), folder / "raw.csv", folder / "clean")
    data = Dataset(folder / "clean/train")
    model = Model(Solver(batch_size=16, device="cpu", max_steps=2), data)
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile(metrics=["auc"])
    model.fit(data, run_folder=folder / "run")
    model.save(folder / "run/model")
    train = {
        "data": {"train": str(folder / "clean/train")}, "solver": {"device": "cpu", "max_steps": 2},
        "model": {"zoo": "deepfm", "dim": 2, "deep_mlp": [2]},
    }  # fmt: skip
    (folder / "train.json").write_text(json.dumps(train))
    return folder


# Files --------------------------------------------------------------------------------------------------------


def loaders() -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """The file that is mutated, and what reads it in a copy of the folder."""
    from viviane.cli.etl import command as etl_command
    from viviane.cli.train_config import read_train_config
    from viviane.compat.hugectr.json_graph import read_graph
    from viviane.config.base import load_json
    from viviane.data import Dataset
    from viviane.etl import EtlConfig, FittedEtl
    from viviane.model import Model, read_model_file
    from viviane.report.record import RunRecord
    from viviane.schema import Schema
    from viviane.serving.settings import RepositorySettings
    from viviane.training import verify_checkpoint

    def data(folder: Path) -> None:
        found = Dataset(folder / "clean/train")
        _ = found.info, found.fingerprint
        found.verify()
        found.check()

    def etl(folder: Path) -> None:
        import pyarrow as pa

        fitted = FittedEtl.load(folder / "clean/etl.zip")
        fitted.transform_table(pa.table({"click": ["1", "0"], "item": ["pen", None], "price": ["1.5", ""]}))

    def resumed_etl(folder: Path) -> None:
        etl_command([str(folder / "raw.csv")], folder / "clean", folder / "etl.json", memory_limit="2GB", threads=1)

    checkpoint = "run/model/weights"
    return {
        "schema.json": ("clean/train/schema.json", data),
        "data manifest": ("clean/train/manifest.json", data),
        "info.json": ("clean/train/info.json", data),
        "part": ("clean/train/part-00000.parquet", data),
        "etl.zip": ("clean/etl.zip", etl),
        "etl.json": ("clean/etl.json", resumed_etl),
        "etl config": ("etl.json", lambda folder: EtlConfig.from_json_file(folder / "etl.json")),
        "train config": ("train.json", lambda folder: read_train_config(folder / "train.json").build(
            Schema.load(folder / "clean/train")).plan()),
        "model.json": ("run/model/model.json", lambda folder: read_model_file(folder / "run/model/model.json")),
        "files.json": ("run/model/files.json", lambda folder: Model.blueprint(folder / "run/model", device="cpu")),
        "model manifest": (f"{checkpoint}/manifest.json", lambda folder: verify_checkpoint(folder / checkpoint)),
        "metrics": ("run/metrics.jsonl", lambda folder: RunRecord.load(folder / "run")),
        "stages": ("run/stages.json", lambda folder: RunRecord.load(folder / "run")),
        "graph of HugeCTR": ("train.json", lambda folder: read_graph(folder / "train.json", True)),
        "clause": ("train.json", lambda folder: RepositorySettings.of_clause(load_json(folder / "train.json"))),
    }  # fmt: skip


def seal(file: Path) -> None:
    """Give a mutated manifest of a checkpoint a check sum that holds, as an attacker would."""
    from viviane.training.checkpoint.manifest import _seal

    with contextlib.suppress(Exception):
        body = json.loads(file.read_text())
        body.pop("sha256", None)
        file.write_text(json.dumps({**body, "sha256": _seal(body)}))


def run_file_case(seed: int, place: Path, work: Path, name: str, file: str, load: Callable[[Path], Any]) -> str:
    """Load a mutated file; returns "accepted" or the name of the error."""
    rng = random.Random(seed)
    target = work / file
    whole = (place / file).read_bytes()
    target.write_bytes(mutate(whole, rng))
    if name == "model manifest" and rng.random() < 0.7:
        seal(target)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            load(work)
    except VivianeError as error:
        return type(error).__name__
    except BaseException:
        pytest.fail(f"{name}, seed {seed}: {traceback.format_exc()[-3000:]}")
    finally:
        target.write_bytes(whole)
    return "accepted"


def fuzz_files(place: Path, work: Path, cases: int, start: int = 0) -> Counter[str]:
    """Run cases over all loaders in turn; returns how often each outcome occurred."""
    shutil.copytree(place, work, dirs_exist_ok=True)
    found: Counter[str] = Counter()
    every = loaders()
    for number in range(cases):
        name = list(every)[number % len(every)]
        found[run_file_case(start + number, place, work, name, *every[name])] += 1
    return found


# Command lines ------------------------------------------------------------------------------------------------


def commands(place: Path) -> dict[str, list[str]]:
    """A command line of each command that ends by itself; only such that are quick."""
    data, model = str(place / "clean/train"), str(place / "run/model")
    return {
        "generate": ["generate", "made", "--rows", "50", "--valid-rows", "10", "--max-cardinality", "9"],
        "etl": ["etl", str(place / "raw.csv"), "--output", "out", "--config", str(place / "etl.json"),
                "--threads", "1"],
        "check": ["check", data],
        "summary": ["summary", str(place / "train.json")],
        "plan": ["plan", str(place / "train.json"), "--processes", "2", "--memory-gb", "1", "--memory-gb-per-s", "10"],
        "train": ["train", str(place / "train.json"), "--run-folder", "run", "--set", "solver.max_steps=1"],
        "evaluate": ["evaluate", model, data],
        "predict": ["predict", model, data, "--output", "out.csv"],
        "convert": ["convert", data, "made"],
        "checkpoint": ["checkpoint", "verify", str(place / "run/model/weights")],
    }  # fmt: skip


def run_command(words: list[str], seed: int, folder: Path) -> str:
    """Run one command line in this process; returns how it ended."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(main.app, words)
    error = done.exception
    if error is None or isinstance(error, SystemExit):
        assert done.exit_code in (0, 1, 2), (words, seed, done.exit_code)
        return f"exit {done.exit_code}"
    own = as_own_error(error)
    if own is None:
        text = "".join(traceback.format_exception(error))[-3000:]
        pytest.fail(f"{words!r}, seed {seed}: {text}")
    return type(own).__name__


def fuzz_commands(place: Path, work: Path, cases: int, start: int = 0) -> Counter[str]:
    """Mutate words of command lines, and add options with hostile values."""
    found: Counter[str] = Counter()
    every = commands(place)
    for number in range(cases):
        rng = random.Random(start + number)
        words = list(every[rng.choice(list(every))])
        options = option_names(words[0])
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.5:
                words += [rng.choice(options), rng.choice(WORDS)]
            else:
                words[rng.randrange(1, len(words))] = rng.choice(WORDS)
        folder = work / "one"
        folder.mkdir()
        found[run_command(words, start + number, folder)] += 1
        shutil.rmtree(folder)
    return found


def option_names(command: str) -> list[str]:
    """All options of a command that do not start processes."""
    from typer.main import get_command

    group = get_command(main.app)
    one = group.get_command(None, command)  # type: ignore[attr-defined]
    names = [name for parameter in one.params for name in (*parameter.opts, *parameter.secondary_opts)]
    left_out = {"--processes", "--gpus", "--max-restarts", "--help", "--install-triton"}
    return [name for name in names if name.startswith("-") and name not in left_out] or ["--verbose"]


def test_mutated_files_are_read_or_refused(place: Path, tmp_path: Path) -> None:
    found = fuzz_files(place, tmp_path / "work", 300)
    assert sum(found.values()) == 300
    assert len(found) > 3


def test_mutated_command_lines_end_with_success_or_an_error_of_ours(place: Path, tmp_path: Path) -> None:
    found = fuzz_commands(place, tmp_path, 40)
    assert found.total() >= 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_files(place: Path, tmp_path: Path) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    found = fuzz_files(place, tmp_path / "work", SLOW_CASES, start)
    assert found.total() == SLOW_CASES
    tell("mutated files", found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_command_lines(place: Path, tmp_path: Path) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    found = fuzz_commands(place, tmp_path, SLOW_CASES, start)
    assert found.total() == SLOW_CASES
    tell("mutated command lines", found)


def tell(kind: str, found: Counter[str]) -> None:
    """Print the counts that `benchmarks/fuzzing.py` keeps."""
    accepted = found["accepted"] + found["exit 0"]
    print(f"\n{kind}: {found.total()} cases, {accepted} accepted, {found.total() - accepted} refused")
