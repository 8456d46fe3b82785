"""The picture of an ETL: every column, what is done with it, what was learned; the command that draws it."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from raw_files import config, text
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.etl import EtlConfig, SequenceConfig, criteo, fit, picture

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]
NAME = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[list[str]]:
    """The lines of each box."""
    root = ET.fromstring(svg)
    return [[line.text or "" for line in group.iter(f"{NAME}text")] for group in root.iter(f"{NAME}g")]


def test_columns_that_are_treated_alike_share_a_box() -> None:
    found = boxes(picture(criteo()))
    assert ["C1, C2 ... C26 (26)", "hex"] in found
    assert ["C1, C2 ... C26 (26)", "categorify min_count 6"] in found
    assert ["I1, I2 ... I13 (13)", "fill", "log", "dense"] in found
    last = ["data set", "1 label, 13 dense, 26 categorical", "ids: 0 padding, 1 missing, 2 unknown, values from 3"]
    assert found[-1] == [*last, "viviane-etl, version 1"]


def test_every_derivation_has_a_box() -> None:
    found = boxes(picture(EtlConfig.from_json_file(ROOT / "examples/etl_derived.json")))
    assert ["brand", "map", "values iphone: apple, ipad: apple"] in found
    assert ["since", "difference_lag", "by user", "in order of time"] in found
    assert [
        "user_price_mean, user_price_std",
        "group_statistics",
        "by user",
        "of price",
        "statistics mean, std",
    ] in found
    assert ["rate", "target_encode", "by brand, hour", "target click"] in found


def test_a_fitted_etl_shows_what_it_learned(tmp_path: Path) -> None:
    columns: list[dict[str, Any]] = [
        {"name": "y", "type": "int"}, {"name": "a"}, {"name": "b"}, {"name": "x<&", "type": "float"},
        {"name": "l", "list": True},
    ]  # fmt: skip
    made = config(
        columns,
        labels=[{"name": "y", "optional": True}],
        dense=[{"name": "x", "source": "x<&", "operators": [{"type": "standardize"}]}],
        categorical=[{"name": "a"}, {"name": "b"}, {"name": "ab", "source": ["a", "b"]}],
        filters=[{"column": "x<&", "keep": "<", "value": 9}],
    )
    fitted = fit(made, text(tmp_path / "raw.csv", "y,a,b,x<&\n1,p,q,1\n0,p,r,3\n,s,q,10\n"))
    found = boxes(picture(fitted))
    assert ["x<&", "float", "keep x<& < 9"] in found
    assert ["x", "standardize (mean 2, std 1)", "dense"] in found
    assert ["a, b", "categorify", "9 ids together"] in found  # p; q and r; three reserved ones each
    assert ["ab", "cross, categorify", "5 ids"] in found
    assert ["y", "label, binary, optional"] in found
    assert found[-1][-1] == "viviane-etl, version 1, fitted"
    assert not any(lines[0] == "l" for lines in found)  # nothing reads it


def test_sequences() -> None:
    made = SequenceConfig.from_dict({
        "input": {"columns": [{"name": "u"}, {"name": "i"}, {"name": "t", "type": "int"}, {"name": "k"}]},
        "by": "u", "order_by": "t", "gap": 60, "min_rows": 2,
        "columns": [{"name": "a", "source": "i", "last": 5, "skip": 1,
                     "where": {"column": "k", "keep": "==", "value": "buy"}}, {"name": "t", "take": "last"}],
    })  # fmt: skip
    found = boxes(picture(made))
    assert ["rows of one u", "in order of t", "a pause above 60 begins another", "2 rows or more"] in found
    assert ["a", "last 5 of i, 1 skipped", "where k == buy"] in found
    assert found[-1] == ["Parquet", "one row a session", "u, session, a, t", "viviane-sequences, version 1"]


def test_the_command_draws_and_groups(tmp_path: Path) -> None:
    file = tmp_path / "etl.svg"
    result = RUNNER.invoke(app, ["etl", "--preset", "criteo", "--plot", str(file)])
    assert result.exit_code == 0
    assert file.read_text() == picture(criteo())
    nowhere = RUNNER.invoke(app, ["etl", "--preset", "criteo"])
    assert isinstance(nowhere.exception, ConfigError)
    assert "input or the output is missing" in str(nowhere.exception)
    made = SequenceConfig.from_dict({
        "input": {"columns": [{"name": "u"}, {"name": "t", "type": "int"}]}, "by": "u", "order_by": "t",
        "columns": [{"name": "times", "source": "t", "last": 2}],
    })  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(made.to_dict()))
    raw = text(tmp_path / "raw.csv", "u,t\na,2\na,1\nb,\n")
    command = ["etl", str(raw), "--config", str(tmp_path / "s.json"), "-o", str(tmp_path / "out")]
    split = RUNNER.invoke(app, [*command, "--split", "rows:a=0.5,b=0.5"])
    with pytest.raises(ConfigError, match="are not split"):
        raise split.exception or AssertionError
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0
    assert "groups: 1" in result.output
    assert "no_key: 1" in result.output
