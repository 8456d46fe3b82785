from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from viviane.cli.generate import whole
from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.data import Dataset


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_parquet_with_validation_rows(tmp_path: Path) -> None:
    output = run(
        str(tmp_path / "out"), "--rows", "2e3", "--valid-rows", "1_000", "--num-dense", "2", "--num-categorical", "3",
        "--multi-hot", "1", "--hotness", "4", "--max-cardinality", "1e3", "--seed", "7",
    )  # fmt: skip
    train, valid = Dataset(tmp_path / "out/train"), Dataset(tmp_path / "out/valid")
    assert (len(train), len(valid)) == (2000, 1000)
    assert train.schema == valid.schema
    assert [column.name for column in train.schema.categorical] == ["C1", "C2", "C3", "M1"]
    assert train.schema.categorical_column("C3").num_ids == 1003
    found = re.findall(r"(\S+): ([\d,]+) rows in .* rows/s\), best reachable AUC (0\.\d{4}), log loss 0\.\d{4}", output)
    assert [(Path(path).name, rows) for path, rows, _ in found] == [("train", "2,000"), ("valid", "1,000")]
    assert float(found[0][2]) == pytest.approx(train.info["best_auc"], abs=1e-4)


def test_criteo_text(tmp_path: Path) -> None:
    run(str(tmp_path / "day.txt"), "--rows", "100", "--format", "criteo", "--cardinalities", "5,1e3")
    assert len((tmp_path / "day.txt").read_text().splitlines()[0].split("\t")) == 1 + 13 + 2
    run(str(tmp_path / "both"), "--rows", "100", "--valid-rows", "10", "--format", "criteo")
    assert sorted(path.name for path in (tmp_path / "both").glob("*.txt")) == ["train.txt", "valid.txt"]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    run(str(tmp_path / "set"), "--rows", "10")
    with pytest.raises(ConfigError, match="--overwrite"):
        run(str(tmp_path / "set"), "--rows", "20")
    run(str(tmp_path / "set"), "--rows", "20", "--overwrite")
    assert len(Dataset(tmp_path / "set")) == 20


def test_an_existing_second_part_is_refused_before_the_first_is_written(tmp_path: Path) -> None:
    (tmp_path / "valid").mkdir()
    with pytest.raises(ConfigError, match="the output exists"):
        run(str(tmp_path), "--rows", "10", "--valid-rows", "10")
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize(("text", "number"), [("1e6", 1_000_000), ("1_000", 1000), ("0", 0), ("2.5e1", 25)])
def test_whole_numbers(text: str, number: int) -> None:
    assert whole(text, "rows") == number


@pytest.mark.parametrize("text", ["1.5", "-1", "many", "nan", "inf", "1e300", ""])
def test_numbers_that_are_not_whole(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a whole number\n  where:   --rows"):
        whole(text, "rows")


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format"):
        run(str(tmp_path / "x"), "--format", "csv")
