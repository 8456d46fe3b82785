"""A sparse demo in the style of SOK 1.x: DistributedEmbedding without hash table, its own Adam."""

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

SLOTS, NNZ, DIM, SIZE, VOCABULARY = 6, 4, 8, 128, 200
sok.Init(global_batch_size=SIZE)
layer = sok.get_embedding(
    "table", sok.DistributedEmbedding, combiner="mean", max_vocabulary_size_per_gpu=VOCABULARY, embedding_vec_size=DIM,
    slot_num=SLOTS, max_nnz=NNZ, use_hashtable=False, embedding_initializer="ones",
)  # fmt: skip
assert sok.get_embedding("table") is layer
inputs = tf.keras.Input((), sparse=True, dtype=tf.int64)
rng = np.random.default_rng(1)
lengths = rng.integers(0, NNZ + 1, SIZE * SLOTS)
where = np.concatenate([np.stack([np.full(n, row), np.arange(n)], 1) for row, n in enumerate(lengths)])
keys = tf.SparseTensor(where, rng.integers(0, VOCABULARY, len(where)), (SIZE * SLOTS, NNZ))
labels = (rng.random((SIZE, 1)) < 0.5).astype(np.float32)
head = tf.keras.layers.Dense(1)
opt, dense_opt = sok.optimizers.Adam(0.05), tf.keras.optimizers.Adam(0.05)


def step():
    with tf.GradientTape() as tape:
        rows = layer(keys, training=True)
        logit = head(tf.reshape(rows, (SIZE, SLOTS * DIM)))
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logit))
    own = [layer.embedding_variable]
    emb_grads, grads = tape.gradient(loss, [own, head.trainable_variables])
    opt.apply_gradients(zip(emb_grads, own))
    dense_opt.apply_gradients(zip(grads, head.trainable_variables))
    return loss


losses = [float(step()) for _ in range(40)]
empty = layer(keys, training=False).numpy().reshape(SIZE * SLOTS, DIM)[lengths == 0]
assert empty.size and not empty.any()  # the mean of an empty row is 0
print("LOSSES", losses[0], losses[-1])
