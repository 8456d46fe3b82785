"""Raw files, data sets, models, checkpoints and run folders at URLs, and the commands that take them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from store import Store
from viviane.cli import main
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, RemoteError, VivianeError
from viviane.core.locations import location
from viviane.core.remote.cache import local_copy
from viviane.data import Dataset, write_dataset
from viviane.etl import EtlConfig, FittedEtl, run
from viviane.model import Model
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.serving.versions import find_versions
from viviane.store.applier import Published
from viviane.training import Trainer
from viviane.training.checkpoint.remote_run import RunMirror
from viviane.zoo import DLRM

CONFIG = EtlConfig(
    input={"columns": [{"name": "click", "type": "int"}, {"name": "price", "type": "float"}, {"name": "item"}]},
    labels=[{"name": "click"}],
    dense=[{"name": "price"}],
    categorical=[{"name": "item"}],
)


def raw_text(count: int) -> str:
    random = np.random.default_rng(1)
    lines = [f"{random.integers(0, 2)},{random.random():.3f},item{random.integers(0, 9)}" for _ in range(count)]
    return "\n".join(["click,price,item", *lines]) + "\n"


def put(store: Store, path: str, data: bytes) -> None:
    with store.client().open_output_stream(path, compression=None) as stream:
        stream.write(data)


def viviane(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(main.app, [str(word) for word in words])
    failed = isinstance(done.exception, VivianeError)
    text = done.output + (f"error: {done.exception}" if failed else "")
    assert (2 if failed else done.exit_code) == code, (text, done.exception)
    return text


def rows(folder: Path) -> dict[str, list[object]]:
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("part-*.parquet"))]).to_pydict()


def test_the_etl_reads_and_writes_urls(bucket: str, shared_store: Store, tmp_path: Path) -> None:
    text = raw_text(400)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.csv").write_text(text)
    (tmp_path / "raw" / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    for file in (tmp_path / "raw").iterdir():
        put(shared_store, f"{bucket}/raw/{file.name}", file.read_bytes())
    url = f"s3://{bucket}"
    here = run(CONFIG, tmp_path / "raw", tmp_path / "out", split="rows:train=0.75,valid=0.25")
    for source in (f"{url}/raw", f"{url}/raw/*.csv*", [f"{url}/raw/a.csv", f"{url}/raw/b.csv.gz"]):
        there = run(CONFIG, source, f"{url}/out", split="rows:train=0.75,valid=0.25", overwrite=True)
        assert (there.rows, there.num_ids) == (here.rows, here.num_ids)
        data = Dataset(f"{url}/out/train")
        table = pa.concat_tables([pq.read_table(pa.BufferReader(file.read_bytes())) for file in data.files])
        assert table.to_pydict() == rows(tmp_path / "out" / "train")
    # the same job again has nothing to do; another one does not overwrite
    assert run(
        CONFIG, [f"{url}/raw/a.csv", f"{url}/raw/b.csv.gz"], f"{url}/out", split="rows:train=0.75,valid=0.25"
    ).rows
    with pytest.raises(ConfigError, match="exists"):
        run(CONFIG, f"{url}/raw", f"{url}/out")
    raw = pa.table({"price": [0.5], "item": ["item3"]})
    fitted = FittedEtl.load(f"{url}/out/etl.zip")
    assert fitted.transform_table(raw) == FittedEtl.load(tmp_path / "out" / "etl.zip").transform_table(raw)
    fitted.save(f"{url}/alone/etl.zip")
    assert FittedEtl.load(f"{url}/alone/etl.zip").transform_table(raw) == fitted.transform_table(raw)


@pytest.mark.slow
def test_raw_parquet_is_read_by_ranges(bucket: str, shared_store: Store, tmp_path: Path) -> None:
    table = pa.table({"click": [0, 1] * 50, "price": [0.5] * 100, "item": [f"i{n % 7}" for n in range(100)]})
    pq.write_table(table, tmp_path / "raw.parquet", row_group_size=30)
    put(shared_store, f"{bucket}/raw.parquet", (tmp_path / "raw.parquet").read_bytes())
    run(CONFIG, tmp_path / "raw.parquet", tmp_path / "out")
    run(CONFIG, f"s3://{bucket}/raw.parquet", f"s3://{bucket}/out")
    there = Dataset(f"s3://{bucket}/out/train")
    assert len(there) == 100
    assert there.fingerprint == Dataset(tmp_path / "out" / "train").fingerprint


SCHEMA = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])


def small_rows(count: int = 64) -> dict[str, list[float]]:
    random = np.random.default_rng(0)
    return {
        "y": random.integers(0, 2, count).astype(float).tolist(),
        "x": random.random(count).astype(np.float32).tolist(),
        "c": random.integers(0, 9, count).tolist(),
    }


def small_model(**solver: object) -> Model:
    model = Model(Solver(batch_size=16, seed=1, device="cpu", **solver), SCHEMA)
    model.add(DLRM(dim=4, bottom_mlp=[4], top_mlp=[4, 1]))
    model.compile(Adam(lr=0.01))
    return model


def test_a_model_is_saved_and_loaded(bucket: str, shared_store: Store) -> None:
    data = write_dataset(f"s3://{bucket}/set", SCHEMA, [small_rows()])
    model = small_model()
    model.fit(data)
    url = f"s3://{bucket}/models/small"
    model.save(url)
    model.fit(data)
    model.save(url)  # a saved model is replaced
    again = Model.load(url, device="cpu")
    assert np.array_equal(again.predict(data), model.predict(data))
    with pytest.raises(ConfigError, match="not a saved model"):
        model.save(f"s3://{bucket}/set")
    published = json.loads((location(url) / "published.json").read_text())["folder"]
    put(shared_store, f"{bucket}/models/small/{published}/weights/dense.safetensors", b"short")
    with pytest.raises(RemoteError, match="truncated"):
        Model.load(url, device="cpu")


@pytest.mark.parametrize("how", ["published", "copied"])
def test_snapshots_of_a_publisher_are_served(how: str, bucket: str, shared_store: Store, tmp_path: Path) -> None:
    """Their own published.json, which says what updates they contain, was taken for that of a URL."""
    data = write_dataset(tmp_path / "set", SCHEMA, [small_rows()])
    model = small_model()
    contains = Published(5, {("emb.user", 0): 9}).to_json()
    url = f"s3://{bucket}/models"
    if how == "published":
        model.save(f"{url}/1", published=contains)
        model.save(f"{url}/2", published=contains)
    else:
        folder = Path(model.save(tmp_path / "models/2", published=contains)).parent
        for file in filter(Path.is_file, folder.rglob("*")):
            put(shared_store, f"{bucket}/models/{file.relative_to(folder)}", file.read_bytes())
    assert np.array_equal(Model.load(f"{url}/2", device="cpu").predict(data), model.predict(data))
    assert max(find_versions(url)) == 2
    with InferenceSession(url, device="cpu") as session:
        assert session.predict(small_rows()) is not None
    assert (local_copy(f"{url}/2") / "published.json").is_file()


def test_a_checkpoint_is_saved_and_loaded(bucket: str) -> None:
    data = write_dataset(f"s3://{bucket}/set", SCHEMA, [small_rows()])
    url = f"s3://{bucket}/checkpoints/one"
    first = small_model()
    first.fit(data)
    first.trainer.save_checkpoint(url)
    second = small_model()
    second.trainer.load_checkpoint(url)
    assert second.trainer.step == 4
    assert np.array_equal(second.predict(data), first.predict(data))


def test_a_run_folder_at_a_url_is_resumed_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_dataset(f"s3://{bucket}/set", SCHEMA, [small_rows()])
    url = f"s3://{bucket}/runs/mine"
    options = {"checkpoint_every": 3, "keep_checkpoints": 2}
    whole = small_model(epochs=3, **options)
    whole.fit(data, data)

    small_model(epochs=3, max_steps=7, **options).fit(data, data, run_folder=url)
    monkeypatch.setenv("VIVIANE_CACHE", str(tmp_path / "another-machine"))
    with pytest.raises(ConfigError, match="already holds a run"):
        small_model(**options).fit(data, run_folder=url)
    resumed = small_model(epochs=3, **options)
    resumed.fit(data, data, run_folder=url, resume=True)
    assert resumed.trainer.step == 12
    assert np.array_equal(resumed.predict(data), whole.predict(data))
    mirror = RunMirror(location(url))  # type: ignore[arg-type]
    assert mirror.steps() == sorted(one.name for one in (mirror.local / "checkpoints").glob("step-*"))
    assert mirror.steps()[-1] == "step-00000012"
    metrics = (location(url) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 12


@pytest.mark.slow
def test_the_commands_take_urls(bucket: str, shared_store: Store, tmp_path: Path) -> None:
    put(shared_store, f"{bucket}/raw.csv", raw_text(300).encode())
    url = f"s3://{bucket}"
    put(shared_store, f"{bucket}/etl.json", json.dumps(CONFIG.to_dict()).encode())
    viviane(
        "etl",
        f"{url}/raw.csv",
        "-o",
        f"{url}/out",
        "--config",
        f"{url}/etl.json",
        "--split",
        "rows:train=0.8,valid=0.2",
    )
    settings = {
        "data": {"train": f"{url}/out/train", "validation": f"{url}/out/valid"},
        "solver": {"batch_size": 32, "device": "cpu", "max_steps": 4},
        "model": {"zoo": "dlrm", "dim": 4, "bottom_mlp": [4], "top_mlp": [4, 1]},
    }
    put(shared_store, f"{bucket}/train.json", json.dumps(settings).encode())
    said = viviane("train", f"{url}/train.json", "--run-folder", f"{url}/runs/a")
    assert f"{url}/runs/a/report.html" in said
    assert "AWS" not in said
    assert json.loads(viviane("evaluate", f"{url}/runs/a", f"{url}/out/valid", "--json"))["rows"] == 60
    viviane("predict", f"{url}/runs/a", f"{url}/raw.csv", "-o", f"{url}/scores.parquet")
    with shared_store.client().open_input_file(f"{bucket}/scores.parquet") as file:
        assert pq.read_table(file).num_rows == 300
    viviane("convert", f"{url}/out/train", f"{url}/fast", "--to", "viviane")
    assert len(Dataset(f"{url}/fast")) == 240
    assert "step" in viviane("checkpoint", "inspect", f"{url}/runs/a/checkpoints/step-00000004")
    assert "error: " in viviane("evaluate", f"{url}/runs/none", f"{url}/out/valid", code=2)


def test_a_trainer_without_a_graph_takes_a_url(bucket: str) -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, batch):  # type: ignore[no-untyped-def]
            return self.layer(batch.dense)

    trainer = Trainer(
        Linear(),
        SCHEMA,
        Solver(batch_size=16, device="cpu"),
        SGD(),
        run_folder=f"s3://{bucket}/runs/plain",
        progress=False,
    )
    trainer.fit(write_dataset(f"s3://{bucket}/set", SCHEMA, [small_rows()]))
    assert trainer.mirror is not None
    assert trainer.mirror.steps() == ["step-00000004"]
