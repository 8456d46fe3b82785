"""HugeCTR's JSON with any value in any place: it works, or is refused with an error that names the place."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from viviane.compat.hugectr.session import Session, SessionSolver
from viviane.compat.hugectr.train_json import train_from_json
from viviane.core.errors import ConfigError, DataError, VivianeError

from .test_hugectr_json import ADAM, FC, SGD, SOLVER, data, embedding
from .test_hugectr_numbers import KEYS, norm_file

VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**40, 2**63, 10**30, 1.5, "", "x", "\0", [], [[]], [None], ["x", 3], {}, {"a": 1},
]  # fmt: skip
GONE: Any = object()
LONG = ("max_iter", "eval_batches", "max_eval_samples", "num_epochs", "batchsize", "batchsize_eval")
"""Numbers that only prolong."""
ASYNC = {
    "num_threads": 1, "num_batches_per_thread": 1, "io_block_size": 4, "io_depth": 2, "io_alignment": 512,
    "shuffle": False, "aligned_type": "None",
}  # fmt: skip
RAW = [
    data("gone", {"is_fixed_length": True, "nnz_per_slot": [1, 1, 1]}, format="Raw", num_samples=10,
         eval_num_samples=10, async_param=ASYNC),
    embedding("LocalizedSlotSparseEmbeddingOneHot", slot_size_array=[3, 5, 7]), *FC,
]  # fmt: skip
Case = tuple[tuple[Any, ...], Any, Any]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of some JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(content: Any) -> Iterator[Case]:
    """Yield the content with one value replaced or left out, with its path and the other value."""
    for path in places(content):
        for value in [*VALUES, GONE] if path else VALUES:
            result = [copy.deepcopy(content)]
            *outer, last = (0, *path)
            at: Any = result
            for key in outer:
                at = at[key]
            if value is GONE:
                del at[last]
            else:
                at[last] = value
            yield path, value, result[0]


def train(file: Path) -> None:
    train_from_json(file)


def session(file: Path) -> None:
    Session(SessionSolver(seed=1, batchsize=5, batchsize_eval=5), str(file))


def works_or_refuses(read: Callable[[Path], None], file: Path, case: Case) -> bool:
    """Read a file; returns whether it worked, and fails for an error that is not ours."""
    path, value, content = case
    file.write_text(json.dumps(content))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            read(file)
    except VivianeError:
        return False
    except Exception as error:
        pytest.fail(f"{read.__name__}, {path} = {value!r}: {type(error).__name__}: {error}")
    return True


def assert_unchanged_is_read(read: Callable[[Path], None], file: Path) -> None:
    """No case before has broken the process: the graph is read as far as its data, which are not there."""
    file.write_text(json.dumps({"solver": SOLVER, "optimizer": SGD, "layers": RAW}))
    with pytest.raises(DataError, match="file of training data not found"):
        read(file)


@pytest.mark.parametrize("read", [train, session])
def test_any_value_of_a_graph_is_read_or_refused(read: Callable[[Path], None], tmp_path: Path) -> None:
    cases = list(changed({"solver": SOLVER, "optimizer": SGD, "layers": RAW}))
    for case in random.Random(read.__name__).sample(cases, 150):
        works_or_refuses(read, tmp_path / "c.json", case)
    assert_unchanged_is_read(read, tmp_path / "c.json")


@pytest.mark.parametrize("dim", [2**31, 2**63, -1])
@pytest.mark.parametrize("part", ["label", "dense"])
def test_widths_have_a_limit(part: str, dim: int, tmp_path: Path) -> None:
    """A name for each of 2^63 columns of a label filled the memory."""
    layers = [{**RAW[0], part: {"top": part, f"{part}_dim": dim}}, *RAW[1:]]
    (tmp_path / "c.json").write_text(json.dumps({"solver": SOLVER, "optimizer": SGD, "layers": layers}))
    with pytest.raises(ConfigError, match=rf"out of range[\s\S]*Input, {part}_dim[\s\S]*0 to 1,048,576"):
        train(tmp_path / "c.json")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", [SGD, ADAM], ids=["SGD", "Adam"])
@pytest.mark.parametrize("read", [train, session])
def test_every_value_of_a_graph_is_read_or_refused(
    read: Callable[[Path], None], rule: dict[str, Any], tmp_path: Path
) -> None:
    for case in changed({"solver": SOLVER, "optimizer": rule, "layers": RAW}):
        works_or_refuses(read, tmp_path / "c.json", case)
    assert_unchanged_is_read(read, tmp_path / "c.json")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_value_of_a_file_with_data_trains_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = norm_file(tmp_path, KEYS)
    table = embedding("DistributedSlotSparseEmbeddingHash", workspace_size_per_gpu_in_mb=1)
    layers = [data(source, {"is_fixed_length": False, "nnz_per_slot": 1}), table, *FC]
    content = {"solver": {**SOLVER, "max_iter": 1, "eval_interval": 1}, "optimizer": ADAM, "layers": layers}
    worked = 0
    for number, case in enumerate(changed(content)):
        if number % 25 == 0:
            assert works_or_refuses(train, tmp_path / "c.json", ((), content, content))
        if not (case[0] and case[0][-1] in LONG and isinstance(case[1], int) and case[1] > 5):
            worked += works_or_refuses(train, tmp_path / "c.json", case)
    assert worked > 300
