"""Rows to predict need no labels: in a data set's files, in what the ETL reads, or in tables."""

import numpy as np
import pyarrow.parquet as pq
import pytest

import viviane as vv
from viviane.core.errors import ConfigError, DataError, KeyRangeError, SchemaError
from viviane.data import Dataset, write_dataset
from viviane.data.write import ROWS_PER_FILE
from viviane.model.prediction import as_dataset
from viviane.schema import Schema
from viviane.training import History

SCHEMA = Schema(
    labels=[{"name": "a"}, {"name": "b"}], dense=[{"name": "x"}],
    categorical=[{"name": "c", "num_ids": 9}, {"name": "h", "num_ids": 9, "kind": "multi_hot", "weights": "hw"}],
    sample_weight="w",
)  # fmt: skip
ROWS = {
    "a": [0, 1, 0], "b": [1, 1, 0], "x": [0.5, 1.5, 2.5], "c": [3, 4, 5], "h": [[3], [], [4, 5]],
    "hw": [[1.0], [], [0.5, 2.0]], "w": [1.0, 2.0, 3.0],
}  # fmt: skip


def without(folder, *names):
    write_dataset(folder, SCHEMA, [ROWS])
    for file in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(list(names)), file)
    for file in folder.glob("manifest*.json"):
        file.unlink()
    return folder


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "w")])
def test_a_data_set_without_labels(tmp_path, names):
    data = Dataset(without(tmp_path / "set", *names))
    assert data.schema.labels == ()
    assert data.schema.sample_weight == (None if "w" in names else "w")
    data.check()
    (batch,) = data.reader(8)
    assert batch.labels.shape == (3, 0)
    assert batch.dense[:, 0].tolist() == ROWS["x"]
    assert batch.bags["h"].weights.tolist() == [1.0, 0.5, 2.0]
    with_labels = write_dataset(tmp_path / "all", SCHEMA, [ROWS])
    assert SCHEMA.difference(data.schema) == ["column 'a' is missing", "column 'b' is missing"]
    assert with_labels.schema == SCHEMA


@pytest.mark.parametrize("names", [("a",), ("w",), ("c",), ("a", "b", "c")])
def test_what_else_is_missing_is_an_error(tmp_path, names):
    with pytest.raises(SchemaError, match="a column of the schema is missing"):
        Dataset(without(tmp_path / "set", *names))


def test_predicting_without_labels_gives_the_same(model, data, valid, tmp_path):
    model.compile()
    model.fit(data)
    expected = model.predict(valid)
    labels = [label.name for label in valid.schema.labels]
    folder = tmp_path / "bare"
    folder.mkdir()
    valid.schema.save(folder)
    for file in valid.files:
        pq.write_table(pq.read_table(file).drop_columns(labels), folder / file.name)
    bare = Dataset(folder)
    assert np.array_equal(model.predict(bare), expected)
    for use in (model.evaluate, model.fit):
        with pytest.raises(SchemaError, match=f"column '{labels[0]}' is missing"):
            use(bare)


@pytest.mark.parametrize("value", [1e300, -1e300, float("nan"), float("inf")])
def test_numbers_that_float32_does_not_hold_are_refused(model, data, valid, value):
    """1e300 became infinite, and the prediction NaN, without a word."""
    model.compile()
    model.fit(data)
    columns = next(iter(valid.reader(4)))
    ends = np.cumsum([one.dim for one in data.schema.dense])
    parts = np.split(columns.dense.double().numpy(), ends[:-1], axis=1)
    dense = {one.name: part.copy() for one, part in zip(data.schema.dense, parts, strict=True)}
    ids = {column.name: columns.one_hot[:, i].numpy() for i, column in enumerate(data.schema.one_hot)}
    bags = {column.name: columns.bag(column.name) for column in data.schema.bags}
    assert model.predict({**dense, **ids, **bags}).shape[0] == 4
    name = next(iter(dense))
    dense[name][2, 0] = value
    with pytest.raises(DataError, match=rf"(?s)not finite.*row 2, column '{name}'"):
        model.predict({**dense, **ids, **bags})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("x", float("nan"), "finite"), ("c", 99, "outside the range"), ("y", 2.0, "neither 0 nor 1")],
)
def test_an_error_names_rows_in_memory_and_no_temporary_file(column, value, message):
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])
    rows = {"y": np.arange(40) % 2 * 1.0, "x": np.arange(40.0), "c": np.arange(40) % 6 + 3}
    model = vv.Model(vv.Solver(batch_size=8, device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=2, deep_mlp=(4,)))
    model.compile()
    rows[column][33] = value
    with pytest.raises(DataError if column != "c" else KeyRangeError, match=message) as caught:
        model.fit(rows, epochs=1, verbose=0)
    assert caught.value.where == f"the given dict, column '{column}', row 33"
    assert "part-" not in str(caught.value)


def test_columns_named_like_a_place_keep_their_names_in_errors():
    name = "part 0 of the source, row 3"
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": name}], categorical=[{"name": "c", "num_ids": 9}])
    rows = {"y": [0.0, 1.0], name: [0.5, 0.5], "c": [3, 4]}
    with pytest.raises(DataError) as caught, as_dataset(rows, schema, None) as data:
        raise DataError("x", where=f"{data.path}/part-00002.parquet, row group 0, column {name!r}, row 7")
    assert caught.value.where == f"the given dict, column {name!r}, row {2 * ROWS_PER_FILE + 7}"
    assert str(caught.value) == f"x\n  where:   {caught.value.where}"
    rows[name][1] = None
    with pytest.raises(DataError) as caught, as_dataset(rows, schema, None):
        pass
    assert caught.value.where == f"the given dict, column {name!r}, row 1"


def test_a_history_shows_its_last_evaluation():
    rows = [{"split": "valid", "step": 5, "auc": 0.7123456}, {"split": "train", "step": 6, "loss": 0.5}]
    assert repr(History(rows)) == "History(rows=2, the last: split='valid', step=5, auc=0.71235)"
    assert repr(History()) == "History(no rows)"


def test_rows_and_callbacks_that_cannot_be_are_named() -> None:
    """A frame as it is, with a missing value, and a function in place of a callback."""
    schema = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 5}])
    model = vv.Model(vv.Solver(batch_size=2, device="cpu"), schema)
    model.add(vv.zoo.DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    rows = {"y": [0.0, 1.0, 1.0], "x": [0.5, None, 1.0], "c": [3, 4, 3]}
    with pytest.raises(DataError, match=r"(?s)contain a null.*the given dict, column 'x', row 1.*fill it"):
        model.fit(rows)
    with pytest.raises(ConfigError, match=r"(?s)not a callback.*'function'.*viviane.training.Callback"):
        model.fit({**rows, "x": [0.5, 1.5, 1.0]}, callbacks=[lambda step: None])
