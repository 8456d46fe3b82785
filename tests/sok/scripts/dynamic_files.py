"""Dynamic variables: dump, load, incremental dump, export, assign; and equality with TensorFlow's own variable."""

import sys
import time
from datetime import UTC, datetime

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
rng = np.random.default_rng(3)
folder, DIM = sys.argv[1], 4
make = lambda name: sok.DynamicVariable(dimension=DIM, var_type="hbm", initializer="0.5", name=name)
table, opt = make("users"), sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))


def train(table, opt, keys, target):
    with tf.GradientTape() as tape:
        rows = sok.lookup_sparse(table, tf.constant(keys), combiners="sum")
        loss = tf.reduce_mean((rows - target) ** 2)
    opt.apply_gradients(zip(tape.gradient(loss, [table]), [table]))
    return float(loss)


early, late = np.array([[10**15], [-7], [3]]), np.array([[4], [3]])
losses = [train(table, opt, early, 2.0) for _ in range(30)]
time.sleep(0.05)
moment = datetime.now(UTC)
time.sleep(0.05)
train(table, opt, late, 2.0)
keys, rows = sok.incremental_model_dump(table, moment)
assert sorted(keys[0].tolist()) == [3, 4] and rows[0].shape == (2, DIM), keys
sok.dump(folder, table, opt)
again, other = make("users"), sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
sok.load(folder, again, other)
for name, one, two in zip(("keys", "rows"), sok.export(table), sok.export(again)):
    assert np.array_equal(one.numpy(), two.numpy()), name
assert np.array_equal(opt.get_slot(table, "m").numpy(), other.get_slot(again, "m").numpy())
sok.assign(again, [99, 3], np.ones((2, DIM)))
assert dict(zip(sok.export(again)[0].numpy().tolist(), sok.export(again)[1].numpy()[:, 0]))[99] == 1.0

# SGD on a fixed table: the numbers of tf.Variable, bit by bit.
start = rng.normal(size=(50, DIM)).astype(np.float32)
ids = rng.integers(0, 50, (16, 3)).astype(np.int32)
own, plain = sok.Variable(start, name="own"), tf.Variable(start)
own_opt = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
for _ in range(20):
    with tf.GradientTape(persistent=True) as tape:
        a = tf.reduce_mean(sok.lookup_sparse(own, tf.RaggedTensor.from_tensor(ids), combiners="sum") ** 2)
        b = tf.reduce_mean(tf.reduce_sum(tf.gather(plain, ids), 1) ** 2)
    own_opt.apply_gradients(zip(tape.gradient(a, [own]), [own]))
    plain.assign_sub(0.5 * tf.convert_to_tensor(tape.gradient(b, plain)))
assert np.abs(sok.export(own)[1].numpy() - plain.numpy()).max() < 1e-6
print("LOSSES", losses[0], losses[-1])
