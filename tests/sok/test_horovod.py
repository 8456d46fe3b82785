"""The calls of Horovod that scripts make under `viviane sok`, in one process and in two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

import viviane.tensorflow as sok  # noqa: E402
from viviane.core.errors import ConfigError  # noqa: E402
from viviane.tensorflow import horovod as hvd  # noqa: E402
from viviane.tensorflow import horovod_keras  # noqa: E402

SCRIPT = """
import numpy as np, tensorflow as tf
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.compression import Compression
import sparse_operation_kit as sok

hvd.init()
sok.init()
n, r = hvd.size(), hvd.rank()
tf.keras.utils.set_random_seed(r)
one = tf.constant([1.0, 2.0]) * (r + 1)
product = np.prod(range(1, n + 1))
assert hvd.allreduce(one, op=hvd.Product).numpy().tolist() == [product, 2.0**n * product]
scales = dict(prescale_factor=2.0, postscale_factor=0.25, compression=Compression.fp16)
assert hvd.allreduce(one, op=hvd.Sum, **scales).numpy()[0] == 0.5 * sum(range(1, n + 1))
assert hvd.allreduce(tf.constant([r > 0, False]), op=hvd.Max).numpy().tolist() == [n > 1, False]
assert hvd.allreduce(tf.cast(one, tf.bfloat16), op=hvd.Max).numpy()[0] == n
slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([r], tf.int64), tf.constant([4, 2], tf.int64))
slices = hvd.allreduce(slices, op=hvd.Sum)
assert isinstance(slices, tf.IndexedSlices) and slices.indices.numpy().tolist() == list(range(n))
rows, counts = hvd.alltoall(tf.range(n), splits=tf.ones(n, tf.int32))
assert rows.numpy().tolist() == [r] * n and counts.numpy().tolist() == [1] * n
assert hvd.reducescatter(tf.range(2.0 * n), op=hvd.Average).numpy().tolist() == [2.0 * r, 2.0 * r + 1]


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.table = sok.Variable(np.zeros((20, 4), np.float32))
        self.out = tf.keras.layers.Dense(1, "sigmoid")

    def call(self, keys):
        return self.out(sok.lookup_sparse(self.table, keys, combiners="sum"))


rng = np.random.default_rng(r)
keys = rng.integers(0, 20, (128, 2))
labels = (keys[:, :1] % 2).astype(np.float32)
net, inner = Net(), tf.keras.optimizers.Adam(0.05)
if USE_WRAPPER:
    inner = sok.OptimizerWrapper(inner)
    net.compile(hvd_keras.DistributedOptimizer(inner), "binary_crossentropy")
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback(),
                 hvd_keras.callbacks.LearningRateWarmupCallback(initial_lr=0.05, warmup_epochs=2)]
    losses = net.fit(keys, labels, batch_size=32, epochs=8, callbacks=callbacks, verbose=0).history["loss"]
else:
    own, dense = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)), hvd.DistributedOptimizer(inner)

    @tf.function
    def step(first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.keras.losses.binary_crossentropy(labels, net(keys)))
        tables, others = [net.table], net.out.trainable_variables
        grads, other_grads = tape.gradient(loss, [tables, others])
        own.apply_gradients(zip(grads, tables))
        dense.apply_gradients(zip(other_grads, others))
        if first:
            hvd.broadcast_variables(net.out.variables, 0)
            hvd.broadcast_variables(dense.variables, 0)
        return loss

    losses = [float(step(i == 0)) for i in range(30)]
kernel = net.out.kernel
np.testing.assert_array_equal(hvd.broadcast(kernel, 0), kernel)  # the same in all processes
np.testing.assert_array_equal(np.unique(hvd.allgather(tf.constant([losses[-1]]))).size, 1 if USE_WRAPPER else n)
assert losses[-1] < 0.8 * losses[0], losses
print("RAN")
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("wrapped", [False, True], ids=["loop", "fit"])
def test_distributed_optimizer(wrapped: bool, processes: int, tmp_path: Path) -> None:
    """`DistributedOptimizer`, `horovod.tensorflow.keras` and its callbacks were not there."""
    if wrapped:
        pytest.importorskip("tf_keras")  # models of Keras 3 do not list SOK's variables
    script = tmp_path / "script.py"
    script.write_text(f"USE_WRAPPER = {wrapped}\n{SCRIPT}")
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    added = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *started, "-m", "viviane", "sok", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | added, timeout=280, check=False)
    assert done.stdout.count("RAN") == processes, done.stderr[-3000:]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale was ignored, and so were processes that mpirun had started: each trained alone."""
    assert hvd.allreduce(tf.constant(2.0), prescale_factor=3.0).numpy() == 6.0
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))
    for call in (
        lambda: hvd.allreduce(1.0, op="adasum"),
        lambda: hvd.allreduce(1.0, process_set=object()),
        lambda: hvd.allreduce(slices, op=hvd.Max),
        lambda: horovod_keras.DistributedOptimizer(object()),
        lambda: horovod_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2),
    ):
        with pytest.raises(ConfigError):
            call()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node=2"):
        sok.init()


def test_sessions_of_tensorflow_1_are_refused(tmp_path: Path) -> None:
    """The error was that an optimizer is none."""
    script = tmp_path / "old.py"
    script.write_text(
        "import tensorflow as tf, sparse_operation_kit as sok\n"
        "tf.compat.v1.disable_eager_execution()\nsok.Init(global_batch_size=8)\n"
    )
    command = [sys.executable, "-m", "viviane", "sok", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode != 0
    assert "sessions of TensorFlow 1 are not supported" in done.stderr, done.stderr[-3000:]
