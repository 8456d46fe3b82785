from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_rows import MIXED, rows_of
from sample_rows import SCHEMA, columns_of, make_rows, same_bits

from viviane.core.errors import ConfigError, DataError, KeyRangeError, SchemaError
from viviane.data import Dataset, write_dataset
from viviane.data.buffers import Buffers
from viviane.data.formats import VivianeFormat
from viviane.data.formats.block_layout import ALIGNMENT, narrowest, sections
from viviane.schema import CategoricalColumn, Schema

SIZES: dict[str, int] = {"rows_per_group": 7, "rows_per_file": 21}


@pytest.fixture(scope="module", params=["rows", "columns"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    """The same 100 rows in Parquet and in our format."""
    folder, rows = tmp_path_factory.mktemp("pair"), [columns_of(make_rows(100))]
    ours = VivianeFormat(layout=request.param)
    return write_dataset(folder / "p", SCHEMA, rows, **SIZES), write_dataset(
        folder / "v", SCHEMA, rows, format=ours, **SIZES
    )


@pytest.mark.parametrize("options", [
    {}, {"shuffle": True, "shuffle_rows": 7}, {"shuffle": True, "shuffle_rows": 30, "seed": 3},
    {"num_threads": 4, "drop_last": True}, {"shuffle": True, "num_threads": 3, "epoch": 2}, {"max_batches": 3},
])  # fmt: skip
def test_batches_are_those_of_parquet_bit_by_bit(pair: tuple[Dataset, Dataset], options: dict[str, Any]) -> None:
    for size in (1, 9, 33, 100, 1000):
        parquet, ours = (list(data.reader(size, **options)) for data in pair)
        assert len(parquet) == len(ours) > 0 or options.get("drop_last")
        assert all(same_bits(a, b) for a, b in zip(parquet, ours, strict=True))


def test_a_position_is_found_again(pair: tuple[Dataset, Dataset]) -> None:
    reader = pair[1].reader(9, shuffle=True, seed=4)
    batches = iter(reader)
    for _ in range(5):
        next(batches)
    state, rest = reader.state(), list(batches)
    again = Dataset(pair[1].path).reader(9, shuffle=True, seed=4)
    again.restore(state)
    assert all(same_bits(a, b) for a, b in zip(again, rest, strict=True))


@pytest.mark.parametrize("chosen", [["click", "b"], ["price", "row", "history"], ["a", "vector", "tags"]])
def test_some_columns(pair: tuple[Dataset, Dataset], chosen: list[str]) -> None:
    schema = SCHEMA.select(chosen)
    parquet, ours = (list(Dataset(data.path, schema).reader(9)) for data in pair)
    assert all(same_bits(a, b) for a, b in zip(parquet, ours, strict=True))


def test_a_schema_that_allows_less_is_compared_with_the_ids(pair: tuple[Dataset, Dataset]) -> None:
    def read_with(**change: Any) -> None:
        columns = [{**column.to_dict(), **change.get(column.name, {})} for column in SCHEMA.categorical]
        schema = Schema.from_dict({**SCHEMA.to_dict(), "categorical": columns})
        for shuffle in (False, True):
            list(Dataset(pair[1].path, schema).reader(9, shuffle=shuffle))

    read_with(a={"num_ids": 2000})
    with pytest.raises(KeyRangeError, match="column 'a'"):
        read_with(a={"num_ids": 500})
    with pytest.raises(KeyRangeError, match="column 'tags'"):
        read_with(tags={"num_ids": 20})
    with pytest.raises(DataError, match="too long"):
        read_with(history={"max_length": 2})
    with pytest.raises(DataError, match="number of ids of a bag differs from the column's hotness"):
        read_with(tags={"hotness": 3})
    with pytest.raises(SchemaError, match="kind of a column differs"):
        read_with(b={"kind": "multi_hot"})
    labels = [{"name": "click"}, {"name": "price"}]
    with pytest.raises(DataError, match="neither 0 nor 1"):
        list(Dataset(pair[1].path, Schema.from_dict({**SCHEMA.to_dict(), "labels": labels})).reader(9))


def test_sections_are_aligned_and_narrow() -> None:
    found, size = sections(MIXED, "columns", 1001, (5, 0))
    assert size % ALIGNMENT == 0
    assert all(section.start % ALIGNMENT == 0 for section in found)
    assert [section.dtype for section in found] == ["u1", "<f4", "u1", "<i4", "<u4", "<u2", "<u4", "u1"]
    together, _ = sections(MIXED, "rows", 1001, (5, 0))
    assert [section.dtype for section in together if section.kind == "one_hot"] == ["<i4"]
    sizes = {256: "u1", 257: "<u2", 65_536: "<u2", 65_537: "<i4", 2**31: "<i4"}
    assert {n: narrowest([CategoricalColumn(name="c", num_ids=n)]) for n in sizes} == sizes
    assert narrowest([CategoricalColumn(name="c", num_ids=2**31 + 1, dtype="int64")]) == "<i8"


def test_a_data_set_without_rows(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", MIXED, [], format="viviane")
    assert len(data) == 0
    assert list(data.reader(3, shuffle=True)) == []
    with pytest.raises(DataError, match="no rows"):
        data.head()


def test_values_are_checked_when_they_are_written(tmp_path: Path) -> None:
    schema = Schema.from_dict({"categorical": [{"name": "c", "num_ids": 9}]})
    with pytest.raises(KeyRangeError, match=r"the rows to write, part 1, column 'c', row 3\n  value:   9"):
        write_dataset(tmp_path / "set", schema, [{"c": [1, 2, 3, 9]}], format="viviane", rows_per_group=2)
    assert list(tmp_path.iterdir()) == []


def test_formats_by_name(tmp_path: Path) -> None:
    schema = Schema.from_dict({"categorical": [{"name": "c", "num_ids": 9}]})
    with pytest.raises(ConfigError, match="did you mean 'viviane'"):
        write_dataset(tmp_path / "set", schema, [], format="vivian")
    data = write_dataset(tmp_path / "set", schema, [{"c": [1]}], format="viviane")
    assert Dataset(data.path, format="viviane").format == data.format
    with pytest.raises(ConfigError, match=r"another format\n.*\n  value:   'norm'\n  allowed: viviane"):
        Dataset(data.path, format="norm")


def test_a_file_that_changes_is_refused_and_nothing_is_pickled_but_names(tmp_path: Path) -> None:
    schema = Schema.from_dict({"categorical": [{"name": "c", "num_ids": 300}]})
    data = write_dataset(tmp_path / "set", schema, [{"c": np.arange(300)}], format="viviane", rows_per_group=100)
    reader = data.reader(100)
    batches = iter(reader)
    kept = next(batches)
    assert len(pickle.dumps(data.storage)) < 5000
    assert rows_of(Dataset(tmp_path / "set"))["c"] == list(range(300))
    again = pickle.loads(pickle.dumps(data.storage))
    assert again.view(again.groups[2]).one_hot[0][1][:, 0].tolist() == list(range(200, 300))
    content = data.files[0].read_bytes()
    data.files[0].unlink()
    data.files[0].write_bytes(content[:-64])
    assert kept.one_hot[:, 0].tolist() == list(range(100))
    with pytest.raises(DataError, match="changed after the data set was opened"):
        list(data.reader(100))
    reader.close()


def test_buffers_are_used_again_only_when_nobody_sees_them() -> None:
    buffers = Buffers(kept_bytes=1 << 20)
    make, shown = buffers.new((100, 100), torch.int64)
    first = make()
    view, array = first[3:5], shown[10:]
    del make, first, shown
    second = buffers.new((100, 100), torch.int64)[0]()
    assert second.data_ptr() != view.data_ptr() - 3 * 800
    view[:] = 7
    array[:] = 8
    second[:] = 9
    assert (view == 7).all()
    assert (array == 8).all()
    place = array.ctypes.data - 10 * 800
    del view, array
    assert buffers.new((300, 100), torch.int64)[0]().data_ptr() != place  # of another size
    assert buffers.new((200, 100), torch.float32)[0]().data_ptr() == place
    many = [buffers.new((100, 100), torch.int64)[0]() for _ in range(40)]  # more than is kept
    assert len({one.data_ptr() for one in many}) == 40


def test_page_locked_memory_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema.from_dict({"categorical": [{"name": "c", "num_ids": 9}]})
    data = write_dataset(tmp_path / "set", schema, [{"c": [1]}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        data.reader(1, pin_memory=True)
