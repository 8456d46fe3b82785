"""Statistics of raw columns, against pandas and numpy."""

import json
from pathlib import Path

import numpy as np
import pytest
from raw_files import config, text
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import ConfigError, DataError
from viviane.etl import EtlConfig, statistics

COLUMNS = [
    {"name": "x", "type": "float"},
    {"name": "n", "type": "int"},
    {"name": "b", "type": "bool"},
    {"name": "w"},
    {"name": "h", "type": "hex"},
    {"name": "t", "type": "timestamp"},
    {"name": "l", "type": "int", "separator": "|"},
    {"name": "empty", "type": "float"},
]
CONFIG = config(COLUMNS, categorical=[{"name": "w"}], filters=[{"column": "x", "keep": ">", "value": 100}])
ROWS = (
    "x,n,b,w,h,t,l,empty\n"
    "1.5,9007199254740993,true,ab,ff,2024-01-01 00:00:00,1|2|2,\n"
    "-2,,false,,0A,,,\n"
    ",7,true,日本語,a,2023-05-06 07:08:09,5,\n"
    "4,9007199254740992,,ab,,2024-01-01 00:00:00,|3,\n"
)


def test_equal_to_numpy(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", ROWS)
    found = {one.name: one for one in statistics(CONFIG, raw)}
    assert [(one.rows, one.missing, one.distinct) for one in found.values()] == [
        (4, 1, 3), (4, 1, 3), (4, 1, 2), (4, 1, 2), (4, 1, 2), (4, 1, 2), (4, 1, 4), (4, 4, 0),
    ]  # fmt: skip
    x = np.array([1.5, -2, 4])
    assert found["x"].mean == pytest.approx(x.mean())
    assert found["x"].std == pytest.approx(x.std())
    assert (found["x"].median, found["x"].min, found["x"].max) == (1.5, -2.0, 4.0)
    assert (found["b"].mean, found["w"].min, found["w"].max) == (pytest.approx(2 / 3), 2.0, 3.0)
    assert str(found["t"].min).startswith("2023-05-06 07:08:09")
    lists = found["l"]
    assert (lists.type, lists.values, lists.shortest, lists.longest, lists.max) == ("list of int", 5, 1, 3, 5.0)
    assert found["empty"].mean is found["empty"].median is found["empty"].max is None


def test_on_the_command_line(tmp_path: Path) -> None:
    raw, file = text(tmp_path / "raw.csv", ROWS), tmp_path / "etl.json"
    file.write_text(json.dumps(CONFIG.to_dict()))
    done = CliRunner().invoke(app, ["etl", str(raw), "--config", str(file), "--statistics"])
    assert done.exit_code == 0, done.output
    assert [one["name"] for one in json.loads(done.stdout)] == [one["name"] for one in COLUMNS]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", ROWS + "z,1,1,a,f,,1,\n")
    with pytest.raises(DataError, match=r"(?s)not a finite number.*line 6, column 'x'"):
        statistics(CONFIG, raw)
    assert statistics(CONFIG, raw, on_bad_row="reject")[0].rows == 4
    with pytest.raises(ConfigError, match="too little memory"):
        statistics(CONFIG, raw, memory_limit="1MB")
    head = text(tmp_path / "head.csv", ROWS.splitlines()[0] + "\n")
    with pytest.raises(DataError, match="no usable row"):
        statistics(EtlConfig.from_dict(CONFIG.to_dict()), head)
