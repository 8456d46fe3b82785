"""Columns joined on the CPU are those of NumPy, and wrong ones are told of."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from viviane.ops.dispatch import use_implementation
from viviane.ops.joined_columns import ANY_ID, JoinedColumn, prepare_join

EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**32, 2**32 + 3]
NUMBERS = [0.0, -0.0, 1.5, 3.5e38, -3.5e38, 1e-46, np.nan, np.inf, -np.inf, 3.4028235e38]


def joined(name, columns, values, shapes):
    """Outcome and matrices of one implementation."""
    dtypes = {one.matrix: one.dtype for one in columns}
    matrices = [np.zeros(shape, dtypes[number]) for number, shape in enumerate(shapes)]
    with use_implementation(name):
        right = prepare_join(columns)(values, matrices)
    return right, matrices


def assert_same(columns, values, shapes):
    """Both implementations agree; the matrices of wrong columns hold anything."""
    (truth, wanted), (right, found) = (joined(name, columns, values, shapes) for name in ("reference", "auto"))
    assert right is truth
    if right:
        for one, other in zip(wanted, found, strict=True):
            assert one.tobytes() == other.tobytes()
    return right


@given(data=st.data(), size=st.integers(1, 200), wide=st.booleans())
def test_columns_of_all_types_as_numpy_joins_them(data, size, wide) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    columns, values = [], []
    places = [0, 0]
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 4))
        if data.draw(st.booleans()):
            kind = data.draw(st.sampled_from(["float32", "float64"]))
            columns.append(JoinedColumn(0, places[0], width, "float32"))
            values.append(rng.normal(size=(size, width)).astype(kind))
            places[0] += width
        else:
            kind = data.draw(st.sampled_from(["int32", "int64"]))
            ranges = data.draw(
                st.lists(st.sampled_from([(0, 99), ANY_ID, (-5, 10_000)]), min_size=width, max_size=width)
            )
            columns.append(JoinedColumn(1, places[1], width, "int64" if wide else "int32", tuple(ranges)))
            values.append(rng.integers(0, 100, (size, width)).astype(kind))
            places[1] += width
        if width == 1 and data.draw(st.booleans()):
            values[-1] = values[-1].reshape(-1)
    used = {one.matrix for one in columns}
    if len(used) == 1:
        columns = [JoinedColumn(0, one.place, one.width, one.dtype, one.ranges) for one in columns]
    shapes = [(size, places[number]) for number in sorted(used)]
    assert assert_same(columns, values, shapes)


@pytest.mark.parametrize("row", [0, 63, 64, 299])
@pytest.mark.parametrize("allowed", [(0, 99), (-(2**31), 2**31 - 1), ANY_ID, (ANY_ID[0], 7), (-3, ANY_ID[1])])
def test_an_id_out_of_range_is_told_of_wherever_it_is(row, allowed) -> None:
    for edge in EDGES:
        for kind in ("int32", "int64"):
            if not np.iinfo(kind).min <= edge <= np.iinfo(kind).max:
                continue
            ids = np.zeros((300, 2), kind)
            ids[row, 1] = edge
            column = JoinedColumn(0, 0, 2, "int64", ((0, 0), allowed))
            inside = allowed[0] <= edge <= allowed[1]
            assert assert_same([column], [ids], [(300, 2)]) is inside


@pytest.mark.parametrize("row", [0, 63, 64, 299])
def test_a_number_that_is_not_finite_is_told_of_wherever_it_is(row) -> None:
    for number in NUMBERS:
        for kind in ("float32", "float64"):
            with np.errstate(over="ignore"):
                values = np.ones((300, 2), kind)
                values[row, 1] = number
                wanted = bool(np.isfinite(np.float32(number)))
            assert assert_same([JoinedColumn(0, 0, 2, "float32")], [values], [(300, 2)]) is wanted


def test_columns_leave_what_is_beside_them() -> None:
    matrix = np.full((70, 5), -7, np.int32)
    join = prepare_join([JoinedColumn(0, 1, 2, "int32", (ANY_ID, ANY_ID)), JoinedColumn(0, 4, 1, "int32", (ANY_ID,))])
    assert join([np.arange(140), np.arange(70)], [matrix])
    np.testing.assert_array_equal(matrix[:, [0, 3]], -7)
    np.testing.assert_array_equal(matrix[:, 1:3].reshape(-1), np.arange(140))
    np.testing.assert_array_equal(matrix[:, 4], np.arange(70))


def test_threads_share_the_rows() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        ids = np.arange(400_000)
        columns = [JoinedColumn(0, place, 1, "int32", ((0, 400_000),)) for place in range(2)]
        assert assert_same(columns, [ids, ids[::-1].copy()], [(400_000, 2)])
        ids[-1] = -1
        assert not assert_same(columns, [ids, ids], [(400_000, 2)])
    finally:
        torch.set_num_threads(before)
