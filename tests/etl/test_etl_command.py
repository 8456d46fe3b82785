"""The command line: flags to settings, the table at the end, errors that say what to do."""

import json
from pathlib import Path

import pytest
from raw_files import clicks, read, text
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError

RUNNER = CliRunner()
RAW = "1\t7\t0a\t0b\n0\t\t0a\t\n1\t2\tff\t0b\n0\t1\t0a\t0b\n"


def test_criteo_preset_with_other_widths_and_a_split(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.tsv", RAW + "broken\n")
    command = ["etl", str(raw), "--preset", "criteo", "--num-dense", "1", "--num-categorical", "2", "--min-count", "1"]
    command += ["--split", "rows:train=0.75,test=0.25", "--on-bad-row", "reject", "-o", str(tmp_path / "out")]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    for words in ("read", "5", "rejected", "1", "written: train", "3", "written: test", "C1 5", "rows/s"):
        assert words in result.output
    assert read(tmp_path / "out/train")["C1"] == [3, 3, 4]
    assert read(tmp_path / "out/test")["C2"] == [3]
    assert (tmp_path / "out/rejects.jsonl").exists()
    apply = ["etl", str(raw), "--apply", str(tmp_path / "out/etl.zip"), "--on-bad-row", "reject", "-o"]
    assert RUNNER.invoke(app, [*apply, str(tmp_path / "again")]).exit_code == 0
    assert read(tmp_path / "again")["C1"] == [3, 3, 4, 3]


def test_a_declarative_file(tmp_path: Path) -> None:
    (tmp_path / "etl.json").write_text(json.dumps(clicks().to_dict()))
    raw = text(tmp_path / "raw.csv", "click,item\n1,b\n0,c\n")
    command = ["etl", str(raw), "--config", str(tmp_path / "etl.json"), "-o", str(tmp_path / "out")]
    assert RUNNER.invoke(app, command).exit_code == 0
    assert read(tmp_path / "out/train")["item"] == [3, 4]


def test_flags_that_do_not_go_together(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n1,b\n")
    for flags, message in (
        ([], "operation is missing"),
        (["--apply", "x.zip", "--min-count", "2"], "--min-count belongs to --preset"),
        (["--preset", "kriteo"], "unknown preset"),
        (["--preset", "criteo", "--memory-limit", "much"], "not a size"),
        (["--preset", "criteo", "--memory-limit", "1MB"], "too little memory"),
    ):
        result = RUNNER.invoke(app, ["etl", str(raw), "-o", str(tmp_path / "out"), *flags])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_the_example_file_is_the_criteo_preset() -> None:
    from viviane.etl import EtlConfig, criteo

    file = Path(__file__).parents[2] / "examples" / "etl_criteo.json"
    assert EtlConfig.from_json_file(file) == criteo()


@pytest.mark.realdata
def test_real_criteo_lines_agree_with_pandas(tmp_path: Path) -> None:
    import numpy as np
    import pandas as pd

    found = sorted((Path(__file__).parents[3] / "shared/data/criteo_kaggle_10k").glob("*"))
    raw = [file for file in found if file.suffix in (".txt", ".tsv", ".gz") and "README" not in file.name]
    if not raw:
        pytest.skip("the Criteo sample is not beside the checkout")
    command = ["etl", str(raw[0]), "--preset", "criteo", "-o", str(tmp_path / "out")]
    assert RUNNER.invoke(app, command).exit_code == 0
    rows = read(tmp_path / "out/train")
    frame = pd.read_csv(raw[0], sep="\t", header=None, dtype=dict.fromkeys(range(14, 40), str))
    assert len(frame) == 10_000
    counts = frame[16].value_counts()
    kept = counts[counts >= 6]
    assert max(rows["C3"]) == len(kept) + 2
    assert [i == 2 for i in rows["C3"]] == [isinstance(v, str) and v not in kept.index for v in frame[16]]
    np.testing.assert_allclose(rows["I2"], np.log1p(frame[2].fillna(0).clip(lower=0)), rtol=1e-7)
