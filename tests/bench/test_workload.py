"""What is measured: ids drawn by their law, bytes counted as the formulas say, sizes that are refused."""

import numpy as np
import pytest
import torch

from viviane.bench.workload import (
    RULES,
    TABLE_SIZES,
    Draw,
    Load,
    Tables,
    draw_ids,
    lookup_bytes,
    step_bytes,
)
from viviane.core.errors import ConfigError
from viviane.ops.row_update import initial_state, state_shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("law", ["power-law", "uniform"])
def test_ids_are_in_range_and_reach_the_ends(law: str) -> None:
    sizes = [1, 2, 7, 10_131_227]
    for ids in draw_ids(sizes, 4096, law, count=2):
        assert ids.dtype == torch.int32
        assert (ids >= 0).all()
        assert (ids < torch.tensor(sizes)).all()
        assert ids[:, :3].amax(0).tolist() == [0, 1, 6]
        assert ids[:, 1:3].amin(0).tolist() == [0, 0]


def test_a_power_law_falls_as_it_says() -> None:
    (ids,) = draw_ids([1000], 400_000, "power-law", 1.5, count=1)
    counts = np.bincount(ids[:, 0].numpy(), minlength=1000)
    # The continuous law gives id k the mass of [k + 1, k + 2); 200,000 draws of the first id leave an error below 1%.
    weight = (np.arange(1000) + 1.0) ** -0.5 - (np.arange(1000) + 2.0) ** -0.5
    expected = 400_000 * weight / weight.sum()
    assert np.abs(counts[:20] - expected[:20]).max() < 5 * np.sqrt(expected[:20].max())
    (flat,) = draw_ids([10], 100_000, "uniform", count=1)
    assert np.bincount(flat[:, 0].numpy()).min() > 9_500


def test_wrong_laws_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown distribution"):
        draw_ids([3], 1, "zipf")
    for exponent in (1.0, 0.0, -2.0):
        with pytest.raises(ConfigError, match="exponent"):
            draw_ids([3], 1, "power-law", exponent)


@pytest.mark.parametrize("rule", RULES)
def test_state_bytes_are_those_of_the_state(rule: str) -> None:
    weight = torch.empty(11, 6)
    shapes = [state_shape(name, weight, RULES[rule]) for name in initial_state(RULES[rule])]
    tables = Tables((11,), 6, rule, CPU)
    assert tables.num_bytes == 11 * 6 * 4 + sum(4 * int(np.prod(shape)) for shape in shapes)


def test_bytes_by_hand() -> None:
    # Two tables, three samples: rows 0, 1 of the first and row 5 of the second are touched.
    ids = [torch.tensor([[0, 5], [1, 5], [0, 5]], dtype=torch.int32)]
    load = Load(ids, torch.zeros(3, 2 * 4))
    assert (load.size, load.num_ids, load.distinct_rows) == (3, 6, 3.0)
    tables = Tables((2, 6), 4, "adagrad", CPU)
    looked_up = 3 * 16 + 6 * 4 + 6 * 16
    assert lookup_bytes(tables, load) == looked_up
    assert step_bytes(tables, load) == looked_up + 6 * 16 + 3 * 2 * (16 + 16)


def test_sizes_of_public_data_sets() -> None:
    assert {name: (len(rows), sum(rows)) for name, rows in TABLE_SIZES.items()} == {
        "criteo-kaggle": (26, 33_762_577),
        "criteo-terabyte": (26, 187_767_399),
        "movielens-20m": (2, 165_237),
    }


def test_draws_repeat() -> None:
    tables = Tables((100, 5), 3, "sgd", CPU)
    first, second = (Draw(17).load(tables) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.ids, second.ids, strict=True))
    assert torch.equal(first.gradient, second.gradient)
    assert first.gradient.shape == (17, 6)
