"""SOK 2 under its first name: experiment, localized tables, evaluation between steps, gradients of several batches."""

import numpy as np
import tensorflow as tf
from sparse_operation_kit import experiment as sok

sok.init(comm_tool="horovod", use_legacy_optimizer=True)
rng = np.random.default_rng(4)
DIM, SIZE = 8, 64
start = rng.normal(0, 0.1, (100, DIM)).astype(np.float32)
tables = [
    sok.Variable(start, mode="localized:0", name="one"),
    sok.DynamicVariable(dimension=DIM, var_type="hbm", initializer="random", key_type=tf.int32, name="two"),
]
opt = sok.OptimizerWrapper(tf.keras.optimizers.SGD(4.0))
head = tf.Variable(rng.normal(0, 0.3, (2 * DIM, 1)).astype(np.float32))
keys = [tf.RaggedTensor.from_tensor(rng.integers(0, 100, (SIZE, 3)).astype(np.int32)) for _ in tables]
labels = (rng.random((SIZE, 1)) < 0.5).astype(np.float32)


def loss_of(rows):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, tf.matmul(tf.concat(rows, 1), head)))


evaluate = tf.function(lambda: loss_of(sok.lookup_sparse(tables, keys, combiners=["sum", "mean"])))
losses = []
for _ in range(40):
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(sok.lookup_sparse(tables, keys, combiners=["sum", "mean"]))
    opt.apply_gradients(zip(tape.gradient(loss, tables), tables))
    head.assign_sub(0.5 * tape.gradient(loss, head))  # the same tape again, by other variables
    for _ in range(10):
        value = float(evaluate())
        sok.lookup_sparse(tables, keys, combiners=["sum", "mean"])  # eagerly, outside of a tape
    losses.append(value)
# A second gradient of the same loss adds nothing; that of another loss is added.
before = sok.export(tables[0])[1].numpy()
moved = []
for losses_of in (lambda loss: [loss], lambda loss: [loss, loss], lambda loss: [loss, 2.0 * loss]):
    sok.assign(tables[0], np.arange(100), before)
    with tf.GradientTape(persistent=True) as tape:
        found = losses_of(loss_of(sok.lookup_sparse(tables, keys, combiners=["sum", "mean"])))
    gradients = [tape.gradient(one, tables[0]) for one in found]
    opt.apply_gradients([(sum(gradients), tables[0])])
    moved.append(sok.export(tables[0])[1].numpy() - before)
assert np.array_equal(moved[0], moved[1])
assert np.abs(moved[2] - 3 * moved[0]).max() < 1e-6
print("LOSSES", losses[0], losses[-1])
