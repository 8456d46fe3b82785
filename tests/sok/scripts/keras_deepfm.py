"""A DeepFM as a model of Keras, with loss scaling; rows are dumped as they change and put into a second model."""

import time
from datetime import UTC, datetime

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
rng = np.random.default_rng(8)
COLUMNS, DIM, SIZE, SCALE = 4, 6, 128, 256.0


class DeepFM(tf.keras.Model):
    """A table of vectors and one of weights for all columns; keys of a column carry its number."""

    def __init__(self):
        super().__init__()
        self.vectors = sok.DynamicVariable(dimension=DIM, var_type="hbm", initializer="random", name="vectors", seed=1)
        self.weights_of = sok.DynamicVariable(dimension=1, var_type="hbm", initializer="zeros", name="weights", seed=2)
        self.deep = [tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)]

    @property
    def tables(self):
        return [self.vectors, self.weights_of]

    def call(self, keys):
        v = sok.all2all_dense_embedding(self.vectors, keys)
        first = tf.reduce_sum(sok.all2all_dense_embedding(self.weights_of, keys), 1)
        total = tf.reduce_sum(v, 1)
        pairs = 0.5 * tf.reduce_sum(total**2 - tf.reduce_sum(v**2, 1), 1, keepdims=True)
        x = tf.reshape(v, (-1, COLUMNS * DIM))
        for layer in self.deep:
            x = layer(x)
        return first + pairs + x


keys = rng.integers(0, 40, (SIZE, COLUMNS)) + 10**12 * np.arange(COLUMNS)
labels = ((keys[:, :1] + keys[:, 1:2]) % 2).astype(np.float32)
model, other = DeepFM(), DeepFM()
emb_opt, dense_opt = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.02)), tf.keras.optimizers.Adam(0.02)


@tf.function
def step(keys, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(keys)))
        scaled = SCALE * loss
    own, others = sok.filter_variables(model.trainable_variables)
    emb_grads, grads = tape.gradient(scaled, [own, others])
    emb_opt.apply_gradients([(one / SCALE, variable) for one, variable in zip(emb_grads, own)])
    dense_opt.apply_gradients([(one / SCALE, variable) for one, variable in zip(grads, others)])
    return loss


losses = [float(step(tf.constant(keys), tf.constant(labels)))]
moment = datetime.now(UTC)
time.sleep(0.05)
half = keys[: SIZE // 2]
losses += [float(step(tf.constant(half), tf.constant(labels[: SIZE // 2]))) for _ in range(60)]
changed = sok.incremental_model_dump(model.tables, moment)
for names, rows, table in zip(*changed, other.tables):
    assert sorted(names.tolist()) == np.unique(half).tolist()
    sok.assign(table, names, rows)
other(tf.constant(half[:1]))  # Keras makes its dense layers
for layer, twin in zip(model.deep, other.deep):
    twin.set_weights(layer.get_weights())
assert np.array_equal(model(tf.constant(half)).numpy(), other(tf.constant(half)).numpy())
print("LOSSES", losses[0], losses[-1])
