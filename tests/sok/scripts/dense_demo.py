"""A dense demo in SOK's style: fixed tables, one key a slot, a tower of dense layers; eager and inside tf.function."""

import horovod.tensorflow as hvd
import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

hvd.init()
sok.init()
rng = np.random.default_rng(0)
SLOTS, VOCABULARY, DIM, SIZE = 8, 1000, 4, 256
keys = rng.integers(0, VOCABULARY, (SIZE, SLOTS)).astype(np.int64)
labels = (keys[:, :1] % 2).astype(np.float32)
table = sok.Variable(rng.normal(0, 0.1, (VOCABULARY, DIM)).astype(np.float32), name="dense:demo")
tower = [tf.Variable(rng.normal(0, 0.2, shape).astype(np.float32)) for shape in ((SLOTS * DIM, 32), (32, 1))]
emb_opt, dense_opt = sok.OptimizerWrapper(tf.keras.optimizers.SGD(20.0)), tf.keras.optimizers.SGD(0.5)
sok_vars, dense_vars = sok.filter_variables([table, *tower])
assert sok_vars == [table] and len(dense_vars) == 2


def step(keys, labels):
    with tf.GradientTape() as tape:
        rows = tf.reshape(sok.all2all_dense_embedding(table, keys), (-1, SLOTS * DIM))
        logit = tf.matmul(tf.nn.relu(tf.matmul(rows, tower[0])), tower[1])
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logit))
    grads = tape.gradient(loss, [table, *tower])
    emb_opt.apply_gradients(zip(grads[:1], sok_vars))
    dense_opt.apply_gradients(zip([hvd.allreduce(g) for g in grads[1:]], dense_vars))
    return loss


losses = [float(step(keys, labels))]
hvd.broadcast_variables(dense_vars, root_rank=0)
compiled = tf.function(step)
losses += [float(compiled(tf.constant(keys), tf.constant(labels))) for _ in range(60)]
print("LOSSES", losses[0], losses[-1])
