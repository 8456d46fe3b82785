"""Numbers to integers: what would change is refused."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from viviane.core.errors import DataError
from viviane.core.whole_numbers import whole_numbers

ODD: list[Any] = [3.9, -0.5, float("nan"), float("inf"), 2.0**63, 2**63, -(2**63) - 1, 10**5000, "3", None]
ODD += [Decimal("1.5")]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("shape", [lambda v: [v], lambda v: [[1, v]], lambda v: np.array([v], object)])
def test_what_is_no_whole_number_is_refused(value: Any, shape: Any) -> None:
    with pytest.raises(DataError):
        whole_numbers(shape(value), np.int64, "keys")


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint64, np.int64])
def test_arrays_that_do_not_fit(kind: Any) -> None:
    with pytest.raises(DataError, match="int32"):
        whole_numbers(np.array([1, 2**31], kind), np.int32, "keys")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**53), 2**53).map(float)), max_size=5))
@example([2**53 + 1, 1.0])
@example([])
def test_whole_numbers_are_kept_exactly(values: list[Any]) -> None:
    assert whole_numbers(values, np.int64, "keys").tolist() == [int(value) for value in values]
