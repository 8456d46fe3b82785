"""Settings of any values are refused by a VivianeError, or training, requests and generated data work with them."""

import inspect
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import viviane as vv
from viviane.batch import Batch
from viviane.core.errors import ConfigError, VivianeError
from viviane.core.machine_errors import as_own_error
from viviane.data.synthetic import SyntheticConfig, generate
from viviane.metrics import METRICS
from viviane.model import Model
from viviane.serving import SessionSettings
from viviane.serving.parameter_server.settings import TableSettings
from viviane.zoo import DeepFM

VALUES: list[Any] = [
    0, -1, 1, 2, 7, 1.5, -0.5, 1e-300, 1e300, 2**31, 2**63, float("inf"), float("nan"), "x", "", None, True, False, [],
    [0], [-1], [2, 2], [1, -1], [2**63], [[0, 1]], {}, {"a": 1}, "relu", "none", "mean", "adam", "1 GiB", "linear",
    b"x", np.float32(1), np.int64(2), object,
]  # fmt: skip
SCHEMA = vv.Schema(
    labels=[{"name": "y"}], dense=[{"name": "d"}, {"name": "e"}],
    categorical=[{"name": "a", "num_ids": 20}, {"name": "h", "num_ids": 20, "kind": "sequence", "max_length": 4}],
)  # fmt: skip
_rng = np.random.default_rng(0)
ROWS = {
    "y": _rng.integers(0, 2, 32).astype("f4"), "d": _rng.random(32, "f4"), "e": _rng.random(32, "f4"),
    "a": _rng.integers(3, 20, 32), "h": [_rng.integers(3, 20, i % 5).tolist() for i in range(32)],
}  # fmt: skip
OPTIMIZERS = [
    vv.SGD, vv.AdaGrad, vv.RMSProp, vv.Adam, vv.AdamW, vv.Adamax, vv.Adadelta, vv.Lamb, vv.Ftrl, vv.RowWiseAdam,
]  # fmt: skip
ZOO = [name for name in vv.zoo.__all__ if hasattr(getattr(vv.zoo, name), "nodes") and name != "ZooModel"]


def compiled(solver: vv.Solver, model: Any) -> Model:
    made = Model(solver, SCHEMA)
    made.add(model)
    made.compile()
    return made


def settings_of(kind: Any, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for field in kind.model_fields:
        if field not in but:
            yield from ((field, value) for value in VALUES)


def works_or_refuses(use: Callable[..., object], field: str, value: Any) -> bool:
    """Call it with one setting; returns whether it worked, and fails for an error that is not ours."""
    try:
        use(**{field: value})
    except VivianeError:
        return False
    except Exception as error:
        if as_own_error(error) is None:
            pytest.fail(f"{field}={value!r}: {type(error).__name__}: {error}")
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind: Any) -> None:
    solver, batch = vv.Solver(device="cpu", num_threads=1), Batch.from_columns(SCHEMA, ROWS)

    def step(**given: Any) -> None:
        model = Model(solver, SCHEMA)
        model.add(DeepFM(dim=2, deep_mlp=[2]))
        model.compile(vv.Adam() if kind is vv.RowWiseAdam else kind(**given), kind(**given))
        model.trainer.train_step(batch)

    worked = [works_or_refuses(step, field, value) for field, value in settings_of(kind)]
    assert any(worked)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_models(name: str) -> None:
    solver, batch = vv.Solver(device="cpu", num_threads=1), Batch.from_columns(SCHEMA, ROWS)
    kind = getattr(vv.zoo, name)

    def step(**given: Any) -> None:
        compiled(solver, kind(**given)).trainer.train_step(batch)

    for field, value in settings_of(kind):
        works_or_refuses(step, field, value)


@pytest.mark.slow
@pytest.mark.parametrize("field", vv.Solver.model_fields)
def test_solver(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(**given: Any) -> None:
        solver = vv.Solver(**{"device": "cpu", "batch_size": 16, "max_steps": 2, "num_threads": 1, **given})
        compiled(solver, DeepFM(dim=2, deep_mlp=[2])).fit(ROWS, validation=ROWS)

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    for value in VALUES:
        works_or_refuses(fit, field, value)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_sessions_and_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiled(vv.Solver(device="cpu"), DeepFM(dim=2, deep_mlp=[2])).save(tmp_path / "model")
    row = {name: values[:3] for name, values in ROWS.items() if name != "y"}

    def ask(**given: Any) -> None:
        with vv.InferenceSession(folder, **{"device": "cpu", **given}) as session:
            session.predict(row)

    def ask_tiers(**tables: Any) -> None:
        ask(tables=tables)

    monkeypatch.chdir(tmp_path)
    for field, value in settings_of(SessionSettings):
        works_or_refuses(ask, field, value)
    for field, value in settings_of(TableSettings):
        works_or_refuses(ask_tiers, field, value)


@pytest.mark.slow
def test_synthetic_data(tmp_path: Path) -> None:
    numbers = count()

    def make(**given: Any) -> None:
        generate(SyntheticConfig(**{"rows": 20, "num_dense": 2, "cardinalities": (5, 6), **given}), place())

    def place() -> Path:
        return tmp_path / str(next(numbers))

    for field, value in settings_of(SyntheticConfig, but=("rows",)):  # of 2^31 rows
        works_or_refuses(make, field, value)


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str) -> None:
    kind = METRICS[name]
    scores, labels = torch.rand(8), torch.tensor([0.0, 1.0] * 4)

    def measure(**given: Any) -> None:
        metric = kind(**given)
        metric.update(scores, labels)
        metric.compute()

    for field in list(inspect.signature(kind).parameters):
        for value in VALUES:
            works_or_refuses(measure, field, value)


def test_values_that_ended_in_errors_of_libraries_are_refused_by_name() -> None:
    for kind, given in (
        (vv.AdaGrad, {"initial_accumulator": 1e300}), (vv.Ftrl, {"initial_accumulator": 1e300}),
        (vv.Solver, {"num_threads": 2**31}), (SessionSettings, {"num_threads": 2**31}),
        (SessionSettings, {"instances": 2**31}), (SyntheticConfig, {"num_dense": 2**31}),
        (METRICS["ndcg"], {"k": 1.5}), (METRICS["ndcg"], {"k": "x"}), (METRICS["ndcg"], {"k": 2**63}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(given))):
            kind(**given)
