"""`viviane generate -> etl -> train -> evaluate -> predict -> summary` in processes of their own, and every mistake."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from viviane.cli import main, train
from viviane.cli.train_config import TrainConfig, read_train_config
from viviane.core.errors import ConfigError, VivianeError
from viviane.core.locks import locked
from viviane.data import Dataset, write_dataset
from viviane.etl import run
from viviane.model import Model
from viviane.zoo import DCNv2
from warm import Warm

ROOT = Path(__file__).parents[2]


def viviane(*words: object, cwd: Path, code: int = 0) -> str:
    """Run a command in this process; returns what it printed, an error's message included."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(main.app, [str(word) for word in words])
    failed = isinstance(done.exception, VivianeError)  # main() prints it and exits with 2
    text = done.output + (f"error: {done.exception}" if failed else "")
    assert (2 if failed else done.exit_code) == code, (text, done.exception)
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory, warm: Warm) -> Path:
    """Raw text, the data sets that the ETL made of it, a config, and a finished run."""
    folder = tmp_path_factory.mktemp("place")
    viviane(
        "generate",
        "raw",
        "--format",
        "criteo",
        "--rows",
        6000,
        "--valid-rows",
        1500,
        "--max-cardinality",
        300,
        cwd=folder,
    )
    run("criteo", folder / "raw" / "train.txt", folder / "clean")
    config = {
        "name": "tiny",
        "data": {"train": "clean/train", "validation": "clean/train"},
        "solver": {"batch_size": 256, "lr": 0.003, "device": "cpu"},
        "model": {"zoo": "dcn_v2", "dim": 4, "deep_mlp": [16]},
        "metrics": ["auc"],
    }
    (folder / "c.json").write_text(json.dumps(config))
    words = ["train", "c.json", "--set", "solver.epochs=2", "--run-folder", "runs/one"]
    done = warm.run(["-m", "viviane.cli.main", *words], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Model tiny" in done.stdout
    assert "stopped by: epochs" in done.stdout
    return folder


def test_a_run_leaves_what_it_promises(place: Path) -> None:
    folder = place / "runs" / "one"
    for name in ("train.json", "config.json", "metrics.jsonl", "report.html", "model/model.json", "model/etl.zip"):
        assert (folder / name).exists(), name
    written = TrainConfig.from_json_file(folder / "train.json")
    assert written.solver.epochs == 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["split"] == "valid"] == [1, 2]
    assert "<svg" in (folder / "report.html").read_text()


