"""Which row goes to which part, and that learning sees the training part alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from raw_files import clicks, config, read, text

from viviane.core.errors import ConfigError, DataError
from viviane.etl import EtlConfig, pipeline, run, stage
from viviane.etl.engine import DuckDbEngine
from viviane.etl.splits import parse_split


def timed(kind: str = "int") -> EtlConfig:
    return config(
        [{"name": "user", "type": "int"}, {"name": "ts", "type": kind}],
        categorical=[{"name": "user"}],
        ignored=["ts"],
    )


def users(path: Path, times: list[object]) -> Path:
    return text(path, "user,ts\n" + "".join(f"{i % 7},{ts}\n" for i, ts in enumerate(times)))


def test_rows_in_file_order(tmp_path: Path) -> None:
    users(tmp_path / "a.csv", [0, 1, 2, 3, 4])
    users(tmp_path / "b.csv", [5, 6, 7, 8, 9])
    inputs = [tmp_path / "b.csv", tmp_path / "a.csv"]
    summary = run(timed(), inputs, tmp_path / "out", split="rows:train=0.7,test=0.3")
    assert summary.rows == {"train": 7, "test": 3}
    assert read(tmp_path / "out/train")["ts"] == [5, 6, 7, 8, 9, 0, 1]
    assert read(tmp_path / "out/test")["ts"] == [2, 3, 4]


def test_hash_keeps_a_user_together_and_learns_from_train_only(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "user,ts\n" + "".join(f"{i % 97},{i}\n" for i in range(970)))
    summary = run(timed(), raw, tmp_path / "out", split="hash:user:train=0.5,valid=0.25,test=0.25")
    parts = {name: {ts % 97 for ts in read(tmp_path / f"out/{name}")["ts"]} for name in summary.rows}
    assert sum(len(found) for found in parts.values()) == 97  # no user in two parts
    assert all(len(found) > 10 for found in parts.values())
    assert set(read(tmp_path / "out/test")["user"]) == {2}  # unseen in training
    assert 2 not in read(tmp_path / "out/train")["user"]


def test_time_by_share_keeps_equal_times_together(tmp_path: Path) -> None:
    raw = users(tmp_path / "raw.csv", [5, 1, 3, 3, 3, 2, 9, 8, 7, 6])
    run(timed(), raw, tmp_path / "out", split="time:ts:train=0.4,test=0.6")
    # sorted 1 2 3 3 3 5 ...; place 4 holds a 3, so every 3 is in the later part
    assert read(tmp_path / "out/train")["ts"] == [1, 2]
    assert read(tmp_path / "out/test")["ts"] == [5, 3, 3, 3, 9, 8, 7, 6]


def test_time_by_start(tmp_path: Path) -> None:
    raw = users(tmp_path / "raw.csv", ["2024-01-01 10:00:00", "2024-02-01 00:00:00", "2024-01-31 23:59:59"])
    summary = run(timed("timestamp"), raw, tmp_path / "out", split="time:ts:test@2024-02-01")
    assert summary.rows == {"train": 2, "test": 1}
    with pytest.raises(ConfigError, match="neither a whole number nor a date"):
        run(timed("timestamp"), raw, tmp_path / "other", split="time:ts:test@tomorrow")


def test_files_by_pattern(tmp_path: Path) -> None:
    for day in (0, 1, 2):
        users(tmp_path / f"day_{day}.csv", [day] * 3)
    split = "file:train=day_0*,train=day_1*,test=day_2*"
    assert run(timed(), str(tmp_path / "day_*.csv"), tmp_path / "out", split=split).rows == {"train": 6, "test": 3}
    with pytest.raises(ConfigError, match="fit exactly one part"):
        run(timed(), str(tmp_path / "day_*.csv"), tmp_path / "other", split="file:train=day_0*,test=day_*")


def test_a_missing_time_is_a_malformed_row(tmp_path: Path) -> None:
    raw = users(tmp_path / "raw.csv", [1, "", 3])
    with pytest.raises(DataError, match=r"the split's column is missing\n.*line 3, column 'ts'"):
        run(timed(), raw, tmp_path / "out", split="time:ts:test@2")


def test_a_part_without_rows_is_still_a_data_set(tmp_path: Path) -> None:
    from viviane.data import Dataset

    raw = users(tmp_path / "raw.csv", [1, 2])
    run(timed(), raw, tmp_path / "out", split="time:ts:test@9")
    assert len(Dataset(tmp_path / "out/test")) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("days:train=1", "not a split"),
        ("rows:train", "not a split"),
        ("rows:train=0.5,test=0.6", "sum to 1"),
        ("hash:user:train=x", "number"),
        ("time:ts:train@1,test@2", "takes none itself"),
        ("rows:../x=1", "pattern"),
    ],
)
def test_splits_that_cannot_be(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_split(line)


def test_a_split_needs_a_column_of_the_input(tmp_path: Path) -> None:
    raw = text(tmp_path / "raw.csv", "click,item\n1,a\n")
    with pytest.raises(ConfigError, match="needs a single-valued input column"):
        run(clicks(), raw, tmp_path / "out", split="hash:user:train=0.5,test=0.5")
    with pytest.raises(ConfigError, match="type int or timestamp"):
        run(clicks(), raw, tmp_path / "out", split="time:item:train=0.5,test=0.5")


def test_filters_where_several_threads_divide_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, blocks = pipeline._Run.__init__, stage.text_blocks

    def small(self: Any, *args: Any) -> None:
        first(self, *args)
        self.shard_bytes = 20_000

    monkeypatch.setattr(pipeline._Run, "__init__", small)
    monkeypatch.setattr(stage, "text_blocks", lambda *args, **rest: blocks(*args, **rest, block_bytes=5_000))
    raw = users(tmp_path / "raw.csv", list(range(20_000)))
    settings = timed().to_dict() | {"filters": [{"column": "ts", "keep": "<", "value": 19_000}]}
    summary = run(EtlConfig.from_dict(settings), raw, tmp_path / "out", split="time:ts:test@15000", threads=4)
    assert (summary.rows, summary.filtered) == ({"train": 15_000, "test": 4_000}, 1_000)
    assert read(tmp_path / "out/test")["ts"] == list(range(15_000, 19_000))


def test_threads_may_share_an_engine() -> None:
    engine = DuckDbEngine()

    def twice(number: int) -> list[int]:
        table = pa.table({"x": np.full(5_000, number, np.int64)})
        return list(set(engine.evaluate(table, doubled).column("y").to_pylist()))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(twice, range(200))) == [[2 * number] for number in range(200)]
    engine.close()


def doubled(table: Any) -> dict[str, Any]:
    return {"y": table.x * 2}
