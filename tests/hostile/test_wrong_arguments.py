"""Wrong types and other libraries' names where people give arguments in Python."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

import viviane as vv
from viviane.config import SGD, Adam, AdamW, Solver
from viviane.config.optimizers import optimizer_settings
from viviane.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    KeyRangeError,
    MachineError,
    VivianeError,
)
from viviane.core.machine_errors import as_own_error
from viviane.data import Dataset, write_dataset
from viviane.etl import run
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import DeepFM

SCHEMA = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rows = {"y": np.arange(64, dtype=np.float32) % 2, "c": np.arange(64) % 6 + 3}
    return write_dataset(tmp_path_factory.mktemp("rows") / "train", SCHEMA, [rows])


def model(**compiled: object) -> Model:
    made = Model(Solver(batch_size=32, device="cpu"), SCHEMA)
    made.add(DeepFM(dim=4, deep_mlp=[4]))
    made.compile(**compiled)
    return made


def test_optimizers_and_metrics_are_taken_by_one_name() -> None:
    made = model(optimizer="adam", embedding_optimizer="SGD", metrics="auc")
    assert (made.optimizer, made.embedding_optimizer, made.metrics) == (Adam(), SGD(), ("auc",))
    assert optimizer_settings({"type": "adamw", "lr": 0.1}) == AdamW(lr=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adm", "did you mean 'adam'"),
        (torch.optim.Adam([torch.zeros(1, requires_grad=True)]), r"viviane\.Adam\(\)"),
        (torch.optim.SGD, r"viviane\.SGD\(\)"),
        (Adam, r"viviane\.Adam\(\)"),
        (0.1, "not optimizer settings"),
        (["adam"], "not optimizer settings"),
        ({"type": "adam", "learning_rate": 1}, "did you mean 'lr'"),
        ({}, "type"),
    ],
)
def test_other_optimizers_are_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model(optimizer=given)


@pytest.mark.parametrize("given", ["acu", ["auc", 3], 3, {"auc"}, [None]])
def test_other_metrics_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"metric"):
        model(metrics=given)


@pytest.mark.parametrize("rows", ["train", Path("train"), None, 3, {"c": [3]}, [[3]], torch.zeros(2), np.zeros(3)])
def test_rows_that_are_no_data_set_are_refused(rows: object, data: Dataset) -> None:
    made = model()
    for call in (
        made.fit,
        made.evaluate,
        made.trainer.predict,
        lambda one: made.fit(data, one if one is not None else 3),
    ):
        with pytest.raises(VivianeError, match=r"not a data set|set folder not found|not supported|is missing|two dim"):
            call(rows)


def test_arguments_of_other_types_are_refused(data: Dataset, tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("a\n1\n")
    for call in (
        lambda: Dataset(3),
        lambda: Dataset(None),
        lambda: Dataset(data.path, schema={"labels": []}),
        lambda: Dataset(data.path, format=3),
        lambda: Dataset("a\0b"),
        lambda: Model({"lr": 1}, SCHEMA),
        lambda: Model(Solver(), "schema.json"),
        lambda: run(None, raw, tmp_path / "out"),
        lambda: run({"labels": []}, raw, tmp_path / "out"),
        lambda: run("criteo", 3, tmp_path / "out"),
        lambda: run("criteo", [3], tmp_path / "out"),
        lambda: run("criteo", raw, 3),
        lambda: run("criteo", raw, tmp_path / "out", threads="4"),
        lambda: run("criteo", raw, tmp_path / "out", threads=0),
        lambda: run("criteo", raw, tmp_path / "out", threads=10**30),
        lambda: run("criteo", raw, tmp_path / "out", progress=3),
        lambda: run("criteo", raw, tmp_path / "out", split=3),
        lambda: run("criteo", raw, tmp_path / "out", memory_limit=None),
        lambda: Solver(seed=10**50),
        lambda: Solver(device="cp\0u"),
        lambda: Schema(labels=[{"name": "a\0b"}]),
    ):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize(
    ("name", "ours"),
    [("learning_rate", "lr"), ("num_epochs", "epochs"), ("max_iter", "max_steps"), ("random_state", "seed"),
     ("clipnorm", "clip_grad_norm"), ("early_stopping", "patience"), ("batch_sise", "batch_size")],
)  # fmt: skip
def test_names_of_other_libraries_are_translated(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{ours}'"):
        Solver(**{name: 1})


def test_errors_are_also_those_that_python_programs_expect(tmp_path: Path) -> None:
    assert issubclass(DataError, ValueError)
    assert issubclass(KeyRangeError, IndexError)
    for call in (
        lambda: Dataset(tmp_path / "none"),
        lambda: Model.load(tmp_path / "none"),
        lambda: run("criteo", tmp_path / "none", tmp_path / "out"),
        lambda: vv.Schema.load(tmp_path / "none"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert isinstance(caught.value, VivianeError)
    assert isinstance(as_own_error(MemoryError()), MachineError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOMEM])
def test_refusals_of_the_machine_say_what_to_do(number: int) -> None:
    error = as_own_error(OSError(number, "refused", "/data/x"))
    assert error is not None
    assert error.where == "/data/x"
    assert error.fix


def test_defects_of_the_program_keep_their_traceback() -> None:
    for error in (KeyError("x"), TypeError("x"), ValueError("x"), RuntimeError("x"), ZeroDivisionError()):
        assert as_own_error(error) is None
    assert as_own_error(RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried")) is not None
    assert as_own_error(ImportError("x.so: failed to map segment from shared object")) is not None
    few_files = as_own_error(type("SafetensorError", (Exception,), {})("unable to open x: Too many open files (24)"))
    assert few_files is not None
    assert "ulimit -n" in str(few_files)
    own = CheckpointError("x")
    assert as_own_error(own) is own
