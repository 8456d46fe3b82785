"""The number of values that every list of a column has: given, found out, checked with file and row, in the schema."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import config, read, text

from viviane.core.errors import DataError
from viviane.data import Dataset
from viviane.etl import EtlConfig, FittedEtl, picture, register_function, run

COLUMNS: list[dict[str, Any]] = [
    {"name": "y", "type": "int"}, {"name": "tags", "separator": "|"}, {"name": "part", "type": "int"},
]  # fmt: skip


def tagged(derived: tuple[dict[str, Any], ...] = (), source: str = "tags", **column: Any) -> EtlConfig:
    one = {"name": "t", "source": source, "kind": "multi_hot", **column}
    return config(COLUMNS, labels=[{"name": "y"}], derived=derived, categorical=[one], ignored=["part"])


def test_a_given_hotness_stands_in_the_schema_and_a_missing_list_has_it_too(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "y,tags,part\n1,a|b,0\n0,,0\n1,b|c,0\n")
    run(tagged(hotness=2), raw, tmp_path / "out")
    data = Dataset(tmp_path / "out/train")
    assert data.schema.categorical[0].hotness == 2
    assert read(tmp_path / "out/train")["t"] == [[4, 3], [1, 1], [3, 5]]
    data.check()


def test_a_list_of_another_length_is_named_with_file_and_line(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "y,tags,part\n1,a|b,0\n0,a|b|c,0\n1,a,0\n")
    with pytest.raises(DataError, match="not 2 values, the hotness of 't'") as caught:
        run(tagged(hotness=2), raw, tmp_path / "out")
    assert "raw.csv, line 3, column 'tags'" in str(caught.value)
    assert run(tagged(hotness=2), raw, tmp_path / "out", on_bad_row="reject").rejected == 2
    # A list that is cut to the hotness has it; a shorter one has not.
    with pytest.raises(DataError, match="line 4, column 'tags'"):
        run(tagged(hotness=2, max_length=2), raw, tmp_path / "cut")
    assert run(tagged(hotness=1, max_length=1), raw, tmp_path / "one").num_cut == {"t": 2}


def test_auto_keeps_one_length_and_leaves_out_several(tmp_path: Path) -> None:
    content = "y,tags,part\n1,a|b,0\n0,,0\n1,b|c,1\n"
    raw = text(tmp_path / "raw.csv", content)
    run(tagged(hotness="auto"), raw, tmp_path / "out", split="time:part:test@1")
    assert Dataset(tmp_path / "out/train").schema.categorical[0].hotness == 2
    # The test part counts too: it is read with the same schema.
    more = text(tmp_path / "more.csv", content + "1,c,1\n")
    run(tagged(hotness="auto"), more, tmp_path / "several", split="time:part:test@1")
    assert Dataset(tmp_path / "several/train").schema.categorical[0].hotness is None
    run(tagged(hotness="auto", max_length=1), more, tmp_path / "cut")
    assert Dataset(tmp_path / "cut/train").schema.categorical[0].hotness == 1
    run(tagged(hotness="auto"), text(tmp_path / "none.csv", "y,tags,part\n1,,0\n"), tmp_path / "none")
    assert Dataset(tmp_path / "none/train").schema.categorical[0].hotness is None
    run(tagged(), raw, tmp_path / "unasked")
    assert Dataset(tmp_path / "unasked/train").schema.categorical[0].hotness is None


def test_what_was_found_out_is_checked_in_later_rows(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "y,tags,part\n1,a|b,0\n0,b|c,0\n")
    run(tagged(hotness="auto"), raw, tmp_path / "out")
    fitted = FittedEtl.load(tmp_path / "out/etl.zip")
    assert "multi_hot, hotness 2" in picture(fitted)
    assert fitted.transform_table(pa.table({"tags": ["a|zz", None]}))["t"].to_pylist() == [[4, 2], [1, 1]]
    with pytest.raises(DataError, match="row 1, column 'tags'"):
        fitted.transform_table(pa.table({"tags": ["a|b", "a"]}))
    later = text(tmp_path / "later.csv", "y,tags,part\n1,a|b,0\n0,c,0\n")
    with pytest.raises(DataError, match=r"later\.csv, line 3"):
        fitted.transform(later, tmp_path / "later")


def test_lists_from_a_function_are_checked_where_they_are_used(tmp_path: Path) -> None:
    @register_function("hotness test: words")
    def words(texts: Any) -> list[list[str]]:
        return [(one.as_py() or "").split() for one in texts]

    columns: list[dict[str, Any]] = [{"name": "y", "type": "int"}, {"name": "s"}]
    made = {"type": "function", "name": "w", "source": "s", "function": "hotness test: words", "result": "string"}
    one = config(
        columns, labels=[{"name": "y"}], derived=[made | {"list": True}],
        categorical=[{"name": "w", "kind": "multi_hot", "hotness": 2}],
    )  # fmt: skip
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"y": [1, 0], "s": ["a b", "b c"]}), raw)
    run(one, raw, tmp_path / "out")
    assert Dataset(tmp_path / "out/train").schema.categorical[0].hotness == 2
    pq.write_table(pa.table({"y": [1, 0], "s": ["a b", "b"]}), raw)
    with pytest.raises(DataError, match=r"column 'w', row 1 of 2[\s\S]*let the function return lists of that length"):
        run(one, raw, tmp_path / "other")


def test_configs_that_do_not_use_it_keep_their_files() -> None:
    assert "hotness" not in tagged().to_dict()["categorical"][0]
    assert EtlConfig.from_dict(tagged(hotness="auto").to_dict()) == tagged(hotness="auto")
