"""Programs written for HugeCTR run to their end, and their loss falls."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from viviane.compat.hugectr import run_script, train_from_json
from viviane.core.errors import ConfigError

PROGRAMS = Path(__file__).parent / "programs"
ITERATION = re.compile(r"Iter: (\d+) Time\((\d+) iters\): [\d.]+s Loss: ([\d.]+) lr:([\d.e-]+)")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(folder)
    run_script(PROGRAMS / f"{name}.py")
    return capsys.readouterr().out


def losses(printed: str) -> list[float]:
    return [float(found[2]) for found in ITERATION.findall(printed)]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("dcn", r"Finish 160 iterations with batchsize: 64 in [\d.]+s\."),
        ("wdl", r"Finish 20 epochs 120 global iterations with batchsize: 32 in [\d.]+s\."),
        ("deepfm", r"Finish 160 iterations with batchsize: 64 in [\d.]+s\."),
        ("dlrm", r"Finish 200 iterations with batchsize: 64 in [\d.]+s\."),
    ],
)
def test_a_program_runs_and_its_loss_falls(
    name: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(name, tmp_path, monkeypatch, capsys)
    found = losses(printed)
    # labels are random numbers: what falls is the loss on rows that come again and again
    assert found[-1] < 0.95 * found[0], found
    assert re.search(last, printed)
    assert re.search(r"Evaluation, AUC: 0\.\d+", printed)
    assert "hugectr" not in sys.modules
    if name == "wdl":
        assert "Warning: vvgpu [[0, 1]]" in printed


def test_a_loop_of_the_scripts_own_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("low_level", tmp_path, monkeypatch, capsys)
    assert "metrics [('AUC', " in printed
    keys = np.fromfile("low0_sparse_120.model/key", "<i8")
    vectors = np.fromfile("low0_sparse_120.model/emb_vector", "<f4")
    # keys of both slots in one table: the second slot's begin where the first one's 30 end
    assert 0 <= keys.min() < 30 <= keys.max() < 70
    assert len(set(keys.tolist())) == len(keys) == len(vectors) / 6
    # BatchNorm's gamma and beta of 18, and two MLPs 18 -> 16 -> 1
    assert Path("low_dense_120.model").stat().st_size == 4 * (2 * 18 + 2 * (18 * 16 + 16 + 16 + 1))
    norms = json.loads(Path("low_dense_120.model.ntp.json").read_text())["layers"]
    assert [len(one["mean"]) for one in norms] == [18]


def test_json_trains_to_the_same_numbers_as_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = losses(run("dcn", tmp_path, monkeypatch, capsys))
    graph = json.loads(Path("dcn.json").read_text())
    config = {
        "solver": {
            "lr_policy": "fixed", "display": 20, "max_iter": 160, "gpu": [0], "batchsize": 64, "batchsize_eval": 32,
            "seed": 7, "eval_interval": 80, "max_eval_batches": 4, "snapshot": 1000, "input_key_type": "I32",
        },
        "optimizer": {"type": "Adam", "update_type": "Global", "adam_hparam": {"learning_rate": 0.01, "beta1": 0.9,
                                                                              "beta2": 0.999, "epsilon": 1e-7}},
        "layers": graph["layers"],
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    again = train_from_json("config.json")
    assert losses(capsys.readouterr().out) == first
    again.graph_to_json("again.json")
    assert json.loads(Path("again.json").read_text())["layers"] == graph["layers"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("hugectr.CreateSolver(batchsise=3)", "did you mean 'batchsize'"),
        ("hugectr.hugectr_tf_ops", "hugectr.hugectr_tf_ops"),
        (
            "import hugectr.tools as t; t.DataGeneratorParams(format=hugectr.DataReaderType_t.Norm)",
            "an argument is missing",
        ),
        ("hugectr.EmbeddingTableConfig('a', 0, 4)", "max_vocabulary_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(line: str, named: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import hugectr\n{line}\n")
    with pytest.raises(ConfigError, match=named):
        run_script(script)
    assert "hugectr" not in sys.modules


def test_a_script_sees_its_own_arguments_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "script.py").write_text("import sys, beside, hugectr\nprint(sys.argv[1:], beside.VALUE)\n")
    run_script(tmp_path / "script.py", ["--lr", "3"])
    assert "['--lr', '3'] 5" in capsys.readouterr().out
    del sys.modules["beside"]
