"""Scripts in the style of the Sparse Operation Kit run by `viviane sok`, and their loss falls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    "script",
    [
        "dense_demo",
        "dlrm",
        "dcn",
        "dynamic_files",
        "experiment",
        "legacy_dense",
        "legacy_sparse",
        "weighted_bags",
        "dump_and_go_on",
        "binary_dcn",
        "keras_deepfm",
    ],
)
def test_scripts_of_sok_run_and_learn(script: str, tmp_path: Path) -> None:
    if script.startswith("legacy"):
        pytest.importorskip("tf_keras")  # layers of SOK 1.x are layers of Keras 2
    command = [sys.executable, "-m", "viviane", "sok", str(SCRIPTS / f"{script}.py"), str(tmp_path / "tables")]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = (float(word) for word in done.stdout.split("LOSSES")[1].split())
    assert last < 0.8 * first, (first, last)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    import numpy as np

    import viviane.tensorflow as sok
    from viviane.core.errors import CheckpointError

    table = sok.Variable(np.ones((4, 2), np.float32), name="items")
    sok.dump(tmp_path, table)
    file = tmp_path / "items-weight"
    whole = file.read_bytes()
    assert len(whole) == 296 + 4 * 2 * 4
    for wrong in (whole[:100], whole[:-1], whole.replace(b"items", b"users")):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError):
            sok.load(tmp_path, table)
    file.write_bytes(whole)
    sok.load(tmp_path, table)


WRONG = """
import numpy as np
import tensorflow as tf
import viviane.tensorflow as sok
from viviane.core.errors import VivianeError

sok.init()
one = sok.Variable(np.ones((4, 2), np.float32), name="one")
ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2], tf.int64), [2])
wrapper = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
new = dict(shape=(4, 2), initializer=tf.keras.initializers.Ones())
calls = {
    "initial_value": lambda x: sok.Variable(x),
    "shape": lambda x: sok.Variable(**{**new, "shape": x}),
    "initializer": lambda x: sok.Variable(**{**new, "initializer": x}),
    "dtype": lambda x: sok.Variable(**new, dtype=x),
    "mode": lambda x: sok.Variable(**new, mode=x),
    "dimension": lambda x: sok.DynamicVariable(dimension=x),
    "law": lambda x: sok.DynamicVariable(dimension=2, initializer=x),
    "var_type": lambda x: sok.DynamicVariable(dimension=2, var_type=x),
    "key_type": lambda x: sok.DynamicVariable(dimension=2, key_type=x),
    "max_capacity": lambda x: sok.DynamicVariable(dimension=2, var_type="hybrid", max_capacity=x),
    "filter_ratio": lambda x: sok.DynamicVariable(dimension=2, filter_ratio=x),
    "sp_ids": lambda x: sok.lookup_sparse([one], x),
    "sp_weights": lambda x: sok.lookup_sparse([one], [ids], sp_weights=x),
    "combiners": lambda x: sok.lookup_sparse([one], [ids], combiners=x),
    "indices": lambda x: sok.all2all_dense_embedding(one, x),
    "variables": lambda x: sok.filter_variables(x),
    "path": lambda x: sok.dump(x, one),
    "optimizer": lambda x: sok.load("folder", one, x),
    "optimizer of dump": lambda x: sok.dump("folder", one, x),
    "values": lambda x: sok.assign(one, tf.constant([1], tf.int64), x),
    "pairs": lambda x: wrapper.apply_gradients(x),
    "pair": lambda x: wrapper.apply_gradients([x]),
    "comm_tool": lambda x: sok.init(comm_tool=x),
}
values = [3, -1, 2**63, float("nan"), "x", "", b"x", [None], [[]], {"a": 1}, object(), tf.constant("a"),
          np.zeros((2, 2)), np.zeros(3, complex)]
refused = 0
for name, call in calls.items():
    for value in values:
        try:
            call(value)
        except VivianeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}={value!r}: {type(error).__name__}: {error}") from error
    assert refused, name
print("REFUSED", refused)
"""


def test_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    """57 of such calls ended in TypeError, ValueError or AttributeError."""
    added = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command, environment = [sys.executable, "-c", WRONG], {**os.environ, **added}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("REFUSED")[1]) > 200


KEYS = """
import tensorflow as tf
import viviane.tensorflow as sok
from viviane.core.errors import DataError

sok.Init(global_batch_size=2)
layer = sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=10, embedding_vec_size=4)
assert layer(tf.constant([[[3]], [[4]]], tf.int16)).shape == (2, 1, 1, 4)
for wrong in (tf.constant([[[3.0]]]), tf.constant([[[2**63]]], tf.uint64), tf.constant([[[True]]])):
    try:
        layer(wrong)
    except DataError as error:
        assert "not whole numbers" in str(error) and wrong.dtype.name in str(error), error
        print("refused")
"""


def test_keys_of_a_dense_layer_are_whole_numbers() -> None:
    pytest.importorskip("tf_keras")
    added = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", KEYS]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["refused"] * 3
