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
