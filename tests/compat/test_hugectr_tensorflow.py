"""HPS's layers for TensorFlow, and the error where TensorFlow is not installed."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.compat.hugectr import run_script
from viviane.compat.hugectr.tensorflow_lookup import package
from viviane.core.errors import ConfigError

SCRIPT = """
import hierarchical_parameter_server as hps
import numpy as np
import tensorflow as tf

wide = np.fromfile("wide/emb_vector", np.float32).reshape(-1, 4)
narrow = np.fromfile("narrow/emb_vector", np.float32).reshape(-1, 2)
hps.Init(global_batch_size=8, ps_config_file="ps.json")
one = hps.LookupLayer(model_name="m", table_id=0, emb_vec_size=4, emb_vec_dtype=tf.float32)
keys = np.array([[3, 0], [1, 9]])
assert np.array_equal(one(tf.constant(keys))[:, :, 0], np.where(keys < 5, wide[keys % 5, 0], 0.5))
norms = np.linalg.norm(one(tf.constant(keys), max_norm=0.25), axis=-1)
assert np.all(norms <= 0.2501) and np.any(norms > 0.2)

many = hps.SparseLookupLayer(model_name="m", table_id=1, emb_vec_size=2, ps_config_file="ps.json", global_batch_size=8)
ids = tf.sparse.SparseTensor([[0, 0], [0, 1], [2, 0]], [1, 2, 4], [4, 2])  # rows 1 and 3 are empty
weights = tf.sparse.SparseTensor(ids.indices, [1.0, 3.0, 2.0], [4, 2])
empty = np.zeros(2)
expected = {
    ("sum", False): [narrow[1] + narrow[2], empty, narrow[4], empty],
    (None, False): [(narrow[1] + narrow[2]) / 2, empty, narrow[4], empty],
    ("sqrtn", False): [(narrow[1] + narrow[2]) / 2**0.5, empty, narrow[4], empty],
    ("mean", True): [(narrow[1] + 3 * narrow[2]) / 4, empty, narrow[4], empty],
}
for (combiner, weighted), rows in expected.items():
    found = many(sp_ids=ids, sp_weights=weights if weighted else None, combiner=combiner)
    assert np.allclose(found, rows, atol=1e-6), combiner

inputs = tf.keras.Input((2,), dtype=tf.int64)
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(one(inputs))))
whole = model.predict(keys, verbose=0)
assert whole.shape == (2, 1)
tf.saved_model.save(model, "saved")
again = tf.saved_model.load("saved").signatures["serving_default"](tf.constant(keys))
assert np.allclose(next(iter(again.values())), whole, atol=1e-6)
open("ended.txt", "w").close()
"""


def table(name: str, dim: int) -> str:
    Path(name).mkdir()
    np.arange(5).astype("<i8").tofile(f"{name}/key")
    (np.arange(5 * dim) / 7 + 0.1).astype("<f4").tofile(f"{name}/emb_vector")
    return name


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_layers_look_up_what_the_parameter_server_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = {
        "model": "m", "sparse_files": [table("wide", 4), table("narrow", 2)], "embedding_vecsize_per_table": [4, 2],
        "default_value_for_each_table": [0.5, 0.0], "hit_rate_threshold": 1.0, "gpucache": False,
    }  # fmt: skip
    Path("ps.json").write_text(json.dumps({"supportlonglong": True, "models": [model]}))
    cells = [{"cell_type": "code", "source": SCRIPT}]  # a notebook that does not import hugectr itself
    Path("n.ipynb").write_text(json.dumps({"cells": cells}))
    run_script("n.ipynb")
    assert Path("ended.txt").exists()


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize(
    ("module", "used"), [("sparse_operation_kit", "DynamicVariable"), ("horovod.tensorflow", "DistributedGradientTape")]
)
def test_a_script_finds_what_it_trains_with(
    module: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("both.py").write_text(
        f"import hierarchical_parameter_server as hps\nimport {module} as other\n"
        f"print(hps.LookupLayer, other.{used})\nopen('ended.txt', 'w').close()\n"
    )
    result = CliRunner().invoke(app, ["hugectr", "both.py"])
    assert result.exit_code == 0, result.output
    assert Path("ended.txt").exists()


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_layers_name_the_package_that_they_need() -> None:
    with pytest.raises(ConfigError, match=r"hierarchical_parameter_server\.LookupLayer(?s:.*)viviane\[tensorflow\]"):
        package().LookupLayer(model_name="m", table_id=0, emb_vec_size=4)
    with pytest.raises(ImportError):
        _ = package().SparseLookupLayer
    with pytest.raises(AttributeError, match="did you mean"):
        _ = package().LookupLayr
    with pytest.raises(ConfigError, match=r"hps\.Init"):
        package().Init(ps_config_file="x", gpus=1)
