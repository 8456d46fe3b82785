"""What scripts do with SOK's variables beside `lookup_sparse`: they are tables, and a number to TensorFlow alone."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import viviane.tensorflow as sok  # noqa: E402
from viviane.core.errors import ConfigError, DataError  # noqa: E402
from viviane.embedding.external import LostUpdateError  # noqa: E402

START = np.arange(8, dtype=np.float32).reshape(4, 2)
IDS = tf.constant([3, 0, 3], tf.int64)


def tables() -> list[Any]:
    fixed = sok.Variable(START.copy())
    dynamic = sok.DynamicVariable(dimension=2, initializer="zeros", var_type="hbm")
    return [fixed, sok.assign(dynamic, np.arange(4), START)]


@pytest.mark.parametrize("number", [0, 1])
def test_operations_of_tensorflow_see_rows(number: int) -> None:
    """They saw a number, 0: `embedding_lookup` failed, and `numpy()` was 0.0."""
    table = tables()[number]
    for found in (tf.nn.embedding_lookup(table, IDS), tf.gather(table, IDS), table.sparse_read(IDS)):
        np.testing.assert_array_equal(found, START[[3, 0, 3]])
    slices = tf.IndexedSlices(tf.ones((3, 2)), IDS)
    table.scatter_add(slices).scatter_sub(tf.IndexedSlices(tf.fill((1, 2), 0.5), IDS[:1]))

    @tf.function
    def zero() -> None:
        table.scatter_update(tf.IndexedSlices(tf.zeros((1, 2)), tf.constant([1])))

    zero()
    want = START + np.array([[1.0], [0.0], [0.0], [1.5]], np.float32)
    want[1] = 0.0
    np.testing.assert_array_equal(sok.export(table)[1], want)
    assert table.shape.as_list() == [[4, 2], [None, 2]][number]
    assert isinstance(table, sok.DynamicVariable) == bool(number)
    assert isinstance(table, sok.DistributedVariable) != bool(number)
    assert not isinstance(tf.Variable(1.0), sok.DynamicVariable)


def test_rows_as_a_tensor() -> None:
    fixed, dynamic = tables()
    np.testing.assert_array_equal(fixed.numpy(), START)
    np.testing.assert_array_equal(tf.function(lambda: fixed + 1.0)(), START + 1)
    fixed.assign(START * 2)
    np.testing.assert_array_equal(fixed, START * 2)
    with pytest.raises(ConfigError, match="no tensor"):
        dynamic.numpy()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(fixed * fixed)
    with pytest.raises(ConfigError, match="differentiated"):
        tape.gradient(loss, fixed)


@pytest.mark.parametrize("in_graph", [False, True])
def test_embedding_lookup_of_tensorflow_trains(in_graph: bool) -> None:
    every = [*tables(), tf.Variable(START)]
    optimizer = sok.OptimizerWrapper(sok.SGD(0.5))
    bags = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], IDS, [3, 2])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = 0.0
            for one in every:
                loss += tf.reduce_sum(tf.nn.embedding_lookup(one, IDS) ** 2)
                loss += tf.reduce_sum(tf.nn.embedding_lookup_sparse(one, bags, None, combiner="mean"))
        # A plain variable in the list is moved by the optimizer itself.
        optimizer.apply_gradients(zip(tape.gradient(loss, every), every, strict=True))

    run = tf.function(step) if in_graph else step
    run()
    for own in every[:2]:
        np.testing.assert_allclose(sok.export(own)[1], every[2], rtol=1e-6)


def plain_step(table: Any, optimizer: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(table, IDS[:, None]))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def test_an_optimizer_without_a_wrapper_raises() -> None:
    """It changed the variable's own number, updated no row, and raised nothing."""

    class Plain:  # moves variables by their handle, as the optimizers of Keras 2 do
        def apply_gradients(self, pairs: Any) -> None:
            for gradient, variable in pairs:
                tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=gradient)

    table = tables()[0]
    plain_step(table, Plain())
    for call in (lambda: plain_step(table, Plain()), lambda: sok.export(table), lambda: sok.dump("nowhere", table)):
        with pytest.raises(Exception, match="another optimizer moved the variable"):
            call()
    with pytest.raises(LostUpdateError, match="moves no row"):
        plain_step(tables()[0], tf.keras.optimizers.SGD(0.1))


def test_a_table_of_many_features_and_gradients_that_are_not_applied() -> None:
    """65 lookups of one table in a step raised; 64 steps without an update spoke of lookups without a gradient."""
    table, optimizer = sok.Variable(np.zeros((4, 2), np.float32)), sok.OptimizerWrapper(sok.SGD(1.0))

    def gradient(count: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one) for one in sok.lookup_sparse([table] * count, [IDS[:1, None]] * count)])
        return tape.gradient(loss, table)

    for _ in range(2):
        optimizer.apply_gradients([(gradient(100), table)])
    assert table.numpy()[3].tolist() == [-200.0, -200.0]
    for _ in range(5):
        gradient(100)
    with pytest.raises(Exception, match="came and were not applied"):
        gradient(100)


