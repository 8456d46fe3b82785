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
    if script.startswith("legacy") or script in ("binary_dcn", "keras_deepfm"):
        pytest.importorskip("tf_keras")  # SOK 1.x has layers of Keras 2; models of Keras 3 do not list SOK's variables
    command = [sys.executable, "-m", "viviane", "sok", str(SCRIPTS / f"{script}.py"), str(tmp_path / "tables")]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AutoGraph could not" not in done.stderr
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


def train(gradient):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse([one], [ids], combiners=["sum"])[0])
    tape.gradient(loss, [one])
    wrapper.apply_gradients([(gradient, one)])


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
    "keys of rows": lambda x: sok.assign(one, x, np.ones((2, 2))),
    "values": lambda x: sok.assign(one, tf.constant([1], tf.int64), x),
    "pairs": lambda x: wrapper.apply_gradients(x),
    "pair": lambda x: wrapper.apply_gradients([x]),
    "gradient": train,
    "comm_tool": lambda x: sok.init(comm_tool=x),
}
values = [3, -1, 2**63, float("nan"), "x", "", b"x", [None], [[]], {"a": 1}, object(), tf.constant("a"),
          np.zeros((2, 2)), np.zeros(3, complex), [[[]], 3], (1, [2])]
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
from viviane.core.errors import ConfigError, DataError

sok.Init(global_batch_size=2)
layer = sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=10, embedding_vec_size=4)
assert layer(tf.constant([[[3]], [[4]]], tf.int16)).shape == (2, 1, 1, 4)
for wrong in (tf.constant([[[3.0]]]), tf.constant([[[2**63]]], tf.uint64), tf.constant([[[True]]])):
    try:
        layer(wrong)
    except DataError as error:
        assert "not whole numbers" in str(error) and wrong.dtype.name in str(error), error
        print("refused")

pooled = sok.DistributedEmbedding(
    combiner="sum", max_vocabulary_size_per_gpu=10, embedding_vec_size=4, slot_num=2, max_nnz=1
)
pairs = sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=10, embedding_vec_size=4, slot_num=2)
for call in (lambda: pooled(tf.sparse.from_dense([[1], [2], [3]])), lambda: pairs(tf.constant([1, 2, 3]))):
    try:
        call()  # three rows of samples with two slots: TensorFlow's error of a reshape
    except DataError as error:
        assert "a multiple of 2" in str(error), error
        print("refused")

def apply(pairs):
    with sok.OptimizerScope([layer.embedding_variable]):
        tf.keras.optimizers.Adam(0.1).apply_gradients(pairs)


sizes = dict(max_vocabulary_size_per_gpu=10, embedding_vec_size=4)
calls = {
    "embedding_vec_size": lambda: sok.All2AllDenseEmbedding(max_vocabulary_size_per_gpu=10),
    "max_nnz": lambda: sok.DistributedEmbedding(combiner="sum", slot_num=2, **sizes),
    "combiner": lambda: sok.get_embedding("a", sok.DistributedEmbedding, slot_num=2, max_nnz=1, **sizes),
    "slots": lambda: sok.All2AllDenseEmbedding(slots=2, **sizes),
    "max_vocabulary_size_per_gpu": lambda: sok.All2AllDenseEmbedding([10], 4),
    "slot_num is out of range": lambda: sok.All2AllDenseEmbedding(slot_num=0, **sizes),
    "slot_num has the wrong type": lambda: sok.DistributedEmbedding(combiner="sum", slot_num=2.5, max_nnz=1, **sizes),
    "pairs": lambda: apply(zip([1.0])),
    "grads_and_vars": lambda: apply(3),
    "trainable_variables": lambda: sok.OptimizerScope(3).__enter__(),
    "name": lambda: sok.get_embedding(["a"]),
    "no such embedding": lambda: sok.get_embedding("b", 3),
}
for name, call in calls.items():
    try:
        call()
    except ConfigError as error:
        assert name in str(error), error
        print("refused")
"""


def test_layers_of_sok_1_refuse_other_keys_and_arguments() -> None:
    pytest.importorskip("tf_keras")
    added = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", KEYS]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["refused"] * 17


IN_GRAPHS = """
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import viviane.tensorflow as sok
from viviane.core.errors import ConfigError, KeyRangeError

sok.init()
table = sok.Variable(np.ones((4, 2), np.float32), name="one")


@tf.function
def wrong(keys):
    if tf.reduce_sum(keys) > 0:  # AutoGraph rewrites the function
        keys = keys + 1
    return sok.lookup_sparse(table, keys, combiners="max")


@tf.function
def wrong_inside(keys):
    return wrong(keys)


for call in (wrong, wrong_inside, lambda keys: tf.function(lambda one: sok.lookup_sparse(one))(keys)):
    try:
        call(tf.constant([[1]]))
    except ConfigError as error:
        assert "no such combiner" in str(error) or "sp_ids" in str(error)
        print("own")

script = Path(sys.argv[1])
for in_function in ("lambda x: x", "tf.function"):
    script.write_text(
        "import numpy as np, tensorflow as tf, sparse_operation_kit as sok\\n"
        "table = sok.Variable(np.ones((4, 2), np.float32), name='two')\\n"
        f"({in_function})(lambda: sok.lookup_sparse(table, tf.constant([[9]]), combiners='sum'))()\\n"
    )
    try:
        sok.run_script(script)
    except KeyRangeError as error:
        assert error.value == 9 and "table 'two'" in str(error) and error.__cause__ is None
        print("own")
"""


def test_errors_of_ours_leave_graphs_as_they_are(tmp_path: Path) -> None:
    """AutoGraph made a StagingError of them, and a call of the host an UnknownError with 60 lines of frames."""
    program = tmp_path / "program.py"  # AutoGraph reads functions from files
    program.write_text(IN_GRAPHS)
    command = [sys.executable, str(program), str(tmp_path / "script.py")]
    added = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["own"] * 5
