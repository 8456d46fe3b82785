"""Rows that cannot be used are named; the others are answered. What a server publishes; statistics; the end."""

import datetime
import threading
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from saved_models import COLUMNS

import viviane as vv
from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError, DataError, KeyRangeError, SchemaError
from viviane.serving import InferenceSession, RowsError, SessionClosedError, SessionSettings

BAD = [
    ("price", "abc", "not a finite number"),
    ("price", float("inf"), "not a finite number"),
    ("price", [1.0], "not a number"),
    ("age", 2.5, "not a whole number of 64 bits"),
    ("age", 2**70, "not a whole number of 64 bits"),
    ("user", 17, "not text"),
    ("user", "\ud800", "not text"),
    ("item", {"id": 3}, "not a whole number"),
    ("hist", "1|x|3", "a list element is not a whole number"),
    ("hist", [1, "x"], "not a list whose elements are a whole number"),
    ("tags", 5, "not a list whose elements are text"),
    ("code", "xyz", "not 1 to 16 hexadecimal digits"),
    ("code", -1, "not hexadecimal digits"),
    ("when", "yesterday", "not a date and time"),
    ("when", 5, "not a date and time"),
]


@pytest.fixture(scope="module")
def session(models):
    return InferenceSession(models.path("dlrm"), device="cpu")


@pytest.mark.parametrize(("column", "value", "problem"), BAD)
def test_a_malformed_value_is_named_and_the_other_rows_keep_their_bits(column, value, problem, session, raw) -> None:
    rows = raw(9, seed=1)
    good = session.predict(rows)
    rows[4][column] = value
    with pytest.raises(RowsError, match="a malformed row") as caught:
        session.predict(rows)
    [found] = caught.value.problems
    assert (found.row, found.column) == (4, column)
    assert problem in found.problem
    assert "row 4" in str(caught.value)
    assert column in str(caught.value)
    answer = session.try_predict(rows)
    assert answer.problems == caught.value.problems
    assert np.isnan(answer.scores[4])
    kept = np.arange(9) != 4
    np.testing.assert_array_equal(answer.scores[kept], good[kept])


def test_each_refused_row_has_its_first_problem(session, raw) -> None:
    rows = raw(6, seed=1)
    rows[1]["price"], rows[1]["age"], rows[3]["code"], rows[5] = "x", "y", "z", "no dict"
    del rows[4]["user"]
    found = session.try_predict(rows)
    assert [problem.row for problem in found.problems] == [1, 3, 4, 5]
    assert "the column is missing" in found.problems[2].problem
    assert np.isnan(found.scores).tolist() == [False, True, False, True, True, True]
    with pytest.raises(RowsError, match=r"3 more row\(s\)"):
        session.predict(rows)
    assert np.isnan(session.try_predict([{} for _ in range(3)]).scores).all()


def test_columns_that_are_missing_twice_or_of_another_length(session, raw) -> None:
    columns = pa.Table.from_pylist(raw(5, seed=1)).to_pydict()
    with pytest.raises(SchemaError, match="a column is missing"):
        session.predict({name: values for name, values in columns.items() if name != "user"})
    with pytest.raises(SchemaError, match="differ in length"):
        session.predict({**columns, "user": ["a"]})
    with pytest.raises(SchemaError, match="one dict"):
        session.predict({**columns, "user": "a"})
    frame = pd.DataFrame(columns)
    with pytest.raises(SchemaError, match="occurs twice"):
        session.predict(pd.concat([frame, frame[["user"]]], axis=1))
    with pytest.raises(DataError, match="type that the config does not expect"):
        session.predict({**columns, "user": np.arange(5)})
    with pytest.raises(ConfigError, match="rows of this kind"):
        session.predict(5)


def test_labels_and_unknown_columns_do_not_matter(session, raw) -> None:
    rows = raw(5, seed=1)
    bare = [{k: v for k, v in row.items() if k not in ("click", "buy")} for row in rows]
    strange = [{**row, "click": "??", "more": object()} for row in rows]
    np.testing.assert_array_equal(session.predict(bare), session.predict(strange))