def test_variables_of_16_bits_give_such_vectors() -> None:
    for kind in (tf.float16, tf.bfloat16):
        table = sok.Variable(START, dtype=kind)
        with tf.GradientTape() as tape:
            found = sok.lookup_sparse(table, IDS[:, None])
            loss = tf.reduce_sum(found)
        gradient = tape.gradient(loss, table)
        assert found.dtype == table.dtype == gradient.dtype == sok.export(table)[1].dtype == kind
        sok.OptimizerWrapper(sok.SGD(1.0)).apply_gradients([(gradient, table)])
        np.testing.assert_array_equal(tf.cast(sok.export(table)[1], tf.float32), START - [[1.0], [0.0], [0.0], [2.0]])


def test_variables_of_tensorflow_and_roots_in_one_lookup() -> None:
    every, bags = [*tables(), tf.Variable(START)], tf.RaggedTensor.from_row_lengths(IDS, [2, 0, 1])
    weights = bags.with_values(tf.constant([1.0, 3.0, 2.0]))
    for combiner, divisor in (("sum", 1.0), ("mean", 4.0), ("sqrtn", 10**0.5)):
        for found in sok.lookup_sparse(every, [bags] * 3, [weights] * 3, combiners=[combiner] * 3):
            first = (START[3] + 3 * START[0]) / divisor
            last = START[3] * {"sum": 2.0, "mean": 1.0, "sqrtn": 1.0}[combiner]
            np.testing.assert_allclose(found, [first, [0.0, 0.0], last], rtol=1e-6)


def test_arguments_of_earlier_versions() -> None:
    every, bags = tables(), tf.RaggedTensor.from_row_lengths(IDS, [2, 0, 1])
    want = sok.lookup_sparse(every, [bags] * 2, combiners=["sum", "mean"])
    for found in (
        sok.lookup_sparse(every, [bags] * 2, [2, 2], ["sum", "mean"]),
        sok.lookup_sparse(every, [bags] * 2, hotness=[2, 2], combiners=["sum", "mean"]),
        sok.lookup_sparse(every, [bags] * 2, ["sum", "mean"]),
    ):
        np.testing.assert_array_equal(found, want)
    options = {"validate_shape": True, "synchronization": tf.VariableSynchronization.AUTO}
    assert sok.Variable(shape=[4, 2], initializer="ones", **options).numpy().sum() == 8.0
    with pytest.raises(ConfigError, match="unknown options"):
        sok.Variable(START, modes="localized:0")


def test_ids_that_are_not_bags_are_refused() -> None:
    table = tables()[0]
    unordered = tf.SparseTensor([[1, 0], [0, 0]], IDS[:2], [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tf\.sparse\.reorder"):
        sok.lookup_sparse(table, unordered)
    for wrong in (
        tf.ragged.constant([[[1], [2, 3]]], dtype=tf.int64),
        IDS,
        tf.sparse.from_dense(np.ones((1, 1, 1), int)),
    ):
        with pytest.raises(DataError, match="rank 2"):
            sok.lookup_sparse(table, wrong)


@pytest.mark.parametrize("kind", ["Adam", "Ftrl", "SGD", "Adamax", "Adadelta", "RMSprop"])
def test_training_goes_on_after_load(kind: str, tmp_path: Path) -> None:
    """Adam began at its first step again, and moved rows by up to 2 times its rate."""
    options = {"SGD": {"momentum": 0.9}, "Ftrl": {"l2_regularization_strength": 0.1}}.get(kind, {})

    def optimizer() -> Any:
        return sok.OptimizerWrapper(getattr(tf.keras.optimizers, kind)(0.1, **options))

    first, second = ([sok.Variable(START, name=f"fixed{kind}"),
                      sok.DynamicVariable(dimension=2, initializer="ones", name=f"dynamic{kind}")]
                     for _ in range(2))  # fmt: skip
    one, other = optimizer(), optimizer()
    for _ in range(5):
        for table in first:
            plain_step(table, one)
    sok.dump(tmp_path, first, one)
    sok.load(tmp_path, second, other)
    for before, after in zip(first, second, strict=True):
        plain_step(before, one)
        plain_step(after, other)
        for own, loaded in zip(sok.export(before), sok.export(after), strict=True):
            np.testing.assert_array_equal(own, loaded)
    names = {"Ftrl": ["accumulator", "linear"], "SGD": ["momentum"], "Adadelta": ["accum_grad", "accum_var"],
             "RMSprop": ["rms"]}  # fmt: skip
    assert one.get_slot_names() == names.get(kind, ["m", "v"])
    assert int(other.iterations) >= 6


def _optimizers() -> list[Any]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("Ftrl", {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.3}),
        ("Adagrad", {"epsilon": 0.1}), ("Adamax", {"epsilon": 0.1}), ("Adadelta", {"epsilon": 0.1}),
        ("RMSprop", {"epsilon": 0.1}),
    ]  # fmt: skip
    places = {"": tf.keras.optimizers}
    if not getattr(tf.keras, "__version__", "2").startswith("3"):
        places["legacy "] = tf.keras.optimizers.legacy
    return [
        pytest.param(partial(getattr(place, kind), 0.1, **own), id=where + kind)
        for where, place in places.items()
        for kind, own in kinds
    ]


@pytest.mark.parametrize("make", _optimizers())
def test_rows_move_as_variables_of_tensorflow_do(make: Any) -> None:
    """Ftrl's first accumulator was refused, and l2 counted half; Keras 2's epsilon was added to the root."""
    table, plain, optimizer, theirs = sok.Variable(START), tf.Variable(START), sok.OptimizerWrapper(make()), make()
    keys = tf.range(4, dtype=tf.int64)[:, None]
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(sok.lookup_sparse(one, keys) ** 2) for one in (table, plain))
        gradients = tape.gradient(loss, [table, plain])
        optimizer.apply_gradients([(gradients[0], table)])
        theirs.apply_gradients([(tf.convert_to_tensor(gradients[1]), plain)])
    np.testing.assert_allclose(table.numpy(), plain.numpy(), atol=2e-5)


