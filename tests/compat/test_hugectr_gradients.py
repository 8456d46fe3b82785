"""check_out_tensor(name, Tensor_t.Train): gradients of the last step, against the formulas in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.compat.hugectr import run_script
from viviane.compat.hugectr.reading import close_readers
from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import ConfigError

hugectr: Any = modules()["hugectr"]
SCRIPT = """
import hugectr
import numpy as np

keys = np.array([[0, 4], [2, 3], [1, 4], [0, 3]], "<i4")
rows = b"".join(np.array([i % 2], "<f4").tobytes() + np.array([0.5 * i], "<f4").tobytes() + keys[i].tobytes()
                for i in range(4))
with open("rows.bin", "wb") as file:
    file.write(rows)
solver = hugectr.CreateSolver(batchsize=4, batchsize_eval=4, max_eval_batches=1, lr=0.5, seed=3)
reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Raw, "rows.bin", eval_source="rows.bin", num_samples=4,
                                  eval_num_samples=4, float_label_dense=True)
model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD))
model.add(hugectr.Input(1, "label", 1, "dense", [hugectr.DataReaderSparseParam("keys", 1, True, 2)]))
model.add(hugectr.SparseEmbedding(hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot, 1, 3, "sum", "table", "keys",
                                  [5, 5]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["table"], ["flat"], leading_dim=6))
model.add(hugectr.DenseLayer(hugectr.Layer_t.Concat, ["flat", "dense"], ["all"]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["all"], ["logit"], num_output=1))
model.add(hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]))
model.compile()
model.eval()
probability = model.check_out_tensor("logit", hugectr.Tensor_t.Evaluate)
model.save_params_to_files("before")
model.train()
model.eval()  # evaluation leaves the gradients of training alone
np.savez("found.npz", p=probability, **{name: model.check_out_tensor(name, hugectr.Tensor_t.{which})
                                        for name in ("logit", "all", "flat", "table")})
"""


def test_gradients_of_the_last_step_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT.replace("{which}", "Train"))
    run_script("script.py")
    found = np.load("found.npz")
    weight = np.fromfile("before_dense_0.model", "<f4").astype(np.float64)[:-1]
    error = (found["p"].astype(np.float64) - np.array([[0], [1], [0], [1]])) / 4
    # float32 products of numbers below 1
    np.testing.assert_allclose(found["logit"], error, atol=1e-7)
    np.testing.assert_allclose(found["all"], error * weight, atol=1e-7)
    np.testing.assert_allclose(found["flat"], error * weight[:6], atol=1e-7)
    np.testing.assert_allclose(found["table"], (error * weight[:6]).reshape(4, 2, 3), atol=1e-7)
    Path("wrong.py").write_text(SCRIPT.replace("{which}", "Train").replace('("logit", "all"', '("dense", "all"'))
    with pytest.raises(ConfigError, match="no gradient of this tensor"):
        run_script("wrong.py")


def test_gradients_that_nobody_asked_for_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hidden = SCRIPT.replace("hugectr.Tensor_t.{which}", 'getattr(hugectr.Tensor_t, "Tra" + "in")')
    Path("script.py").write_text(hidden)
    with pytest.raises(ConfigError, match="gradients were not kept"):
        run_script("script.py")
    close_readers()


def test_tensors_that_no_loss_depends_on_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unused = """
model.add(hugectr.DenseLayer(hugectr.Layer_t.Slice, ["all"], ["head", "tail"], ranges=[(0, 6), (6, 7)]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.ReLU, ["tail"], ["positive"]))
model.compile()
"""
    text = SCRIPT.replace("\nmodel.compile()\n", unused).replace("{which}", "Evaluate")
    Path("script.py").write_text(text.replace(', "table")', ', "table", "head", "positive")'))
    run_script("script.py")
    found = np.load("found.npz")
    np.testing.assert_array_equal(found["head"], found["flat"])
    np.testing.assert_array_equal(found["positive"], found["all"][:, 6:])
    Path("wrong.py").write_text(text.replace(', "table")', ', "nothing")'))
    with pytest.raises(ConfigError, match="no tensor of this name"):
        run_script("wrong.py")
