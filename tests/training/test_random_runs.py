"""Laws of training runs, on runs that are drawn from a seed: features that are tested alone are here together."""

import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_case import RandomCase

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

import viviane as vv
from viviane.core.errors import VivianeError
from viviane.data import Dataset
from viviane.parallel import Group
from viviane.training import read_manifest

SLOW_CASES = int(os.environ.get("VIVIANE_RANDOM_RUNS", "300"))
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CLOCK = ("seconds", "samples_per_second")
Data = tuple[Dataset, Dataset]
Law = Callable[[RandomCase, Data, Path, Any], None]


class Result:
    """What a run leaves: its model, its history, the newest checkpoint's checksums and predictions.

    Args:
        model: trained.
        history: of `fit`.
        run: the run folder.
        valid: rows to predict.
    """

    def __init__(self, model: Any, history: Any, run: Path, valid: Dataset) -> None:
        self.model, self.run = model, run
        self.history = [{key: value for key, value in row.items() if key not in CLOCK} for row in history.rows]
        entries = read_manifest(max(run.glob("checkpoints/step-*"))).files
        self.state = {name: one.sha256 for name, one in entries.items() if not re.search("history|progress", name)}
        self.scores = matrix(model.predict(valid))


def matrix(scores: Any) -> np.ndarray:
    """Return predictions as (rows, labels)."""
    columns = list(scores.values()) if isinstance(scores, dict) else [scores]
    return np.stack([np.asarray(one) for one in columns], 1).reshape(len(columns[0]), -1)


def trained(case: RandomCase, data: Data, run: Path, *, resume: bool = False, **solver: Any) -> Result:
    model = case.model(**solver)
    history = model.fit(*data, run_folder=run, resume=resume)
    return Result(model, history, run, data[1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def assert_same(one: Result, other: Result) -> None:
    """The same bits of weights, checkpoints and predictions."""
    mine, theirs = one.model.module.state_dict(), other.model.module.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(bits(mine[name]), bits(theirs[name]))] == []
    assert [name for name in one.state if one.state[name] != other.state.get(name)] == []
    assert one.scores.tobytes() == other.scores.tobytes()


def eager_steps_are_recorded_ones(case: RandomCase, data: Data, folder: Path, truth: Result) -> None:
    """Steps that are recorded, or captured in a CUDA graph, have the bits of eager ones."""
    eager = trained(case, data, folder, cuda_graph=False)
    assert_same(eager, truth)
    assert repr(eager.history) == repr(truth.history)


def a_resumed_run_is_a_straight_one(case: RandomCase, data: Data, folder: Path, truth: Result) -> None:
    """A run that is stopped at any step and resumed by another model ends with the same bits."""
    if case.num_steps < 2:
        return
    stop = random.Random(case.seed).randrange(1, case.num_steps)
    if "ema_decay" in case.solver:  # a checkpoint rounds the mean: it must be one that the straight run has too
        stop = case.steps_per_epoch * random.Random(case.seed).randint(1, case.solver["epochs"])
    trained(case, data, folder, max_steps=stop)
    resumed = trained(case, data, folder, resume=True)
    if "incremental_checkpoints" in case.solver:  # the last one holds what changed since another one
        resumed.state = truth.state
    assert_same(resumed, truth)


def tables_in_tiers_are_those_in_memory(case: RandomCase, data: Data, folder: Path, truth: Result) -> None:
    """Tables of which some rows are in memory train to the same bits."""
    memory = max(one.element_size() * one.numel() for one in truth.model.module.state_dict().values()) * 3
    try:
        tiered = trained(case, data, folder, embedding_memory=memory)
    except VivianeError as error:  # too small for a batch
        case.refusals.append(str(error).splitlines()[0])
        return
    assert_same(tiered, truth)
    assert repr(tiered.history) == repr(truth.history)


def a_saved_model_is_the_trained_one(case: RandomCase, data: Data, folder: Path, truth: Result) -> None:
    """A model that was loaded and an inference session give the same scores."""
    truth.model.save(folder)
    loaded = vv.Model.load(folder, device=case.device)
    assert matrix(loaded.predict(data[1])).tobytes() == truth.scores.tobytes()
    assert loaded.evaluate(data[1]) == truth.model.evaluate(data[1])
    with vv.InferenceSession(folder, device=case.device) as session:
        columns = {name: values for name, values in case.columns(12, 90).items() if name not in ("y", "z", "weight")}
        scores = matrix(session.predict(columns))
    if case.device == "cpu":
        assert scores.tobytes() == truth.scores.tobytes()
    else:  # a session pads requests, and cuBLAS chooses its kernel, and so the order of its sums, by the rows
        assert scores == pytest.approx(truth.scores, abs=0.02 if "precision" in case.solver else 2e-6)


LAWS: dict[str, Law] = {
    "recorded": eager_steps_are_recorded_ones, "resumed": a_resumed_run_is_a_straight_one,
    "tiers": tables_in_tiers_are_those_in_memory, "saved": a_saved_model_is_the_trained_one,
}  # fmt: skip


def check(seed: int, folder: Path, device: str) -> str:
    """Check every law on one case; returns "trained", or why the case is refused."""
    case = RandomCase(seed, device)
    data = case.data(folder / "data")
    try:
        truth = trained(case, data, folder / "truth")
    except VivianeError as error:
        return str(error).splitlines()[0]
    for name, law in LAWS.items():
        try:
            law(case, data, folder / name, truth)
        except BaseException as error:
            error.add_note(f"law {name!r}, {case!r}")
            raise
    return "trained"


def check_many(seeds: Iterable[int], folder: Path, device: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        found[check(seed, folder / "case", device)] += 1
        shutil.rmtree(folder / "case")
    assert found["trained"] >= found.total() // 3, found
    return found


def check_group(seeds: Sequence[int], folder: Path, device: str) -> None:
    """Check the laws of training in one of several processes; processes agree on what they refuse."""
    group = Group.world()
    found: Counter[str] = Counter()
    for seed in seeds:
        case = RandomCase(seed, device, group.size)
        own = folder / str(seed)
        group.from_first(lambda case=case, own=own: bool(case.data(own / "data")))
        data = Dataset(own / "data/train"), Dataset(own / "data/valid")
        try:
            truth = trained(case, data, own / "truth")
        except VivianeError as error:
            found[str(error).splitlines()[0]] += 1
            continue
        found["trained"] += 1
        for name in ("recorded", "resumed"):
            try:
                LAWS[name](case, data, own / name, truth)
            except BaseException as error:
                error.add_note(f"law {name!r}, {case!r}")
                raise
    print(f"drawn runs of {group.size} processes on {device}: {found}")


@pytest.mark.parametrize("seed", [1, 3, 8, 35])
def test_laws_of_drawn_runs(seed: int, tmp_path: Path) -> None:
    assert check(seed, tmp_path, "cpu") == "trained"


@gpu
@pytest.mark.parametrize("seed", [8, 19, 111, 128, 143, 145, 705480890587])
def test_laws_of_drawn_runs_on_a_gpu(seed: int, tmp_path: Path) -> None:
    assert check(seed, tmp_path, "cuda") == "trained"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_laws_of_many_drawn_runs(device: str, tmp_path: Path) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    found = check_many(range(start, start + SLOW_CASES), tmp_path, device)
    print(f"\ndrawn runs on {device}: {found}")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_laws_of_many_drawn_runs_of_two_processes(device: str, tmp_path: Path) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    seeds = range(start, start + SLOW_CASES // 3)
    processes.run(2, check_group, seeds, tmp_path, device, backend="nccl" if device == "cuda" else "gloo")