def test_optimizers_that_tables_do_not_have() -> None:
    keras = tf.keras.optimizers
    for wrong, said in (
        (keras.Nadam(0.1), "Adamax, Adadelta"),
        (keras.RMSprop(0.1, momentum=0.9), "momentum"),
        (keras.RMSprop(0.1, centered=True), "centered"),
        (tf.compat.v1.train.AdamOptimizer(0.1), "in the place of tf.compat.v1.train.AdamOptimizer"),
    ):
        with pytest.raises(ConfigError, match=said):
            sok.OptimizerWrapper(wrong)


def test_optimizers_of_sok_itself() -> None:
    """`sok.SGD` had no apply_gradients, and `sok.optimizers.Adam` took no keywords."""
    table, sgd = sok.Variable(START), sok.SGD(lr=1.0)

    @tf.function
    def step() -> None:
        plain_step(table, sgd)

    step()
    sgd.lr = 0.5  # inside of the function too
    step()
    np.testing.assert_array_equal(table.numpy(), START - [[1.5], [0.0], [0.0], [3.0]])
    plain_step(table, sok.optimizers.Adam(learning_rate=1.0, beta_1=0.9, beta_2=0.999, epsilon=1e-7))
    np.testing.assert_allclose(table.numpy(), START - [[2.5], [0.0], [0.0], [4.0]], atol=1e-5)


def test_lookups_add_keys_as_those_of_sok_do() -> None:
    """`size` was 0, and `export` empty, until the first step."""
    table = sok.DynamicVariable(dimension=2, initializer="13", var_type="hbm")
    sok.lookup_sparse(table, IDS[:, None], training=False)
    assert table.size.numpy().tolist() == [0, 2]
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, IDS), np.full((3, 2), 13.0))
    assert sok.export(table)[0].numpy().tolist() == [0, 3]
    tf.function(lambda keys: sok.lookup_sparse(table, keys))(tf.constant([[7]]))
    assert sok.export(table)[0].numpy().tolist() == [0, 3, 7]
    plain_step(table, sok.SGD(1.0))
    np.testing.assert_array_equal(sok.export(table)[1][:, 0], [12.0, 11.0, 13.0])


def test_checkpoints_of_tensorflow_have_the_rows(tmp_path: Path) -> None:
    """They had the number alone, and a restored table its first rows."""
    first, second = tables(), [sok.Variable(np.zeros_like(START)), sok.DynamicVariable(dimension=2, var_type="hbm")]
    path = tf.train.Checkpoint(a=first[0], b=first[1]).save(str(tmp_path / "saved"))
    tf.train.Checkpoint(a=second[0], b=second[1]).restore(path).assert_consumed()
    for table in second:
        np.testing.assert_array_equal(sok.export(table)[1], START)


