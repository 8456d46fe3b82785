"""A dense demo in the style of SOK 1.x: All2AllDenseEmbedding in a model of Keras 2, OptimizerScope, Saver."""

import sys

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

SLOTS, NNZ, DIM, SIZE, VOCABULARY = 10, 3, 4, 256, 500


class DenseDemo(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = sok.All2AllDenseEmbedding(
            max_vocabulary_size_per_gpu=VOCABULARY, embedding_vec_size=DIM, slot_num=SLOTS, nnz_per_slot=NNZ,
            use_hashtable=True, embedding_initializer=tf.keras.initializers.RandomUniform(-0.1, 0.1),
        )  # fmt: skip
        self.hidden = tf.keras.layers.Dense(32, activation="relu")
        self.out = tf.keras.layers.Dense(1)

    def call(self, inputs, training=True):
        rows = self.embedding(inputs, training=training)
        return self.out(self.hidden(tf.reshape(rows, (-1, SLOTS * NNZ * DIM))))


sok.Init(global_batch_size=SIZE)
model = DenseDemo()
emb_opt, dense_opt = tf.keras.optimizers.Adam(0.02), tf.keras.optimizers.Adam(0.02)
rng = np.random.default_rng(0)
keys = rng.integers(0, VOCABULARY, (SIZE, SLOTS, NNZ))
labels = (keys[:, :1, 0] % 2).astype(np.float32)
loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def step(keys, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(keys, training=True))
    emb_vars, other_vars = sok.split_embedding_variable_from_others(model.trainable_variables)
    assert len(emb_vars) == 1 and len(other_vars) == 4
    emb_grads, grads = tape.gradient(loss, [emb_vars, other_vars])
    with sok.OptimizerScope(emb_vars):
        emb_opt.apply_gradients(zip(emb_grads, emb_vars), experimental_aggregate_gradients=False)
    dense_opt.apply_gradients(zip(grads, other_vars))
    return loss


losses = [float(step(tf.constant(keys), tf.constant(labels))) for _ in range(60)]
for _ in range(300):  # evaluation, more often than lookups may wait for a gradient
    model(tf.constant(keys[:2]), training=False)
variable = model.embedding.embedding_variable
known, rows = sok.export(variable)
saver = sok.Saver()
saver.dump_to_file(variable, sys.argv[1])
saver.load_embedding_values(variable, [np.zeros((100, DIM), np.float32)] * 5)
assert not np.any(sok.export(variable)[1].numpy())
saver.restore_from_file(variable, sys.argv[1])
assert np.array_equal(sok.export(variable)[1].numpy(), rows.numpy())
print("LOSSES", losses[0], losses[-1])
