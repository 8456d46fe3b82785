"""Sources take lists of ids where they take histories, and refuse anything else by name."""

from typing import Any

import numpy as np
import pytest

from viviane.core.errors import SchemaError
from viviane.retrieval import Histories, ItemKNN, Popularity

LISTS = [[3, 4], [3, 4, 5], [], [5, 6]]


@pytest.mark.parametrize("kind", [ItemKNN, Popularity])
def test_lists_give_what_histories_give(kind: Any) -> None:
    users = Histories.of(LISTS)
    sources = [kind.count(rows, 8) for rows in (users, LISTS)]
    found = [one.candidates(rows, 2).items.tolist() for one in sources for rows in (users, LISTS)]
    assert all(one == found[0] for one in found)
    items = [[4, 9], [6, 7], [3, 3], [0, -1]]
    scores = [sources[0].score(rows, asked).tolist() for rows, asked in ((users, np.array(items)), (LISTS, items))]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("kind", [ItemKNN, Popularity])
@pytest.mark.parametrize("rows", [[3, 4], [["a"]], [[0.5]], 7])
def test_other_rows_are_refused(kind: Any, rows: Any) -> None:
    with pytest.raises(SchemaError, match="a history must be a list"):
        kind.count(rows, 8)
    with pytest.raises(SchemaError, match="a history must be a list"):
        kind.count(LISTS, 8).candidates(rows, 2)


@pytest.mark.parametrize("kind", [ItemKNN, Popularity])
@pytest.mark.parametrize("items", [[3, 4], [[3], [4, 5]], [[0.5], [1.0]], [[3]], None])
def test_items_of_another_shape_are_refused(kind: Any, items: Any) -> None:
    with pytest.raises(SchemaError, match="items must be whole numbers"):
        kind.count(LISTS, 8).score([[3], [4]], items)
