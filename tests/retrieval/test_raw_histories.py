"""What `viviane recommend` and servers take as histories: raw files without items, lists of any length."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import viviane as vv
from viviane.cli.main import app
from viviane.cli.served_recommender import ServedRecommender
from viviane.core.errors import ConfigError
from viviane.etl import EtlConfig, run
from viviane.retrieval import VectorSource
from viviane.serving.errors import RowsError


def test_raw_rows_to_recommend_for_have_no_item(tmp_path: Path) -> None:
    histories = ["|".join(f"p{(n + step) % 9}" for step in range(n % 4 + 2)) for n in range(40)]
    lines = [f"{history},p{n % 9},1" for n, history in enumerate(histories)]
    (tmp_path / "events.csv").write_text("history,item,taken\n" + "\n".join(lines) + "\n")
    (tmp_path / "ask.csv").write_text("history\n" + "\n".join(histories) + "\n")
    config = EtlConfig.from_dict(
        {
            "input": {
                "columns": [{"name": "history", "separator": "|"}, {"name": "item"}, {"name": "taken", "type": "int"}]
            },
            "labels": [{"name": "taken"}],
            "categorical": [
                {"name": "history", "kind": "sequence", "max_length": 5, "vocabulary": "item"},
                {"name": "item", "vocabulary": "item"},
            ],
        }
    )
    run(config, tmp_path / "events.csv", tmp_path / "data")
    data = vv.Dataset(tmp_path / "data/train")
    model = vv.Model(vv.Solver(batch_size=16, device="cpu"), data)
    model.add(vv.zoo.SASRec(dim=4, num_blocks=1))
    model.compile(vv.Adam(), metrics=["log_loss"])
    model.fit(data, epochs=1, verbose=0)
    model.save(tmp_path / "model")
    found = {}
    for name in ("ask.csv", "events.csv", "data/train"):
        output = tmp_path / f"{name.replace('/', '-')}.parquet"
        words = ["recommend", str(tmp_path / "model"), str(tmp_path / name), "--output", str(output), "-k", "3"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert "3 items for each of 40 rows" in done.output
        found[name] = pq.read_table(output)
    assert found["ask.csv"] == found["events.csv"] == found["data/train"]
    assert all(re.fullmatch(r"p\d", one) for one in found["ask.csv"].column("value").to_pylist())
    with pytest.raises(ConfigError, match="as the ETL numbers them"):
        CliRunner().invoke(app, ["recommend", str(tmp_path / "model"), "--similar", "p3"], catch_exceptions=False)


def test_a_served_recommender_takes_histories_of_any_length(tmp_path: Path) -> None:
    """Its data has histories of one length; those of requests are padded or cut to it."""
    column = {"num_ids": 30, "vocabulary": "item"}
    history = {"name": "history", "kind": "sequence", "max_length": 4, "hotness": 4, **column}
    schema = vv.Schema(labels=[{"name": "taken"}], categorical=[history, {"name": "item", **column}])
    model = vv.Model(vv.Solver(batch_size=16, device="cpu"), schema)
    model.add(vv.zoo.SASRec(dim=4, num_blocks=1))
    model.compile(vv.Adam())
    model.save(tmp_path / "model")
    served = ServedRecommender(tmp_path / "model", "cpu")
    given = [[3, 4], [], [9, 8, 7, 6, 5, 4]]
    answers = served.recommend([{"history": one} for one in given], 3, keep_seen=False)
    expected = vv.Recommender(VectorSource(model)).recommend([one[-4:] for one in given], 3)
    assert [one["items"] for one in answers] == [items[items >= 0].tolist() for items in expected.items]
    with pytest.raises(RowsError, match="the row has 'hist'"):
        served.recommend([{"hist": [3]}], 3, keep_seen=False)