def test_a_refused_run_changes_nothing(place: Path) -> None:
    folder = place / "runs" / "one"

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    before, words = content(), ["train", "c.json", "--run-folder", "runs/one"]
    assert "already holds a run" in viviane(*words, cwd=place, code=2)
    assert "to another model" in viviane(*words, "--resume", "--set", "model.dim=8", cwd=place, code=2)
    with ThreadPoolExecutor(1) as pool, ExitStack() as held:
        pool.submit(lambda: held.enter_context(locked(folder))).result()
        for more in ([], ["--resume", "--set", "solver.epochs=9"]):
            assert "another process is writing here" in viviane(*words, *more, cwd=place, code=2)
    assert content() == before
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize("model", ["runs/one", "runs/one/model"])
def test_evaluate_repeats_the_run_s_last_row(place: Path, model: str) -> None:
    values = json.loads(viviane("evaluate", model, "clean/train", "--json", "--device", "cpu", cwd=place))
    rows = [json.loads(line) for line in (place / "runs/one/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["split"] == "valid"][-1]
    assert values == {"rows": 6000, "loss": last["loss"], "auc": last["auc"]}
    assert "auc " in viviane("evaluate", model, "clean/train", cwd=place)


def test_raw_rows_go_through_the_model_s_own_etl(place: Path) -> None:
    clean = json.loads(viviane("evaluate", "runs/one", "clean/train", "--json", cwd=place))
    raw = json.loads(viviane("evaluate", "runs/one", "raw/train.txt", "--json", cwd=place))
    assert raw == clean
    viviane("predict", "runs/one", "raw/valid.txt", "-o", "out/valid.parquet", cwd=place)
    assert pq.read_table(place / "out/valid.parquet").num_rows == 1500


def test_predictions_are_the_model_s_in_order(place: Path) -> None:
    expected = Model.load(place / "runs/one", device="cpu").predict(Dataset(place / "clean/train"))[:, 0]
    viviane("predict", "runs/one", "clean/train", "--output", "p.parquet", "--device", "cpu", cwd=place)
    assert np.array_equal(pq.read_table(place / "p.parquet").column("prediction").to_numpy(), expected)
    viviane("predict", "runs/one", "raw/train.txt", "--output", "p.csv", "--device", "cpu", cwd=place)
    found = pyarrow.csv.read_csv(place / "p.csv").column("prediction").to_numpy()
    assert np.array_equal(found.astype("float32"), expected)
    assert not list(place.glob(".p.*"))


def test_quiet_commands_print_their_result_alone(place: Path) -> None:
    metrics = ("evaluate", "runs/one", "clean/train", "--device", "cpu")
    assert viviane(*metrics, "-q", cwd=place) == viviane(*metrics, cwd=place) != ""
    words = ("predict", "runs/one", "clean/train", "--output", "quiet.csv", "--device", "cpu")
    assert viviane(*words, "--quiet", cwd=place) == ""
    assert "predictions" in viviane(*words, "--overwrite", cwd=place)


def test_unseen_values_are_predicted(place: Path) -> None:
    lines = (place / "raw/train.txt").read_text().splitlines()[:3]
    cells = lines[1].split("\t")
    lines[1] = "\t".join([*cells[:14], *("deadbeef" for _ in cells[14:])])
    (place / "odd.txt").write_text("\n".join(lines) + "\n")
    viviane("predict", "runs/one", "odd.txt", "-o", "odd.parquet", "--device", "cpu", cwd=place)
    found = pq.read_table(place / "odd.parquet").column("prediction").to_numpy()
    expected = Model.load(place / "runs/one", device="cpu").predict(Dataset(place / "clean/train").head(3))[:, 0]
    # batches of another size may sum in another order
    np.testing.assert_allclose(found[[0, 2]], expected[[0, 2]], rtol=1e-5)
    assert 0 < found[1] < 1
    assert found[1] != expected[1]


def test_a_data_set_without_labels_is_predicted(place: Path) -> None:
    full = Dataset(place / "clean/train")
    table = pq.read_table(full.files[0]).slice(0, 100)
    schema = full.schema.select([column.name for column in (*full.schema.dense, *full.schema.categorical)])
    bare = Dataset(write_dataset(place / "bare", schema, [table.drop_columns(["label"])]).path)
    assert not bare.schema.labels
    viviane("predict", "runs/one", "bare", "-o", "bare.parquet", "--device", "cpu", cwd=place)
    expected = Model.load(place / "runs/one", device="cpu").predict(full.head(100))[:, 0]
    assert np.array_equal(pq.read_table(place / "bare.parquet").column("prediction").to_numpy(), expected)


def test_resume_gives_the_bits_of_a_run_without_a_break(place: Path) -> None:
    words = ("--set", "solver.checkpoint_every=10", "--run-folder", "runs/two")
    viviane("train", "c.json", *words, "--set", "solver.max_steps=14", cwd=place)
    viviane("train", "c.json", *words, "--set", "solver.epochs=2", "--resume", cwd=place)
    data = Dataset(place / "clean/train")
    one, two = (Model.load(place / "runs" / name, device="cpu") for name in ("one", "two"))
    assert np.array_equal(one.predict(data), two.predict(data))


def test_summary_of_config_and_model_agree(place: Path) -> None:
    of_config = viviane("summary", "c.json", "--plot", "graph.svg", cwd=place)
    of_model = viviane("summary", "runs/one", cwd=place)
    assert of_config.replace("drawing: graph.svg\n", "") == of_model
    assert "MultiCross" in of_model
    assert (place / "graph.svg").read_text().startswith("<svg")


def test_the_example_config_is_valid() -> None:
    assert isinstance(read_train_config(ROOT / "examples" / "train_dcn.json").recipe(), DCNv2)


def test_the_quickstart_runs(tmp_path: Path, warm: Warm) -> None:
    viviane("generate", "data", "--rows", 3000, "--valid-rows", 500, "--max-cardinality", 100, cwd=tmp_path)
    script = ROOT / "examples" / "quickstart.py"
    done = warm.run([script, "data"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'auc'" in done.stdout
    assert sum(1 for line in script.read_text().splitlines() if line.strip()) <= 40  # one screen


# The config ---------------------------------------------------------------------------------------------------


def read(tmp_path: Path, *changes: str, **keys: object) -> TrainConfig:
    content = {"data": {"train": "d"}, "model": {"zoo": "dlrm"}, **keys}
    (tmp_path / "c.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return read_train_config(tmp_path / "c.json", changes)


def test_changes_are_json_or_text(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "solver.lr=0.5",
        "model.dim=4",
        "model.bottom_mlp=[8, 4]",
        "name=other",
        "data.validation=v",
        "run_folder=r=1",
    )
    assert (config.solver.lr, config.name, config.data.validation, config.run_folder) == (0.5, "other", "v", "r=1")
    assert config.recipe().bottom_mlp == (8, 4)


def test_changes_reach_into_nodes(tmp_path: Path) -> None:
    nodes = [
        {"node": "Input"},
        {"node": "DenseLayer", "name": "a", "type": "MLP", "bottom": "dense", "params": {"num_outputs": [3]}},
    ]
    config = read(tmp_path, "model.nodes.1.params.num_outputs.0=5", model={"nodes": nodes})
    assert config.recipe().nodes[1].params == {"num_outputs": [5]}


MISTAKES = [
    (["solver.lrr=1"], {}, r"where:   --set solver\.lrr.*did you mean 'lr'"),
    (["solver={}", 'solver.lr="a"'], {}, r"where:   --set solver\.lr\n.*'a'"),
    (["solver.lr=0.1"], {"solver": {"epochs": 0}}, r"c\.json, solver\.epochs"),
    ([], {"solver": {"lrr": 1}}, r"c\.json, solver\.lrr.*did you mean 'lr'"),
    (["modle.dim=1"], {}, "modle.*did you mean 'model'"),
    (["model.dimm=1"], {}, "unknown key.*model, dimm.*did you mean 'dim'"),
    (["model.zoo=dlmr"], {}, "unknown zoo model.*'dlmr'.*did you mean 'dlrm'"),
    (["solver"], {}, "not a change.*--set.*path=value"),
    (["=1"], {}, "not a change"),
    (["data.train.x=1"], {}, r"nothing to change below this.*--set data\.train\.x.*'d'"),
    (["data.train.x.y=1"], {}, "nothing to change below this.*'x'"),
    (["model.nodes.2=1"], {"model": {"nodes": [{}]}}, r"no such element.*--set model\.nodes\.2.*below 1"),
    ([], {"model": {}}, "exactly one form.*zoo.*nodes.*file"),
    ([], {"model": {"zou": "dlrm"}}, "exactly one form.*did you mean 'zoo'"),
    ([], {"model": {"zoo": "dlrm", "nodes": []}}, "exactly one form"),
    ([], {"model": {"nodes": [], "dim": 4}}, "beside the graph.*'dim'"),
    ([], {"model": {"nodes": [{"node": "Input", "labels": "y"}]}}, r"nodes\.0\.Input\.labels.*did you mean 'label'"),
    ([], {"model": {"file": "no.json"}}, r"no such file.*no\.json"),
    ([], {"model": None}, r"required key is missing.*c\.json, model"),
    ([], {"data": {"train": "d", "valid": "v"}}, r"data\.valid.*did you mean 'validation'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "keys", "message"), MISTAKES)
def test_mistakes_are_named(tmp_path: Path, changes, keys, message) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read(tmp_path, *changes, **keys)


def test_commands_say_what_is_wrong_and_end_with_1(place: Path) -> None:
    def fails(*words: object) -> str:
        text = viviane(*words, cwd=place, code=2)
        assert "Traceback" not in text
        return text

    assert "--resume" in fails("train", "c.json", "--run-folder", "runs/one")
    assert "data set folder not found" in fails("train", "c.json", "--set", "data.train=nowhere")
    assert "no saved model here" in fails("evaluate", "clean", "clean/train")
    assert "no such input" in fails("evaluate", "runs/one", "nowhere")
    assert "no such input" in fails("evaluate", "runs/one", "nowhere*.txt")
    assert "name one of them: clean/train" in fails("evaluate", "runs/one", "clean")
    (place / "none.txt").write_text("")
    assert "none.txt" in fails("predict", "runs/one", "none.txt", "-o", "none.csv")
    assert "checkpoints/step-" in fails("checkpoint", "inspect", "runs/one")
    assert "has no history" in fails("recommend", "runs/one", "clean/train", "-o", "top.csv")
    for name, rows in (("pattern", "raw/val*.txt"), ("file", "raw/valid.txt")):
        viviane("predict", "runs/one", rows, "-o", f"{name}.csv", cwd=place)
    assert (place / "pattern.csv").read_text() == (place / "file.csv").read_text()
    assert ".parquet, .csv" in fails("predict", "runs/one", "clean/train", "-o", "p.txt")
    (place / "taken.csv").write_text("mine")
    assert "--overwrite" in fails("predict", "runs/one", "clean/train", "-o", "taken.csv")
    assert (place / "taken.csv").read_text() == "mine"
    (place / "bad.txt").write_text("0\tx\n")
    assert "bad.txt" in fails("predict", "runs/one", "bad.txt", "-o", "bad.csv")
    assert not (place / "bad.csv").exists()
    model = place / "plain"
    Model.load(place / "runs/one", device="cpu").save(model)
    for file in ("etl.zip", "files.json"):
        content = json.loads((model / "files.json").read_text()) if file == "files.json" else None
        if content is None:
            (model / file).unlink()
        else:
            del content["files"]["etl.zip"]
            (model / file).write_text(json.dumps(content))
    assert "carries no ETL" in fails("predict", "plain", "raw/valid.txt", "-o", "x.csv")


def test_speeds_are_whole_numbers_in_the_summary() -> None:
    assert [train._number(630.3, name) for name in ("samples_per_second", "loss")] == ["630", "630.30000"]
