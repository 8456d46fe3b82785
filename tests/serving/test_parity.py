"""A session gives the bits of `Model.predict`, for every model and every form in which rows come."""

import copy
import json
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from saved_models import MULTI_TASK, ZOO

from viviane.core.errors import ConfigError
from viviane.etl import FittedEtl
from viviane.model import Model
from viviane.serving import InferenceSession

SIZES = (1, 7, 1024)


def stacked(scores) -> np.ndarray:
    return np.stack(list(scores.values()), 1) if isinstance(scores, dict) else scores[:, None]


def as_table(rows: list[dict]) -> pa.Table:
    return pa.table({name: [row[name] for row in rows] for name in rows[0] if name not in ("click", "buy")})


FAST = ("dlrm", "mmoe", "din", "two_tower")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in ZOO])
def test_raw_rows_with_unseen_and_missing_values_get_the_bits_of_predict(name, models, raw) -> None:
    path = models.path(name)
    model, session = Model.load(path, device="cpu"), InferenceSession(path, device="cpu")
    for size in SIZES:
        rows = raw(size, seed=size)
        wanted = model.predict(as_table(rows), raw=True)
        scores = session.predict(rows)
        assert isinstance(scores, dict) == (name in MULTI_TASK)
        assert np.isfinite(wanted).all()
        assert stacked(scores).dtype == np.float32
        np.testing.assert_array_equal(stacked(scores), wanted)
    assert len(set(np.round(stacked(scores)[:, 0], 6))) > 10, "the rows' values do not matter"


@pytest.mark.parametrize("name", ["dlrm", "din", "mmoe"])
def test_encoded_rows_get_the_bits_of_predict(name, models, raw) -> None:
    path = models.path(name)
    model, session = Model.load(path, device="cpu"), InferenceSession(path, device="cpu")
    for size in SIZES:
        table = FittedEtl.load(model.etl).transform_table(as_table(raw(size, seed=size)))
        wanted = model.predict(table)
        lists = {column: table.column(column).to_pylist() for column in table.column_names}
        arrays = {k: np.asarray(v) if k not in ("hist", "tags") else v for k, v in lists.items()}
        tensors = {k: torch.as_tensor(v) if k not in ("hist", "tags") else v for k, v in arrays.items()}
        dicts = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        for rows in (table, lists, arrays, tensors, dicts, table.to_pandas(), pa.record_batch(lists)):
            np.testing.assert_array_equal(stacked(session.predict(rows, raw=False)), wanted)


def test_every_form_of_raw_rows_means_the_same(models, raw) -> None:
    rows = raw(50, seed=5)
    session = InferenceSession(models.path("dcn_v2"), device="cpu")
    wanted = session.predict(rows)
    table = as_table(rows)
    columns = table.to_pydict()
    objects = {name: np.array(values, object) for name, values in columns.items()}
    texts = {
        name: [None if v is None else str(v) for v in values] for name, values in columns.items()
    }  # as a delimited file has them
    lists = [{**row, "hist": row["hist"] and [int(x) for x in row["hist"].split("|")]} for row in rows]
    frame = pd.DataFrame(columns)  # where age and item are floats, since whole numbers hold no NaN
    for name in ("age", "item"):
        frame[name] = frame[name].astype("Int64")
    categories = frame.assign(user=frame["user"].astype("category"))
    large = table.cast(
        pa.schema([f.with_type(pa.large_string()) if f.type == pa.string() else f for f in table.schema])
    )
    coded = table.set_column(table.column_names.index("user"), "user", table["user"].dictionary_encode())
    forms = {
        "columns": columns, "objects": objects, "texts": texts, "table": table, "batch": table.to_batches()[0],
        "lists": lists, "frame": frame, "object frame": frame.astype(object), "categories": categories,
        "large": large, "dictionary": coded, "chunks": pa.concat_tables([table.slice(0, 20), table.slice(20)]),
    }  # fmt: skip
    for form, given in forms.items():
        np.testing.assert_array_equal(session.predict(given), wanted, err_msg=form)


def test_polars_frames(models, raw) -> None:
    polars = pytest.importorskip("polars")
    rows = raw(50, seed=5)
    session = InferenceSession(models.path("dcn_v2"), device="cpu")
    np.testing.assert_array_equal(session.predict(polars.from_dicts(rows)), session.predict(rows))


def test_a_reloaded_model_in_a_fresh_process_gives_the_same_bits(models, raw, warm, tmp_path) -> None:
    rows = raw(64, seed=9)
    for name in ("ple",):
        here = stacked(InferenceSession(models.path(name), device="cpu").predict(rows))
        program = (
            "import json, sys, viviane as vv\n"
            "s = vv.InferenceSession(sys.argv[1], device='cpu').predict(json.loads(sys.argv[2]))\n"
            "print(json.dumps({k: v.tolist() for k, v in s.items()} if isinstance(s, dict) else {'': s.tolist()}))"
        )
        done = warm.run(["-c", program, str(models.path(name)), json.dumps(rows)], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        there = np.stack([np.array(v, np.float32) for v in json.loads(done.stdout).values()], 1)
        np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_are_those_of_predict(precision, models, raw, tmp_path) -> None:
    model = models.make("dlrm", precision=precision)
    model.save(tmp_path / "model")
    rows = raw(100, seed=4)
    wanted = model.predict(as_table(rows), raw=True)[:, 0]
    own = InferenceSession(tmp_path / "model", device="cpu")
    assert own.precision == precision
    np.testing.assert_array_equal(own.predict(rows), wanted)
    np.testing.assert_array_equal(
        InferenceSession(tmp_path / "model", device="cpu", precision=precision).predict(rows), wanted
    )
    full = InferenceSession(tmp_path / "model", device="cpu", precision="fp32").predict(rows)
    assert not np.array_equal(full, wanted)
    np.testing.assert_allclose(full, wanted, atol=0.02)


def test_many_rows_are_computed_in_parts(models, raw) -> None:
    rows = raw(100, seed=2)
    whole = InferenceSession(models.path("din"), device="cpu").predict(rows)
    parts = InferenceSession(models.path("din"), device="cpu", max_batch_size=7).predict(rows)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert InferenceSession(models.path("din"), device="cpu").predict([]).shape == (0,)


def test_a_session_stays_in_its_process(models) -> None:
    with InferenceSession(models.path("dlrm"), device="cpu") as session:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ConfigError, match=r"(?s)cannot be copied or pickled.*open one in each process"):
                copied(session)
