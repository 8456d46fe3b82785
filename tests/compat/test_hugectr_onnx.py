"""hugectr2onnx: the file that convert writes predicts what HugeCTR's formula predicts, with its inputs and outputs."""

from pathlib import Path

import numpy as np
import pytest

from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError

from .test_hugectr_numbers import KEYS, build, logits, norm_file, read_files, sgd

onnxruntime = pytest.importorskip("onnxruntime")
convert = modules()["hugectr2onnx.converter"].convert


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = build(norm_file(tmp_path, KEYS), [], sgd())
    model.train()
    model.save_params_to_files("m")
    model.graph_to_json("m.json")
    return tmp_path


def session(file: str):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def test_tables_and_dense_layers_in_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert("out/m.onnx", "m.json", "m_dense_0.model", True, ["m0_sparse_0.model"])
    assert "[HUGECTR2ONNX][INFO]" in capsys.readouterr().out
    run = session("out/m.onnx")
    table, weight, bias = read_files("m")
    rows = KEYS.copy()
    rows[0, 1] = 1000  # a key that never came reads zeros
    table[1000] = np.zeros(2)
    dense = np.random.default_rng(1).random(2 * len(rows)).astype("float32").reshape(-1, 2)
    shapes = {one.name: one.shape for one in run.get_inputs()}
    [keys] = [name for name, shape in shapes.items() if len(shape) == 3]
    [numbers] = [name for name, shape in shapes.items() if len(shape) == 2]
    found = run.run(None, {numbers: dense, keys: rows[:, :, None].astype("int64")})[0]
    expected = 1 / (1 + np.exp(-logits(table, weight, bias, rows)))
    np.testing.assert_allclose(found[:, 0], np.ravel(expected), atol=1e-6)  # float32 sums of 8 numbers
    assert sorted(path.name for path in Path("out").iterdir()) == ["m.onnx"]


def test_the_dense_layers_alone_take_vectors(files: Path) -> None:
    convert(onnx_model_path="dense.onnx", graph_config="m.json", dense_model="m_dense_0.model")
    shapes = [one.shape[1:] for one in session("dense.onnx").get_inputs()]
    assert shapes == [[2], [3, 2]]


def test_tables_have_to_be_given(files: Path) -> None:
    with pytest.raises(ConfigError, match="needs the tables"):
        convert("m.onnx", "m.json", "m_dense_0.model", convert_embedding=True)
