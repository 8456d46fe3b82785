"""Mutated files: every one is read, or refused by a VivianeError.

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

import pytest
from hostile_counts import tell
from mutations import mutate

from viviane.core.errors import VivianeError

SLOW_CASES = int(os.environ.get("VIVIANE_FUZZ_CASES", "10000"))


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


def test_mutated_files_are_read_or_refused(place: Path, tmp_path: Path) -> None:
    found = fuzz_files(place, tmp_path / "work", 300)
    assert sum(found.values()) == 300
    assert len(found) > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_files(place: Path, tmp_path: Path) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    found = fuzz_files(place, tmp_path / "work", SLOW_CASES, start)
    assert found.total() == SLOW_CASES
    tell("mutated files", found)
