"""Weights of keys, ragged and sparse: pooled as by NumPy, refused where they are not placed as the keys."""

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
rng = np.random.default_rng(5)
ROWS, DIM, SIZE = 60, 4, 96
start = rng.normal(size=(ROWS, DIM)).astype(np.float32)
tables = [sok.Variable(start, name="ragged"), sok.DynamicVariable(dimension=DIM, var_type="hbm", name="sparse")]
sok.assign(tables[1], np.arange(ROWS), start)
lengths = rng.integers(0, 5, SIZE)
values, shares = rng.integers(0, ROWS, lengths.sum()), rng.random(lengths.sum()).astype(np.float32) + 0.1
where = np.stack([np.repeat(np.arange(SIZE), lengths), np.concatenate([np.arange(n) for n in lengths])], 1)
ragged = tf.RaggedTensor.from_row_lengths(values, lengths)
ids = [ragged, tf.SparseTensor(where, values, (SIZE, 5))]
weights = [ragged.with_values(tf.constant(shares)), tf.SparseTensor(where, shares, (SIZE, 5))]
wanted = np.zeros((SIZE, DIM), np.float32)
np.add.at(wanted, where[:, 0], start[values] * shares[:, None])
total = np.bincount(where[:, 0], shares, SIZE)[:, None]
pooled = sok.lookup_sparse(tables, ids, sp_weights=weights, combiners=["sum", "mean"])
assert np.abs(pooled[0].numpy() - wanted).max() < 1e-5
assert np.abs(pooled[1].numpy() * total - wanted).max() < 1e-5

# One weight in another row, in another column, or missing: eagerly and inside of tf.function.
moved = np.copy(lengths)
full = int(np.flatnonzero(lengths)[0])
moved[full], moved[full + 1] = moved[full] - 1, moved[full + 1] + 1
aside = np.copy(where)
aside[0, 1] += 1
wrong = [
    (ids[0], tf.RaggedTensor.from_row_lengths(shares, moved)),
    (ids[1], tf.SparseTensor(aside, shares, (SIZE, 6))),
    (ids[1], tf.SparseTensor(where[1:], shares[1:], (SIZE, 5))),
]


def refusal(call, *given):
    """Return the text of the error that a call raises."""
    try:
        call(*given)
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was raised")


def weighted(keys, own):
    return sok.lookup_sparse(tables[0], keys, sp_weights=own)


compiled = tf.function(weighted)
for keys, own in wrong:
    for call in (weighted, compiled):
        assert "weights are not placed as their ids" in refusal(call, keys, own)
assert "evicted rows are not returned" in refusal(sok.sparse_read_and_evict, tables[1], tf.constant([1]))

optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(2.0))
labels = rng.normal(size=(SIZE, DIM)).astype(np.float32) * (lengths > 0)[:, None]


@tf.function
def step():
    with tf.GradientTape() as tape:
        rows = sok.lookup_sparse(tables, ids, sp_weights=weights, combiners=["sum", "mean"])
        loss = tf.reduce_mean((rows[0] + rows[1] - labels) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables))
    return loss


losses = [float(step()) for _ in range(60)]
print("LOSSES", losses[0], losses[-1])