SCALED = """
import sys
import numpy as np, tensorflow as tf, sparse_operation_kit as sok
import horovod.tensorflow as hvd
sok.init()
optimizers = tf.keras.optimizers
table = sok.Variable(np.ones((4, 2), np.float32))
wrapper = sok.OptimizerWrapper(optimizers.legacy.SGD(1.0))
scaled = tf.keras.mixed_precision.LossScaleOptimizer(wrapper, initial_scale=1024, dynamic=False)
dense = tf.Variable(tf.ones((2, 1)))

@tf.function
def step():
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.matmul(sok.lookup_sparse(table, tf.constant([[1], [1]])), dense))
        large = scaled.get_scaled_loss(loss)
    own, _ = scaled.get_unscaled_gradients(tape.gradient(large, [table, dense]))
    scaled.apply_gradients([(own, table)])

step()
step()
assert table.numpy().tolist() == [[1, 1], [-3, -3], [1, 1], [1, 1]], table.numpy()
adam = sok.OptimizerWrapper(optimizers.Adam(1.0))  # has slots, which a checkpoint asks for those of every object
tf.train.Checkpoint(table=table, dense=dense, adam=adam).write("all")
print("RAN")
if sys.argv[1] == "jit":
    tf.function(step, jit_compile=True)()
grows = sok.DynamicVariable(dimension=2)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(sok.lookup_sparse(grows, tf.constant([[1]])))
optimizers.Adam(1.0).apply_gradients([(tape.gradient(loss, grows), grows)])
"""


@pytest.mark.parametrize(
    ("way", "said"), [("jit", "XLA compiles no lookup"), ("plain", "another optimizer was given a dynamic variable")]
)
def test_a_loss_scale_optimizer_of_keras_2_takes_the_wrapper(way: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("tf_keras")
    script = tmp_path / "scaled.py"
    script.write_text(SCALED)
    added = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "viviane", "sok", str(script), way]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False, cwd=tmp_path
    )
    assert "RAN" in done.stdout, done.stderr[-3000:]
    assert said in done.stderr


TOGETHER = """
import sys
from datetime import UTC, datetime
import numpy as np, tensorflow as tf, sparse_operation_kit as sok
import horovod.tensorflow as hvd
hvd.init()
sok.init()
rng = np.random.default_rng(0)
start = rng.normal(size=(9, 2)).astype(np.float32)

def tables():
    return [sok.Variable(start, name="all"), sok.Variable(start, mode="localized:1", name="one"),
            *(sok.DynamicVariable(dimension=2, initializer="ones", name=f"dynamic{i}") for i in range(2))]

own = tables()
plain = [tf.Variable(rows) for rows in (start, start, np.ones((9, 2), np.float32), np.ones((9, 2), np.float32))]
optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.03, momentum=0.9))
theirs = tf.keras.optimizers.SGD(0.03, momentum=0.9)
keys = tf.constant(rng.permutation(9)[:8].reshape(4, 2))
half = keys[2 * hvd.rank():2 * hvd.rank() + 2]
for i in range(3):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(row ** 2) for row in sok.lookup_sparse(own, [half] * 4, combiners=["sum"] * 4)])
    optimizer.apply_gradients(zip(tape.gradient(loss, own), own))
    with tf.GradientTape() as tape:
        want = tf.add_n([tf.reduce_sum(tf.reduce_sum(tf.gather(one, keys), 1) ** 2) for one in plain])
    theirs.apply_gradients([(tf.convert_to_tensor(g), v) for g, v in zip(tape.gradient(want, plain), plain)])
    np.testing.assert_allclose(hvd.allreduce(loss, op=hvd.Sum), want, rtol=1e-5, atol=1e-6)
folder = sys.argv[1]
sok.dump(folder, own, optimizer)
again, sure = tables(), sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.03, momentum=0.9))
sok.load(folder, again, sure)
found = [sok.all2all_dense_embedding(one, keys) for one in again]
np.testing.assert_allclose(found, [tf.gather(one, keys) for one in plain], rtol=1e-5, atol=1e-6)
new, _ = sok.incremental_model_dump(own[2:], datetime(2020, 1, 1, tzinfo=UTC))
assert [sorted(one) for one in new] == [sorted(keys.numpy().ravel())] * 2
sok.assign(again[3], tf.constant([100 + hvd.rank()]), [[float(hvd.rank())] * 2])  # each its own key
assert sok.all2all_dense_embedding(again[3], tf.constant([100, 101]))[:, 0].numpy().tolist() == [0.0, 1.0]
assert hvd.allgather(tf.constant([hvd.rank()])).numpy().tolist() == [0, 1]
print("RAN")
"""


def test_two_processes(tmp_path: Path) -> None:
    """Dynamic variables were refused there, localized ones placed anywhere."""
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    added = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "viviane", "sok", str(script), str(tmp_path / "tables")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False)
    assert done.stdout.count("RAN") == 2, done.stderr[-3000:]
