"""A model that trains from raw 64-bit ids: no vocabulary, tables whose rows come with their ids."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import viviane as vv
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data import write_dataset
from viviane.embedding import DynamicOptions
from viviane.etl import EtlConfig, run
from viviane.model.nodes import TableOptions
from viviane.schema import Schema

ROWS = 4000
SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "x"}],
    categorical=[
        {"name": "user", "num_ids": None},
        {"name": "seen", "num_ids": None, "kind": "multi_hot", "vocabulary": "item"},
        {"name": "item", "num_ids": None},
        {"name": "city", "num_ids": 9},
    ],
)


def _columns(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    users = rng.integers(-(2**63), 2**63, 60)
    items = rng.integers(-(2**63), 2**63, 40)
    user, item = rng.integers(0, 60, rows), rng.integers(0, 40, rows)
    likes = rng.standard_normal(60)[user] + rng.standard_normal(40)[item]
    seen = [items[rng.integers(0, 40, n)].tolist() for n in rng.integers(0, 4, rows)]
    return {
        "click": (likes > 0).astype(np.float32),
        "x": rng.standard_normal(rows).astype(np.float32),
        "user": users[user],
        "seen": seen,
        "item": items[item],
        "city": rng.integers(3, 9, rows).astype(np.int32),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "train"
    write_dataset(folder, SCHEMA, [_columns()])
    return vv.Dataset(folder)


def _model(schema=SCHEMA, **options):
    solver = vv.Solver(device="cpu", batch_size=40, epochs=4, seed=5, checkpoint_every=30)
    model = vv.Model(solver, schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=4, init="normal", **options))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", leading_dim=16))
    model.add(vv.DenseLayer("both", "Concat", bottom=["flat", "dense"]))
    model.add(vv.DenseLayer("logit", "MLP", bottom="both", num_outputs=[16, 1]))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile(optimizer=vv.Adam(lr=0.02))
    return model


def test_learns_from_raw_ids_and_predicts_the_same_after_a_reload(dataset, tmp_path):
    model = _model()
    model.fit(dataset)
    assert model.evaluate(dataset)["auc"] > 0.95  # the planted signal is a function of user and item alone
    assert {"user": 60, "item": 40}.items() <= {
        name: len(model.module.emb.dynamic_table(name)) for name in ("user", "item")
    }.items()
    rows = {name: column for name, column in _columns(50, seed=1).items() if name != "click"}
    before = model.predict(rows)
    loaded = vv.Model.load(model.save(tmp_path / "saved"), device="cpu")
    assert np.array_equal(loaded.predict(rows), before)
    assert vv.Model.from_json(tmp_path / "saved", model.solver, SCHEMA).nodes == model.nodes


def test_resumes_bit_by_bit(dataset, tmp_path):
    options = {"dynamic": {"max_capacity": 59, "when_full": "evict", "admission": {"type": "count", "count": 2}}}
    whole, first, second = (_model(**options) for _ in range(3))
    whole.fit(dataset)
    first.fit(dataset, epochs=2, run_folder=tmp_path / "run")
    second.fit(dataset, run_folder=tmp_path / "run", resume=True)
    for key, part in whole.module.state_dict().items():
        assert torch.equal(part, second.module.state_dict()[key]), key


def test_options_of_a_node_and_of_one_table():
    model = _model(
        dynamic=DynamicOptions(initial_capacity=7), tables={"item": TableOptions(dynamic={"max_capacity": 5})}
    )
    tables = model.module.emb.tables
    assert (tables["user"].initial_capacity, tables["item"].max_capacity) == (7, 5)
    assert (tables["user"].padding_id, tables["city"].padding_id) == (None, 0)
    with pytest.raises(ConfigError, match=r"takes every id[\s\S]*'user'"):
        _model(tables={"user": TableOptions(out_of_range="hash")})


def test_what_cannot_be_done_is_refused(dataset):
    model = _model()
    model.solver = vv.Solver(**{**model.solver.model_dump(), "ema_decay": 0.9})
    with pytest.raises(ConfigError, match=r"evict rows[\s\S]*'user'"):
        model.fit(dataset)


def test_summary_and_drawing_name_dynamic_tables(capsys):
    model = _model()
    model.summary()
    assert "(dynamic)" in capsys.readouterr().out
    assert "1" in model.plot()
    assert "3 table(s), 9 rows, 2 dynamic" in model.plot()


def test_the_etl_keeps_raw_ids(tmp_path):
    config = EtlConfig(
        input={
            "columns": [
                {"name": "y", "type": "int"},
                {"name": "n", "type": "int"},
                {"name": "h", "type": "hex"},
                {"name": "t"},
            ]
        },
        labels=[{"name": "y"}],
        categorical=[
            {"name": "n", "encoding": {"type": "raw", "missing": -1}},
            {"name": "h", "encoding": {"type": "raw"}},
            {"name": "t", "encoding": {"type": "raw"}},
        ],
    )
    (tmp_path / "a.csv").write_text("y,n,h,t\n1,-5,ffffffffffffffff,cat\n0,,0a,dog\n1,9007199254740993,7,cat\n")
    run(config, [tmp_path / "a.csv"], tmp_path / "out")
    data = vv.Dataset(tmp_path / "out" / "train")
    assert [column.num_ids for column in data.schema.categorical] == [None] * 3
    with data.reader(3) as reader:
        ids = next(iter(reader)).one_hot
    assert ids[:, 0].tolist() == [-5, -1, 9007199254740993]
    assert ids[:, 1].tolist() == [-1, 10, 7]
    # The first 60 bits of MD5: of b"cat" it is d077f244def8a70e5ea758bd8352fcd8.
    assert int(ids[0, 2]) == 0xD077F244DEF8A70
    assert ids[0, 2] == ids[2, 2] != ids[1, 2]
    strict = EtlConfig.from_dict(config.to_dict() | {"categorical": [{"name": "n", "encoding": {"type": "raw"}}]})
    with pytest.raises(DataError, match=r"missing values remain[\s\S]*'n'"):
        run(strict, [tmp_path / "a.csv"], tmp_path / "strict")


@pytest.mark.parametrize(("spec", "message"), [
    ({"name": "f", "encoding": {"type": "raw"}}, "whole numbers or texts"),
    ({"name": "t", "encoding": {"type": "raw"}, "dtype": "int32"}, "int64"),
])  # fmt: skip
def test_the_etl_refuses_what_has_no_raw_ids(spec, message):
    columns = [{"name": "f", "type": "float"}, {"name": "t"}]
    with pytest.raises(ConfigError, match=message):
        EtlConfig(input={"columns": columns}, categorical=[spec])


def test_num_ids_has_to_be_said():
    with pytest.raises((ConfigError, SchemaError), match="num_ids"):
        Schema(labels=[{"name": "y"}], categorical=[{"name": "c"}])


def test_ids_of_32_bits_are_written_as_the_schema_says(tmp_path):
    columns = {**_columns(5), "user": np.arange(5, dtype=np.int32)}
    write_dataset(tmp_path / "d", SCHEMA, [columns])
    assert vv.Dataset(tmp_path / "d").schema.column("user").dtype == "int64"
    assert pa.types.is_int64(pa.parquet.read_schema(next((tmp_path / "d").glob("*.parquet"))).field("user").type)