def test_times_in_all_forms(session, raw) -> None:
    rows = raw(3, seed=1)
    moment = datetime.datetime(2026, 3, 14, 12)
    answers = []
    for value in (
        "2026-03-14 12:00:00",
        moment,
        moment.replace(tzinfo=datetime.UTC),
        pd.Timestamp(moment),
        np.datetime64(moment),
    ):
        rows[1]["when"] = value
        answers.append(session.predict(rows))
        rows[1]["when"] = None
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def test_encoded_rows_are_checked(session) -> None:
    columns = {
        "price": [0.5] * 4, "age": [1.0] * 4, "user": [3] * 4, "item": [3] * 4, "hist": [[3, 4]] * 4,
        "tags": [[3], [], [4, 5], [3]], "code": [3] * 4, "weekday": [3] * 4,
    }  # fmt: skip
    good = session.predict(columns, raw=False)
    bad = [
        ("price", float("nan"), "not a finite number"),
        ("price", None, "not a number"),
        ("price", "1", "not a number"),
        ("user", 10**6, "an id out of range"),
        ("user", -1, "an id out of range"),
        ("user", 2.0, "not an id"),
        ("user", None, "not an id"),
        ("hist", [3] * 5, "not at most 4"),
        ("hist", [3, 10**6], "an id out of range"),
        ("hist", None, "not a list of ids"),
        ("tags", [1.5], "not a list of ids"),
    ]
    for column, value, problem in bad:
        rows = {**columns, column: [*columns[column][:2], value, columns[column][3]]}
        for form in (rows, [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]):
            found = session.try_predict(form, raw=False)
            assert [(one.row, one.column) for one in found.problems] == [(2, column)], (column, value)
            assert problem in found.problems[0].problem, found.problems
            np.testing.assert_array_equal(found.scores[[0, 1, 3]], good[[0, 1, 3]])
    with pytest.raises(DataError, match="ids must be whole numbers"):
        session.predict({**columns, "user": np.array([3.0] * 4)}, raw=False)
    with pytest.raises(DataError, match="another shape"):
        session.predict({**columns, "user": np.ones((4, 2), int)}, raw=False)
    with pytest.raises(SchemaError, match="other columns than the model"):
        session.predict(Batch.from_columns(vv.Schema(dense=[{"name": "x"}]), {"x": [1.0]}))


@pytest.fixture(scope="module")
def one_hot_session(tmp_path_factory):
    """A session that runs a program, which reads a batch by its addresses."""
    columns = [{"name": name, "num_ids": 9} for name in "cd"]
    schema = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x"}, {"name": "z"}], categorical=columns)
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=2, deep_mlp=[4]))
    model.compile()
    session = InferenceSession(model.save(tmp_path_factory.mktemp("batches") / "model"), device="cpu")
    assert session.execution == "program"
    return session


def test_a_batch_with_wide_ids_has_the_same_predictions(one_hot_session) -> None:
    schema = one_hot_session.schema
    batch = Batch.from_columns(schema, {"x": [1.0, 2.0], "z": [0.5, 0.25], "c": [3, 4], "d": [5, 6]})
    assert batch.one_hot.dtype == torch.int32
    wide = replace(batch, one_hot=batch.one_hot.long())
    np.testing.assert_array_equal(one_hot_session.predict(wide), one_hot_session.predict(batch))
    for far in (2**32, -(2**32)):
        # Cut to 32 bits these ids are in range.
        moved = batch.one_hot.long()
        moved[1, 0] += far
        with pytest.raises(KeyRangeError, match=r"does not fit(?s:.)*one_hot\[1, 0\](?s:.)*int32"):
            one_hot_session.predict(replace(batch, one_hot=moved))
    wide.one_hot[1, 1] = 9
    with pytest.raises(KeyRangeError, match="out of range"):
        one_hot_session.predict(wide)


def test_a_batch_of_other_shapes_is_refused_and_not_read_past_its_end(one_hot_session) -> None:
    batch = Batch.from_columns(one_hot_session.schema, {"x": [1.0, 2], "z": [0.5, 0.25], "c": [3, 4], "d": [5, 6]})
    dense, ids = batch.dense, batch.one_hot
    for changes in (
        {"dense": dense[:, :1]}, {"dense": torch.cat([dense, dense], 1)}, {"dense": dense[:1]},
        {"dense": dense.double()}, {"dense": dense.half()}, {"one_hot": ids[:, :1]}, {"one_hot": ids.float()},
    ):  # fmt: skip
        with pytest.raises(DataError, match=r"the batch has other shapes or types|ids have another type"):
            one_hot_session.predict(replace(batch, **changes))


def test_what_a_server_publishes(session, models) -> None:
    inputs = {one.name: one for one in session.inputs}
    assert set(inputs) == {column["name"] for column in COLUMNS} - {"click", "buy"}
    assert inputs["hist"].to_dict()["separator"] == "|"
    assert (inputs["user"].dtype, inputs["price"].dtype, inputs["code"].format) == ("string", "float64", "hex")
    assert all(one.raw and one.nullable for one in inputs.values())
    encoded = {one.name: one for one in session.encoded_inputs}
    assert encoded["hist"].shape == (-1, -1)
    assert encoded["hist"].is_ragged
    assert encoded["code"].num_ids == 40
    assert [one.name for one in session.outputs] == ["click"]
    two = InferenceSession(models.path("mmoe"), device="cpu", rows="encoded")
    assert [one.name for one in two.outputs] == ["click", "buy"]
    assert two.inputs == two.encoded_inputs
    assert not two.takes_raw_rows


