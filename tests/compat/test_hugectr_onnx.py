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


def test_the_dense_input_is_there_without_dense_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts feed the inputs by their place: dense first, (B, 0), then the keys. A norm keeps an eps of 1e-8."""
    monkeypatch.chdir(tmp_path)
    h = modules()["hugectr"]
    params = modules()["hugectr.tools"].DataGeneratorParams(
        h.DataReaderType_t.Norm, 1, 0, 2, False, "list.txt", "test/list.txt", [9, 9], num_files=1, eval_num_files=1,
        num_samples_per_file=32,
    )  # fmt: skip
    modules()["hugectr.tools"].DataGenerator(params).generate()
    solver = h.CreateSolver(batchsize=8, batchsize_eval=8, max_eval_batches=1)
    model = h.Model(solver, h.DataReaderParams(h.DataReaderType_t.Norm, "list.txt", eval_source="test/list.txt",
                                               check_type=h.Check_t.Sum), h.CreateOptimizer())  # fmt: skip
    model.add(h.Input(1, "label", 0, "dense", [h.DataReaderSparseParam("keys", 1, True, 2)]))
    model.add(h.SparseEmbedding(h.Embedding_t.DistributedSlotSparseEmbeddingHash, 1, 3, "sum", "table", "keys"))
    for kind, bottom, top, more in (
        ("Reshape", ["table"], "flat", {"leading_dim": 6}), ("PReLU_Dice", ["flat"], "dice", {"eps": 1e-8}),
        ("InnerProduct", ["dice"], "fc", {}), ("BinaryCrossEntropyLoss", ["fc", "label"], "loss", {}),
    ):  # fmt: skip
        model.add(h.DenseLayer(h.Layer_t[kind], bottom, [top], **more))
    model.compile()
    model.save_params_to_files("m")
    model.graph_to_json("m.json")
    convert("m.onnx", "m.json", "m_dense_0.model", True, ["m0_sparse_0.model"], "")
    run = session("m.onnx")
    assert [(one.name, one.shape[1:]) for one in run.get_inputs()] == [("dense", [0]), ("keys", [2, 1])]
    for rows in (1, 3):  # one row has the variance zero
        given = {"dense": np.zeros((rows, 0), np.float32), "keys": np.arange(2 * rows).reshape(rows, 2, 1)}
        assert np.isfinite(run.run(None, given)[0]).all()


def test_every_layer_is_listed_as_convertible() -> None:
    listed = modules()["hugectr2onnx.hugectr_loader"]
    assert set(modules()["hugectr"].Layer_t.__members__) == listed.ONNX_LAYER_TYPES | listed.EXEMPTION_LAYER_TYPES
    assert not listed.ONNX_LAYER_TYPES & listed.EXEMPTION_LAYER_TYPES
