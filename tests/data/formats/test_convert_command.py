from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from format_rows import rows_of
from sample_rows import SCHEMA, columns_of, make_rows
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError, VivianeError
from viviane.data import Dataset, write_dataset
from viviane.data.formats import NormFormat

PLAIN = ["click", "price", "row", "vector", "a", "tags", "b", "history"]


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "source", SCHEMA, [columns_of(make_rows(50))], rows_per_group=7)


def convert(*words: Any) -> str:
    done = CliRunner().invoke(app, ["convert", *map(str, words)])
    if isinstance(done.exception, VivianeError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_there_and_back(source: Dataset, tmp_path: Path) -> None:
    options = ("--option", "check_sum=false", "--option", "i64_input_key=true")
    said = convert(source.path, tmp_path / "norm", "--to", "norm", "--columns", ",".join(PLAIN), *options,
                   "--rows-per-group", 10, "--rows-per-file", 20, "--key-set", tmp_path / "keys")  # fmt: skip
    assert "50 rows" in said
    norm = Dataset(tmp_path / "norm")
    assert norm.format == NormFormat(check_sum=False, i64_input_key=True)
    assert len(norm.files) == 3
    assert (tmp_path / "keys").stat().st_size % 8 == 0
    wanted = {name: values for name, values in rows_of(source).items() if name in PLAIN}
    assert rows_of(norm) == wanted
    convert(tmp_path / "norm" / "file_list.txt", tmp_path / "back", "--to", "viviane",
            "--schema", tmp_path / "norm" / "schema.json", "--from", "norm",
            "--source-option", "check_sum=false", "--source-option", "i64_input_key=true")  # fmt: skip
    assert rows_of(Dataset(tmp_path / "back")) == wanted


def test_weights_go_with_the_formats_that_hold_them(source: Dataset, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "v", "--to", "viviane")
    assert rows_of(Dataset(tmp_path / "v")) == rows_of(source)
    for folder in (source.path, tmp_path / "v"):
        convert(folder, tmp_path / "some", "--to", "parquet", "--columns", "row,tags,tag_weights,a", "--overwrite")
        found = rows_of(Dataset(tmp_path / "some"))
        assert found == {name: rows_of(source)[name] for name in ("row", "a", "tags", "tag_weights")}
    with pytest.raises(VivianeError, match="cannot store weights"):
        convert(source.path, tmp_path / "norm", "--to", "norm")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "viv"), "unknown data format"),
        (("--to", "norm", "--option", "checksum=1"), "did you mean 'check_sum'"),
        (("--to", "norm", "--option", "check_sum"), "name=value"),
        (("--to", "parquet", "--source-option", "check_sum=1"), "needs --from"),
        (("--to", "parquet", "--columns", "row,tag"), "did you mean 'tags'"),
    ],
)
def test_wrong_words(source: Dataset, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, VivianeError), match=message):
        convert(source.path, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