def test_statistics_count_what_was_answered(models, raw) -> None:
    session = InferenceSession(models.path("dcn"), device="cpu")
    assert session.statistics().requests == 0
    rows = raw(5, seed=1)
    session.predict(rows)
    rows[2]["price"] = "x"
    session.try_predict(rows)
    with pytest.raises(RowsError):
        session.predict(rows)
    found = session.statistics()
    assert (found.requests, found.failed, found.rows, found.refused_rows) == (2, 1, 9, 1)
    assert found.latency.count == 2
    assert 0 < found.latency.quantile(0.5) <= found.latency.quantile(0.99) < 10
    assert found.to_dict()["latency_s"]["sum"] > 0


@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_threads_get_the_bits_of_one_thread(instances, models, raw) -> None:
    session = InferenceSession(models.path("din"), device="cpu", instances=instances)
    requests = [raw(int(size), seed=int(size)) for size in (1, 2, 7, 33, 60)]
    wanted = [session.predict(rows) for rows in requests]
    wrong, errors = [], []

    def hammer(seed: int) -> None:
        try:
            for i in np.random.default_rng(seed).permutation(len(requests)):
                if not np.array_equal(session.predict(requests[i]), wanted[i]):
                    wrong.append(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong
    assert session.statistics().requests == 9 * len(requests)


def test_closing_answers_what_was_accepted_and_refuses_the_rest(models, raw) -> None:
    session = InferenceSession(models.path("dcn"), device="cpu")
    entered, go = threading.Event(), threading.Event()
    run = session._instances.run

    def slow(batch, checked):
        entered.set()
        go.wait(10)
        return run(batch, checked=checked)

    session._instances.run = slow
    answers = []
    thread = threading.Thread(target=lambda: answers.append(session.predict(raw(3, seed=1))))
    thread.start()
    entered.wait(10)
    assert not session.close(timeout_s=0.01)
    with pytest.raises(SessionClosedError):
        session.predict(raw(1, seed=1))
    go.set()
    assert session.close()
    thread.join()
    assert np.isfinite(answers[0]).all()
    assert "closed" in repr(session)


def test_settings_are_checked(models) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        InferenceSession(models.path("dcn"), device="cpu", num_thread=2)
    with pytest.raises(ConfigError):
        SessionSettings(max_batch_size=0)
    with pytest.raises(ConfigError):
        SessionSettings(warm_up=(0,))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="GPU"):
            InferenceSession(models.path("dcn"), device="cuda")
    with pytest.raises(CheckpointError, match="no such folder"):
        InferenceSession("/nowhere/model")


def test_a_model_without_etl_takes_encoded_rows_alone(tmp_path) -> None:
    schema = vv.Schema(
        labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}], dense=[{"name": "v", "dim": 2}]
    )
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cpu")
    rows = {"c": [3, 4], "v": [[1.0, 2.0], [3.0, 4.0]]}
    np.testing.assert_array_equal(session.predict(rows), model.predict(rows)[:, 0])
    assert not session.takes_raw_rows
    with pytest.raises(ConfigError, match="has no ETL"):
        session.predict(rows, raw=True)
    with pytest.raises(ConfigError, match="has no ETL"):
        InferenceSession(tmp_path / "m", device="cpu", rows="raw")
    assert session.try_predict({**rows, "v": [[1.0], [3.0, 4.0]]}).problems[0].problem.startswith("not 2 numbers")


def test_no_optimizer_state_is_held(models) -> None:
    from viviane.embedding.module_parts import collections_of
    from viviane.serving.loading import load_model

    loaded = load_model(models.path("din"), torch.device("cpu"))
    for collection in collections_of(loaded.module).values():
        for storage in collection.all_storages():
            assert not getattr(storage, "state", {})


def test_a_number_that_operators_make_infinite_is_a_rows_problem(tmp_path) -> None:
    from viviane.etl import EtlConfig, run

    config = EtlConfig.from_dict(
        {
            "input": {"columns": [{"name": "y", "type": "int"}, {"name": "x", "type": "float"}]},
            "labels": [{"name": "y"}],
            "dense": [{"name": "x"}],
            "categorical": [{"name": "x2", "source": "x", "encoding": {"type": "hash", "num_ids": 9}}],
        }
    )
    (tmp_path / "raw.csv").write_text("y,x\n" + "\n".join(f"{i % 2},{i}.5" for i in range(50)) + "\n")
    run(config, tmp_path / "raw.csv", tmp_path / "data")
    model = vv.Model(vv.Solver(device="cpu"), vv.Dataset(tmp_path / "data" / "train"))
    model.add(vv.zoo.DCN(dim=4, deep_mlp=[8]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cpu")
    good = session.predict({"x": [1.0, 2.0, 3.0, 4.0]})
    found = session.try_predict({"x": [1.0, None, 3.0, 1e300]})
    assert [problem.row for problem in found.problems] == [1, 3]
    assert "missing values remain" in found.problems[0].problem
    assert (found.problems[0].column, found.problems[0].value) == ("x", "None")
    assert "1e+300" in found.problems[1].value
    np.testing.assert_array_equal(found.scores[[0, 2]], good[[0, 2]])
    started = time.perf_counter()
    session.try_predict({"x": [1.0] * 50 + [None]})
    assert time.perf_counter() - started < 10
