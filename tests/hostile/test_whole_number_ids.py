"""Ids that are no whole numbers are refused wherever they come in; NumPy and torch would cut 3.9 to 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from viviane.core.errors import VivianeError
from viviane.embedding import EmbeddingBag
from viviane.retrieval import CatalogueMetrics, Histories, ItemIndex, ItemKNN, Popularity, Recommender
from viviane.sklearn.ranker import _groups

KNOWN = Histories.of([[3, 4, 5], [4, 5, 6]])


def recommended() -> Recommender:
    return Recommender([ItemKNN.count(KNOWN, 8)], fallback=Popularity.count(KNOWN, 8), num_candidates=2)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "histories": lambda value: Histories.of([[3], [value]]),
    "users of events": lambda value: Histories.of_events([1, value], [3, 4]),
    "items of events": lambda value: Histories.of_events([1, 2], [3, value]),
    "ids of an index": lambda value: ItemIndex(np.eye(2, dtype=np.float32), [5, value]),
    "items asked for": lambda value: recommended().similar([3, value]),
    "recommended lists": lambda value: CatalogueMetrics(8, k=[2]).add_lists([[3, value]], Histories.of([[3]])),
    "sizes of groups": lambda value: _groups(None, [2, value], 6),
    "offsets of EmbeddingBag": lambda value: EmbeddingBag(9, 2)(torch.arange(4), torch.tensor([0, value])),
}


@pytest.mark.parametrize("value", [3.9, float("nan"), float("inf"), -1e300])
@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_no_whole_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(VivianeError):
        ENTRIES[name](value)


@pytest.mark.parametrize("value", [2**63, "4", None, [4]])
@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "offsets of EmbeddingBag"])
def test_other_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(VivianeError):
        ENTRIES[name](value)


@pytest.mark.parametrize("name", ENTRIES)
def test_whole_numbers_pass(name: str) -> None:
    ENTRIES[name](4)


def test_ids_beyond_float64_stay_apart() -> None:
    """NumPy's common type of int64 and uint64 is float64, which would round them."""
    rows = [np.array([2**53 + 1]), np.array([2**53 + 1], dtype=np.uint64)]
    assert Histories.of(rows).values.tolist() == [2**53 + 1] * 2


@pytest.mark.parametrize(
    "offsets", [[0, 2**62, -(2**63)], [0, 3, 2], [1, 2, 2], [0, 5], [0, -1], [-(2**63), 2**63 - 1]]
)
def test_offsets_that_no_bag_has(offsets: list[int]) -> None:
    """Differences of the first ones overflow and look as if they rose."""
    with pytest.raises(VivianeError, match="offsets"):
        EmbeddingBag(9, 2, include_last_offset=True)(torch.arange(4), torch.tensor(offsets))
