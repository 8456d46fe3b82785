"""A DCN in SOK's style: sparse tensors of 32-bit keys with weights, cross layers, loss scaling by hand."""

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
rng = np.random.default_rng(2)
DIM, SIZE, SCALE = 8, 128, 1024.0
tables = [sok.Variable(shape=(200, DIM), initializer=tf.keras.initializers.RandomUniform(seed=i), mode="localized:0")
          for i in range(3)]  # fmt: skip
width = 3 * DIM
cross = [tf.Variable(rng.normal(0, 0.1, (width, width)).astype(np.float32)) for _ in range(2)]
head = tf.Variable(rng.normal(0, 0.3, (width, 1)).astype(np.float32))
emb_opt, dense_opt = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.02)), tf.keras.optimizers.Adam(0.02)
where = np.stack([np.repeat(np.arange(SIZE), 2), np.tile([0, 1], SIZE)], 1)
ids = [tf.SparseTensor(where, rng.integers(0, 200, 2 * SIZE).astype(np.int32), (SIZE, 2)) for _ in tables]
weights = [tf.SparseTensor(where, rng.random(2 * SIZE).astype(np.float32) + 0.1, (SIZE, 2)) for _ in tables]
labels = (rng.random((SIZE, 1)) < 0.5).astype(np.float32)


@tf.function
def step():
    with tf.GradientTape() as tape:
        rows = sok.lookup_sparse(tables, ids, sp_weights=weights, combiners=["mean", "sum", "mean"])
        x0 = x = tf.concat(rows, 1)
        for kernel in cross:
            x = x0 * tf.matmul(x, kernel) + x
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, tf.matmul(x, head)))
        scaled = loss * SCALE
    emb_grads, grads = tape.gradient(scaled, [tables, [*cross, head]])
    emb_opt.apply_gradients(zip([g / SCALE for g in emb_grads], tables))
    dense_opt.apply_gradients(zip([g / SCALE for g in grads], [*cross, head]))
    return loss


losses = [float(step()) for _ in range(80)]
print("LOSSES", losses[0], losses[-1])
