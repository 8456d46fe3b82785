"""A DLRM in SOK's style: a dynamic table for each feature, ragged keys, one lookup, the dot interaction."""

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
rng = np.random.default_rng(1)
FEATURES, DIM, SIZE = 5, 8, 128


class DLRM(tf.Module):
    def __init__(self):
        super().__init__()
        self.tables = [
            sok.DynamicVariable(dimension=DIM, var_type="hybrid", initializer="uniform", name=f"table/{i}",
                                init_capacity=1024, max_capacity=4096, max_hbm_for_vectors=1)
            for i in range(FEATURES)
        ]  # fmt: skip
        self.bottom = tf.Variable(rng.normal(0, 0.3, (4, DIM)).astype(np.float32))
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = tf.Variable(rng.normal(0, 0.3, (pairs + DIM, 1)).astype(np.float32))

    def __call__(self, dense, keys):
        rows = sok.lookup_sparse(self.tables, keys, combiners=["sum"] * FEATURES)
        low = tf.nn.relu(tf.matmul(dense, self.bottom))
        every = tf.stack([low, *rows], 1)
        dots = tf.matmul(every, every, transpose_b=True)
        mask = np.tril(np.ones((FEATURES + 1, FEATURES + 1), bool), -1)
        return tf.matmul(tf.concat([low, tf.boolean_mask(dots, mask, axis=1)], 1), self.top)


model = DLRM()
sok_vars, dense_vars = sok.filter_variables(model.trainable_variables)
assert len(sok_vars) == FEATURES and len(dense_vars) == 2
emb_opt = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.2))
dense_opt = tf.keras.optimizers.Adagrad(0.2)
raw = [rng.integers(-(2**62), 2**62, (SIZE, 3)) for _ in range(FEATURES)]
lengths = rng.integers(0, 4, (FEATURES, SIZE))
keys = [tf.RaggedTensor.from_row_lengths(np.concatenate([r[:n] for r, n in zip(part, own)]), own)
        for part, own in zip(raw, lengths)]  # fmt: skip
dense = rng.normal(size=(SIZE, 4)).astype(np.float32)
labels = (rng.random((SIZE, 1)) < 0.4).astype(np.float32)


@tf.function
def step(dense, keys, labels):
    with tf.GradientTape() as tape:
        logit = model(dense, keys)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logit))
    emb_grads, grads = tape.gradient(loss, [sok_vars, dense_vars])
    emb_opt.apply_gradients(zip(emb_grads, sok_vars))
    dense_opt.apply_gradients(zip(grads, dense_vars))
    return loss


losses = [float(step(dense, keys, labels)) for _ in range(60)]
known = len(np.unique(keys[0].values))
assert model.tables[0].size.numpy().tolist() == [known, DIM], (model.tables[0].size, known)
print("LOSSES", losses[0], losses[-1])
