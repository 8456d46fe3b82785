"""The installed module: notebooks, mpi4py, file systems, torchrun, what inference answers."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.compat.hugectr import run_script
from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError, DataError

from .test_hugectr_numbers import KEYS, build, logits, norm_file, read_files, sgd

MADE = modules()
hugectr: Any = MADE["hugectr"]
inference: Any = MADE["hugectr.inference"]
CELLS = [
    ("markdown", "%%writefile no.py\nimport hugectr"),
    ("code", ["%%writefile first.py\n", "import hugectr, sys\n", "print('first', sys.argv[1:])\n"]),
    ("code", "print('not this one')"),
    ("code", "%%writefile config.json\n{}"),
    ("code", "%%writefile plain.py\nprint('no hugectr')"),
    ("code", "%%writefile 'deep/second.py'\nfrom hugectr.inference import InferenceParams\n"),
    ("code", "%%writefile -a deep/second.py\nprint('second')\n"),
]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    cells = [{"cell_type": kind, "source": source} for kind, source in CELLS]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    return tmp_path / "n.ipynb"


def test_a_notebooks_programs_run_in_order(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(notebook, ["--x"])
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[HUGECTR] Note")]
    assert said == ["[HUGECTR] n.ipynb: first.py", "first ['--x']", "[HUGECTR] n.ipynb: second.py", "second"]
    assert Path("config.json").read_text() == "{}"
    assert not Path("no.py").exists()


def test_one_program_of_a_notebook(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(notebook, [], "second.py")
    assert "first" not in capsys.readouterr().out.replace("first.py", "")
    with pytest.raises(ConfigError, match="did you mean"):
        run_script(notebook, [], "frist.py")
    with pytest.raises(ConfigError, match="chosen from a notebook"):
        run_script("first.py", [], "second.py")
    notebook.write_text(json.dumps({"cells": []}))
    with pytest.raises(ConfigError, match="no cell writes"):
        run_script(notebook)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py itself answers")
def test_mpi_is_answered_while_a_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.py").write_text(
        "from mpi4py import MPI\nc = MPI.COMM_WORLD\nc.Barrier()\n"
        "print(c.Get_rank(), c.rank, c.Get_size(), c.bcast(5, root=0), c.allreduce(3, op=MPI.SUM), c.gather(1))\n"
        "print(c.Split_type(MPI.COMM_TYPE_SHARED, 0, MPI.INFO_NULL).size, c.alltoall([7]), c.scan(2), c.exscan(2))\n"
    )
    run_script(tmp_path / "s.py")
    assert "0 0 1 5 3 [1]\n1 [7] 2 None\n" in capsys.readouterr().out
    assert "mpi4py" not in sys.modules


def test_files_of_a_mounted_file_system_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "far").write_text("x")
    data = MADE["hugectr.data"]
    params = data.DataSourceParams(
        use_hdfs=True, namenode="localhost", port=9000, hdfs_train_source=f"hdfs://localhost:9000{tmp_path}/far",
        local_train_source=f"{tmp_path}/near/file", hdfs_sparse_model=[], local_sparse_model=[],
    )  # fmt: skip
    data.DataSource(params).move_to_local()
    assert (tmp_path / "near/file").read_text() == "x"
    params.hdfs_train_source = "hdfs://localhost:9000/not/there"
    with pytest.raises(DataError, match="mounted"):
        data.DataSource(params).move_to_local()
    remote = data.DataSourceParams(source=hugectr.DataSourceType_t.S3, server="s", port=1)
    hugectr.Model(hugectr.CreateSolver(data_source_params=remote))
    print_notes()
    assert "files of S3 are read from their mount paths" in capsys.readouterr().out


@pytest.mark.parametrize("default", [0.0, 0.25])
def test_predictions_from_lists_by_hand(default: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build(norm_file(tmp_path, KEYS), [], sgd())
    model.train()
    model.save_params_to_files("m")
    model.graph_to_json("m.json")
    params = inference.InferenceParams(
        "m",
        8,
        1.0,
        "m_dense_0.model",
        ["m0_sparse_0.model"],
        0,
        True,
        0.5,
        True,
        default_value_for_each_table=[default],
    )
    table, weight, bias = read_files("m")
    for key in (1000, 2000):
        table[key] = np.full(2, default)
    rows = KEYS.copy()
    rows[0, 1], rows[3, 2] = 1000, 2000  # keys that never came
    dense = np.random.default_rng(1).random(10).astype("<f4")
    session = inference.CreateInferenceSession("m.json", params)
    found = session.predict(dense.tolist(), rows.reshape(-1).tolist(), list(range(16)))
    assert session.server is None
    volatile, persistent = (
        inference.VolatileDatabaseParams(),
        inference.PersistentDatabaseParams(type=inference.DatabaseType_t.rocks_db, path=str(tmp_path / "db")),
    )
    params.volatile_db, params.persistent_db = volatile, persistent
    tiers = inference.CreateInferenceSession("m.json", params)
    for _ in range(2):  # from the files, then from the cache
        assert tiers.predict(dense.tolist(), rows.reshape(-1).tolist(), list(range(16))) == found
    used = {tier["tier"] for tier in tiers.server.status()["m"][0]["tiers"] if tier["hits"] + tier["misses"]}
    assert {"cache", "files"} <= used
    assert tiers.server.status()["m"][0]["defaults"] > 0  # the keys that never came
    expected = 1 / (1 + np.exp(-logits(table, weight, bias, rows)))
    np.testing.assert_allclose(found, expected, atol=1e-6)  # float32 sums of 8 numbers
    pointers = np.array([0, 2, *range(2, 17)])  # the first slot of the first row has two keys
    with pytest.raises(DataError, match="rows x 3"):
        session.predict(dense.tolist(), rows.reshape(-1).tolist(), pointers.tolist())
    with pytest.raises(DataError, match="dense_dim"):
        session.predict(dense[1:].tolist(), rows.reshape(-1).tolist(), list(range(16)))
    assert session.predict([0.5, 0.5], [], [0, 0, 0, 0]) == pytest.approx(
        [1 / (1 + np.exp(-(0.5 * weight[6:].sum() + bias)))], abs=1e-6
    )


def test_the_first_inference_of_3_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build(norm_file(tmp_path, KEYS), [], sgd())
    model.train()
    model.save_params_to_files("m")
    model.graph_to_json("m.json")
    graph = json.loads(Path("m.json").read_text())
    graph["inference"] = {
        "max_batchsize": 8, "hit_rate_threshold": 0.6, "dense_model_file": "m_dense_0.model",
        "sparse_model_file": "m0_sparse_0.model",
    }  # fmt: skip
    graph["layers"][-1] = {"name": "sigmoid", "type": "Sigmoid", "bottom": ["logit"], "top": "sigmoid"}
    graph["layers"][0]["label"] = {"label_dim": 1}
    Path("old.json").write_text(json.dumps(graph))
    server = inference.CreateParameterServer(["old.json"], ["m"], True)
    cache = inference.CreateEmbeddingCache(server, 0, True, 0.5, "old.json", "m", True)
    dense = np.random.default_rng(1).random(10).astype("<f4")
    found = inference.InferenceSession("old.json", 0, cache).predict(dense, KEYS.reshape(-1), range(16))
    expected = 1 / (1 + np.exp(-logits(*read_files("m"), KEYS)))
    np.testing.assert_allclose(found, expected, atol=1e-6)  # float32 sums of 8 numbers


def test_the_command_runs_a_notebook(notebook: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "viviane", "hugectr", "--program", "first.py", str(notebook), "--y"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first ['--y']" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("mlperf_logging") is not None, reason="mlperf_logging itself answers")
def test_mlperf_logging_is_answered_while_a_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.py").write_text(
        "from mlperf_logging import mllog\nfrom mlperf_logging.mllog import constants\n"
        "mllog.config(filename='x')\nlog = mllog.get_mllogger()\n"
        "log.start(key=mllog.constants.INIT_START)\nlog.event(constants.SEED, 3, metadata={'rank': 0})\n"
    )
    run_script(tmp_path / "s.py")
    printed = capsys.readouterr().out
    assert '"event_type": "INTERVAL_START", "key": "init_start"' in printed
    assert '"key": "seed", "value": 3, "metadata": {"rank": 0}' in printed
    assert "mlperf_logging" not in sys.modules


def test_a_program_that_a_script_starts_finds_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no python
    before = [os.environ.get(name) for name in ("PYTHONPATH", "PATH")]
    (tmp_path / "inner.py").write_text(
        "import hugectr\nfrom hugectr.inference import InferenceParams\nfrom mpi4py import MPI\n"
        "print('inner', hugectr.CreateSolver(batchsize=7).batchsize, InferenceParams('m', 3).max_batchsize)\n"
    )
    (tmp_path / "outer.py").write_text(
        "import hugectr, subprocess\nsubprocess.run(['python', 'inner.py'], check=True)\n"
    )
    run_script("outer.py")
    assert "inner 7 3" in capfd.readouterr().out
    assert [os.environ.get(name) for name in ("PYTHONPATH", "PATH")] == before


WHOLE = [
    "import hugectr, os\nfolder, count = 'made', 3\n!mkdir -p {folder}/deep\nassert os.path.isdir('made/deep')",
    "%%writefile data.py\nimport sys, pathlib\npathlib.Path(sys.argv[2]).write_text(sys.argv[1])",
    "!python3 data.py $count {folder}/rows.txt > log 2>&1 && ls",
    "%%writefile -a train.py\nimport hugectr, sys, os, pathlib\n",
    "%%writefile -a train.py\n"
    "print('train', sys.argv[1:], pathlib.Path('made/rows.txt').read_text(), os.environ.get('LEVEL'))\n",
    "%%bash\n# a comment\nLEVEL=5 mpirun --allow-run-as-root -np 2 python -u train.py \\\n  --lr 3; rm -rf made\n"
    "pip install x",
    "%env LEVEL 7\n%matplotlib inline\n%run train.py --again",
    "%%time\nimport not_installed_anywhere\nframe = not_installed_anywhere.frame()",
    "print(frame)",
    "!python3 absent.py\n!cd made; mkdir inside",
    "print('cells ran to the end', os.path.isdir('made/inside'), os.path.isdir('made/deep'))",
]


@pytest.mark.slow
def test_a_notebook_whose_lines_run_programs_runs_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEVEL", "")
    cells = [{"cell_type": "code", "source": source} for source in WHOLE]
    Path("n.ipynb").write_text(json.dumps({"cells": cells}))
    run_script("n.ipynb")
    printed = capsys.readouterr().out
    for line in (
        "train ['--lr', '3'] 3 5", "train ['--again'] 3 7", "cells ran to the end True True",
        "[HUGECTR] Note: n.ipynb: not run: rm -rf made", "[HUGECTR] Note: n.ipynb: not run: pip install x",
        "[HUGECTR] Warning: n.ipynb, cell 7 is skipped: it needs not_installed_anywhere, which is not installed",
        "[HUGECTR] Warning: n.ipynb, cell 8 is skipped: name 'frame' is not defined, after cells without "
        "not_installed_anywhere",
        "[HUGECTR] Warning: n.ipynb: absent.py does not exist and was not run",
    ):  # fmt: skip
        assert line in printed.splitlines(), line
    assert Path("made").is_dir()
    assert "hugectr" not in sys.modules
    cells[-1] = {"cell_type": "code", "source": "print(never_defined)"}
    Path("n.ipynb").write_text(json.dumps({"cells": [cells[0], cells[-1]]}))
    with pytest.raises(NameError, match="never_defined"):  # no cell was left out before it
        run_script("n.ipynb")
