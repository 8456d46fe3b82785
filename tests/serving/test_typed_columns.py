"""Typed columns become the batch that the checked way makes of them, and anything else is left to that way."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import viviane as vv
from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.serving import InferenceSession
from viviane.serving.encoded_rows import ORIGIN, encoded_batch
from viviane.serving.errors import RowsError
from viviane.serving.matrices import columns_of_matrices
from viviane.serving.typed_columns import TypedColumns

SCHEMA = vv.Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "x"}, {"name": "v", "dim": 3}, {"name": "z"}],
    categorical=[
        {"name": "c", "num_ids": 9},
        {"name": "raw", "num_ids": None},
        {"name": "m", "num_ids": 20, "kind": "multi_hot", "hotness": 4},
        {"name": "d", "num_ids": 7},
        {"name": "s", "num_ids": 50, "kind": "sequence", "hotness": 2, "max_length": 2},
    ],
)
STRICT = frozenset({"c", "m"})


def request(size: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=size).astype(np.float32), "v": rng.normal(size=(size, 3)), "z": rng.normal(size=(size, 1)),
        "c": rng.integers(0, 9, size).astype(np.int32), "raw": rng.integers(-(2**62), 2**62, (size, 1)),
        "m": rng.integers(0, 20, (size, 4)), "d": rng.integers(0, 7, size),
        "s": rng.integers(0, 50, (size, 2)).astype(np.int32), "unread": np.zeros(size),
    }  # fmt: skip


def assert_same(found: Batch, wanted: Batch) -> None:
    assert (found.layout, found.origin, found.size) == (wanted.layout, wanted.origin, wanted.size)
    pairs = [(found.labels, wanted.labels), (found.dense, wanted.dense), (found.one_hot, wanted.one_hot)]
    assert [*found.bags] == [*wanted.bags]
    for name, bag in wanted.bags.items():
        pairs += [(found.bags[name].values, bag.values), (found.bags[name].offsets, bag.offsets)]
    for one, other in pairs:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_few_rows_and_many_go_the_same_way_for_a_caller() -> None:
    """Up to 64 rows are stacked first; a bag may have the name of a stack."""
    for bag in ("m", "dense"):
        columns = [
            {"name": "c", "num_ids": 9}, {"name": "d", "num_ids": None}, {"name": "e", "num_ids": 300},
            {"name": bag, "num_ids": 20, "kind": "multi_hot", "hotness": 4},
        ]  # fmt: skip
        schema = vv.Schema(dense=[{"name": "x"}, {"name": "z"}], categorical=columns)
        typed, strict = TypedColumns.of(schema, frozenset({"c"}), ORIGIN), frozenset({"c"})
        for size in (1, 2, 63, 64, 65, 200):
            rng = np.random.default_rng(size)
            rows = {
                "x": rng.normal(size=size).astype(np.float32), "z": rng.normal(size=(size, 1)),
                "c": rng.integers(0, 9, size).astype(np.int32), "d": rng.integers(-(2**62), 2**62, (size, 1)),
                "e": rng.integers(0, 300, size), bag: rng.integers(0, 20, (size, 4)),
            }  # fmt: skip
            found = typed.batch(rows)
            assert found is not None
            assert_same(found, encoded_batch(rows, schema, strict)[0])
            for name, wrong in (("c", 9), ("e", 2**31), (bag, -(2**40)), ("z", np.inf), ("x", np.nan)):
                changed = np.array(rows[name], np.float64 if name in "xz" else np.int64)
                changed[size // 2] = wrong
                assert typed.batch({**rows, name: changed}) is None
            for name, values in rows.items():
                assert typed.batch({**rows, name: values[:-1]}) is None
                assert typed.batch({**rows, name: values.astype(bool)}) is None
            assert typed.batch({name: values[:0] for name, values in rows.items()}) is None


@given(size=st.integers(1, 150), seed=st.integers(0, 1000))
def test_typed_columns_become_the_batch_of_the_checked_way(size, seed) -> None:
    rows = request(size, seed)
    truth, problems = encoded_batch(rows, SCHEMA, STRICT)
    assert problems == []
    typed = TypedColumns.of(SCHEMA, STRICT, ORIGIN).batch(rows)
    assert typed is not None
    assert_same(typed, truth)


def test_columns_that_lie_anyhow_are_read_right() -> None:
    size = 67
    rows = request(size)
    wide = np.zeros((size, 8), np.int64)
    wide[:, ::2] = rows["m"]
    memory = np.zeros(size * 8 + 1, np.uint8)
    odd = memory[1:].view(np.int64)
    odd[:] = rows["d"]
    assert not odd.flags.aligned
    strange = {**rows, "m": wide[:, ::2], "d": odd, "x": rows["x"][::-1][::-1], "v": np.asfortranarray(rows["v"])}
    typed = TypedColumns.of(SCHEMA, STRICT, ORIGIN).batch(strange)
    assert typed is not None
    assert_same(typed, encoded_batch(rows, SCHEMA, STRICT)[0])


@pytest.mark.parametrize(
    "change",
    [
        {"c": np.array([1, 9, 2])}, {"c": np.array([1, -1, 2])}, {"d": np.array([1, 2**31, 2])},
        {"m": np.full((3, 4), 20)}, {"s": np.full((3, 2), -(2**40))}, {"x": np.array([1, np.nan, 1])},
        {"z": np.array([1, 1e300, 1])}, {"v": np.full((3, 3), np.inf, np.float32)}, {"c": [1, 2, 3]},
        {"c": np.ma.masked_array([1, 2, 3], [0, 1, 0])}, {"c": np.array([1, 2])}, {"c": np.array(3)},
        {"c": np.ones((3, 2), int)}, {"m": np.ones((3, 3), int)}, {"m": np.ones(12, int)}, {"c": np.array([1.0, 2, 3])},
        {"x": np.array(["1", "2", "3"])}, {"x": np.array([1, 2, 3])}, {"c": np.array([1, 2, 3], ">i8")},
        {"c": np.array([True, False, True])}, {"c": np.array([1, 2, 3], np.uint64)}, {"c": None},
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_left_to_the_checked_way(change) -> None:
    typed = TypedColumns.of(SCHEMA, STRICT, ORIGIN)
    assert typed.batch(request(3)) is not None
    assert typed.batch({**request(3), **change}) is None


def test_other_forms_of_rows_are_left_to_the_checked_way() -> None:
    typed = TypedColumns.of(SCHEMA, STRICT, ORIGIN)
    rows = request(3)
    missing = {name: values for name, values in rows.items() if name != "d"}
    empty = {name: values[:0] for name, values in rows.items()}
    del rows["unread"]
    batch = Batch.from_columns(SCHEMA, {**rows, "y": np.zeros(3)})
    for form in ([{"c": 1}], missing, empty, None, batch):
        assert typed.batch(form) is None


@pytest.mark.parametrize("column", [
    {"name": "b", "num_ids": 9, "kind": "multi_hot", "max_length": 3},
    {"name": "b", "num_ids": 9, "kind": "multi_hot", "hotness": 3, "weights": "w"},
])  # fmt: skip
def test_bags_of_varying_length_or_with_weights_have_no_such_way(column) -> None:
    assert TypedColumns.of(vv.Schema(categorical=[column]), frozenset(), ORIGIN) is None


def as_matrices(rows: dict, dense: type = np.float32, ids: type = np.int64) -> dict:
    numbers = [rows[name].reshape(len(rows["x"]), -1) for name in ("x", "v", "z")]
    whole = [rows[name].reshape(-1) for name in ("c", "raw", "d")]
    return {
        "dense": np.concatenate(numbers, 1).astype(dense), "one_hot": np.stack(whole, 1).astype(ids),
        "m": rows["m"], "s": rows["s"],
    }  # fmt: skip


@given(size=st.integers(1, 150), seed=st.integers(0, 1000), kind=st.sampled_from([np.float32, np.float64]))
def test_matrices_become_the_batch_of_their_columns(size, seed, kind) -> None:
    rows = request(size, seed)
    rows |= {name: rows[name].astype(np.float32) for name in ("x", "v", "z")}
    truth, problems = encoded_batch(rows, SCHEMA, STRICT)
    given_rows = as_matrices(rows, kind)
    assert problems == []
    typed = TypedColumns.of(SCHEMA, STRICT, ORIGIN, matrices=True).batch(given_rows)
    assert typed is not None
    assert_same(typed, truth)
    assert_same(encoded_batch(columns_of_matrices(given_rows, SCHEMA), SCHEMA, STRICT)[0], truth)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = vv.Model(vv.Solver(device="cpu"), SCHEMA_OF_MODEL)
    model.add(vv.zoo.DLRM(dim=4, bottom_mlp=[8, 4], top_mlp=[8]))
    model.compile()
    return model.save(tmp_path_factory.mktemp("matrices") / "model")


SCHEMA_OF_MODEL = vv.Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "x"}, {"name": "z"}],
    categorical=[{"name": name, "num_ids": most} for name, most in (("c", 9), ("d", 7), ("e", 300))],
)


def forms(dense, ids) -> list:
    columns = {"dense": dense, "one_hot": ids}
    lists = {name: values.tolist() for name, values in columns.items()}
    return [
        columns, lists, [{"dense": one, "one_hot": other} for one, other in zip(*lists.values(), strict=True)],
        {name: torch.from_numpy(values) for name, values in columns.items()},
        pa.table({name: pa.array(values) for name, values in lists.items()}),
    ]  # fmt: skip


def test_a_session_of_matrices_gives_the_bits_of_columns(saved) -> None:
    rng = np.random.default_rng(0)
    dense, ids = rng.random((40, 2)), rng.integers(0, [9, 7, 300], (40, 3))
    columns = {"x": dense[:, 0], "z": dense[:, 1], **{name: ids[:, place] for place, name in enumerate("cde")}}
    with InferenceSession(saved, device="cpu", rows="matrices") as session, InferenceSession(saved) as plain:
        assert [(one.name, one.shape, one.dtype, one.num_ids, one.columns) for one in session.inputs] == [
            ("dense", (-1, 2), "float32", None, ("x", "z")), ("one_hot", (-1, 3), "int32", 7, ("c", "d", "e")),
        ]  # fmt: skip
        truth = plain.predict(columns)
        for form in forms(dense, ids):
            np.testing.assert_array_equal(session.predict(form), truth)
        wrong = ids.copy()
        wrong[3, 1], wrong[5, 2] = 7, -1
        strange = dense.copy()
        strange[9, 1] = np.nan
        for form in forms(strange, wrong):
            found = session.try_predict(form)
            assert [(one.row, one.column) for one in found.problems] == [(3, "d"), (5, "e"), (9, "z")]
            kept = np.delete(np.arange(40), [3, 5, 9])
            np.testing.assert_array_equal(found.scores[kept], truth[kept])
        assert session.predict({"dense": np.empty((0, 2)), "one_hot": np.empty((0, 3), int)}).shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dense": np.ones((4, 3))}, DataError, "another shape"),
        ({"dense": np.ones(8)}, SchemaError, "differ in length"),
        ({"dense": np.ones(4)}, DataError, "another shape"),
        ({"dense": [[1, 2], [3], [4, 5], [6, 7]]}, DataError, "another shape|cannot be read"),
        ({"dense": [["a", "b"]] * 4}, DataError, "another type"),
        ({"one_hot": np.ones((4, 3))}, DataError, "ids must be whole numbers"),
        ({"one_hot": np.ones((3, 3), int)}, SchemaError, "differ in length"),
        ({"one_hot": None}, SchemaError, "array or a list"),
    ],
    ids=str,
)
def test_wrong_matrices_are_refused(saved, change, error, words) -> None:
    with InferenceSession(saved, device="cpu", rows="matrices") as session:
        rows = {"dense": np.ones((4, 2)), "one_hot": np.ones((4, 3), int)}
        session.predict(rows)
        with pytest.raises(error, match=words):
            session.predict({**rows, **change})
        with pytest.raises(SchemaError, match="a column is missing"):
            session.predict({"dense": rows["dense"]})
        with pytest.raises(RowsError, match="one_hot"):
            session.predict([{"dense": [1, 1], "one_hot": [1, 1, 1]}, {"dense": [1, 1]}])


def test_a_bag_with_the_name_of_a_matrix_is_refused(tmp_path) -> None:
    column = {"name": "one_hot", "num_ids": 9, "kind": "multi_hot", "hotness": 3}
    model = vv.Model(vv.Solver(device="cpu"), vv.Schema(labels=[{"name": "y"}], categorical=[column]))
    model.add(vv.zoo.DeepFM(dim=2, deep_mlp=[4]))
    model.compile()
    with pytest.raises(ConfigError, match="name of a matrix"):
        InferenceSession(model.save(tmp_path / "model"), device="cpu", rows="matrices")
