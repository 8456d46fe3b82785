"""Rows as tensors and masked arrays of every kind, lists of 10^12 items, and sessions that were closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from viviane.config import Solver
from viviane.core.errors import VivianeError
from viviane.core.rows import as_table
from viviane.data import write_dataset
from viviane.model import Model
from viviane.retrieval import Histories, IndexSettings, ItemIndex, ItemKNN, Popularity, Recommender
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.zoo import DeepFM

SCHEMA = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])
ROWS = {"y": np.array([0.0, 1.0]), "x": np.array([0.5, 1.0]), "c": np.array([3, 4])}
HUGE = (10**9 * 200, 10**12, 2**63 - 1, 2**63, 10**30)


def quantized(values: np.ndarray) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values).float(), 0.1, 0, torch.qint8)


UNREADABLE: dict[str, Callable[[np.ndarray], Any]] = {
    "masked": lambda values: np.ma.masked_array(values, [True, False]),
    "sparse": lambda values: torch.tensor(values).to_sparse(),
    "meta": lambda values: torch.tensor(values, device="meta"),
    "quantized": quantized,
    "nested": lambda values: torch.nested.nested_tensor([torch.tensor(values)]),
    "complex": lambda values: torch.tensor(values).to(torch.complex64).conj(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    made = Model(Solver(batch_size=8, device="cpu", max_steps=1), write_dataset(folder / "set", SCHEMA, [ROWS]))
    made.add(DeepFM(dim=2, deep_mlp=[2]))
    made.compile()
    made.save(folder / "saved")
    made.name = str(folder / "saved")
    return made


@pytest.mark.filterwarnings("ignore")  # of torch, about tensors that it gives up
@pytest.mark.parametrize("column", ["x", "c"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_columns_whose_values_cannot_be_read(kind: str, column: str, model: Model, tmp_path: Path) -> None:
    """Errors of torch got through, and the numbers behind a mask were taken for values."""
    rows = {**ROWS, column: UNREADABLE[kind](ROWS[column])}
    with InferenceSession(model.name, device="cpu") as session:
        for call in (model.predict, model.evaluate, session.predict):
            with pytest.raises(VivianeError):
                call(rows)
    with pytest.raises(VivianeError):
        write_dataset(tmp_path / "set", SCHEMA, [rows])
    if kind == "masked":
        assert as_table(rows)[column].to_pylist()[0] is None
    else:
        with pytest.raises(VivianeError, match="cannot be read"):
            as_table(rows)


def test_tensors_of_types_that_numpy_lacks(model: Model, tmp_path: Path) -> None:
    x = torch.tensor(ROWS["x"])
    truth = model.predict(ROWS)
    for given in (x.to(torch.bfloat16), x.to(torch.float8_e4m3fn), (-x)._neg_view(), x.float().requires_grad_()):
        rows = {**ROWS, "x": given}
        assert as_table(rows)["x"].to_pylist() == [0.5, 1.0]
        assert np.array_equal(model.predict(rows), truth)
        assert len(write_dataset(tmp_path / "set", SCHEMA, [rows], overwrite=True)) == 2
    masked = np.ma.masked_array(np.ones((2, 2)), [[True, False], [False, False]])
    assert as_table(masked).to_pydict() == {"x0": [None, 1.0], "x1": [1.0, 1.0]}


def test_a_closed_session_says_so(model: Model) -> None:
    session = InferenceSession(model.name, device="cpu")
    names = [name for name in dir(session) if not name.startswith("_")]
    session.close()
    refused = 0
    for name in names:
        try:
            found = getattr(session, name)
            if name in ("predict", "try_predict"):
                found({"x": [0.5], "c": [3]})
        except VivianeError as error:
            refused += "was closed" in str(error)
    assert refused >= 5
    with pytest.raises(AttributeError, match="nothing"):
        session.nothing  # type: ignore[attr-defined] # noqa: B018


KNOWN = Histories.of([[3, 4, 5], [4, 5, 6], [6, 3]])


@pytest.mark.parametrize("many", HUGE)
def test_lists_that_fit_into_no_memory(many: int) -> None:
    index = ItemIndex(np.eye(4, dtype=np.float32), np.arange(3, 7))
    sources = [ItemKNN.count(KNOWN, 8), Popularity.count(KNOWN, 8)]
    recommender = Recommender(sources, fallback=Popularity.count(KNOWN, 8))
    calls: list[Callable[[], Any]] = [
        lambda: index.search(np.eye(4, dtype=np.float32), many),
        lambda: index.measure_recall(np.eye(4, dtype=np.float32), [many]),
        lambda: recommender.recommend([[3]], many),
        lambda: recommender.recommend([[3]], many, remove_seen=False),
        lambda: recommender.similar([3], many),
        lambda: ItemKNN.count(KNOWN, many),
        lambda: Popularity.count(KNOWN, many),
        lambda: Recommender(sources, num_candidates=many),
        *(lambda name=name: IndexSettings(kind="hnsw", **{name: many})
          for name in ("num_lists", "num_probes", "num_links", "build_depth", "search_depth", "seed")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(VivianeError):
            call()


def test_many_candidates_are_those_of_the_catalogue() -> None:
    recommender = Recommender([Popularity.count(KNOWN, 8)], num_candidates=10**6, fallback=Popularity.count(KNOWN, 8))
    found = recommender.recommend([[3], []], 6).items
    assert found.tolist() == [[4, 5, 6, 7, -1, -1], [3, 4, 5, 6, 7, -1]]


@pytest.mark.parametrize("number", [-1, -5, -(2**63), 7, 2**31, 2**62, 2**63 - 1])
def test_excluded_ids_outside_the_catalogue_exclude_nothing(number: int) -> None:
    """An id of another row was excluded by its sum with that row's number, or the sum overflowed."""
    recommender = Recommender([Popularity(np.arange(7, dtype=np.float32))])
    for row in range(6):
        exclude = [[number] if one == row else [] for one in range(6)]
        assert recommender.recommend([[]] * 6, 4, exclude=exclude).items.tolist() == [[6, 5, 4, 3]] * 6
