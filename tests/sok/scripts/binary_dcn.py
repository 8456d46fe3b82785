"""A DCN as SOK's benchmark has it: binary files, a dynamic table and several keys a column, Horovod, a schedule."""

import json
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

hvd.init()
sok.init()
SIZE, BATCHES, DIM, HOTNESS, VOCABULARY = 64, 8, 8, (1, 3, 2), (50, 2000, 300)
rng = np.random.default_rng(7)


def write(folder):
    """Write labels, dense numbers and keys of all columns beside each other, a row after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = SIZE * BATCHES
    keys = np.concatenate([rng.integers(0, v, (rows, n)) for v, n in zip(VOCABULARY, HOTNESS)], 1).astype(np.int32)
    (keys[:, 0] % 2).astype(np.int32).tofile(folder / "label.bin")
    rng.integers(0, 100, (rows, 13)).astype(np.int32).tofile(folder / "dense.bin")
    keys.tofile(folder / "category.bin")
    names = {"vocab_sizes": VOCABULARY, "hotness_per_table": HOTNESS, "dense_log": True}
    (folder / "metadata.json").write_text(json.dumps(names))


class BinaryDataset:
    """Batches of such files; dense numbers become log(x + 3)."""

    def __init__(self, folder):
        about = json.loads((folder / "metadata.json").read_text())
        self.hotness = about["hotness_per_table"]
        self.label = np.fromfile(folder / "label.bin", np.int32).reshape(-1, 1).astype(np.float32)
        self.dense = np.log(np.fromfile(folder / "dense.bin", np.int32).reshape(-1, 13) + 3.0).astype(np.float32)
        self.keys = np.fromfile(folder / "category.bin", np.int32).reshape(len(self.label), -1)

    def __getitem__(self, number):
        rows = slice(number * SIZE, (number + 1) * SIZE)
        cuts = np.cumsum(self.hotness)[:-1]
        parts = [tf.RaggedTensor.from_tensor(one.astype(np.int64)) for one in np.split(self.keys[rows], cuts, axis=1)]
        return self.dense[rows], parts, self.label[rows]


class DCN(tf.keras.Model):
    """A bottom network, a low-rank cross network over all vectors, and a logit."""

    def __init__(self):
        super().__init__()
        self.tables = [
            sok.DynamicVariable(dimension=DIM, var_type="hybrid", initializer=f"uniform:-{v**-0.5}:{v**-0.5}",
                                init_capacity=min(1024, v), max_capacity=1 << (v - 1).bit_length(), name=f"column_{i}")
            for i, v in enumerate(VOCABULARY)
        ]  # fmt: skip
        self.bottom, width = tf.keras.layers.Dense(DIM, "relu"), DIM * (1 + len(VOCABULARY))
        self.low = [tf.keras.layers.Dense(4, use_bias=False) for _ in range(2)]
        self.high = [tf.keras.layers.Dense(width) for _ in range(2)]
        self.logit = tf.keras.layers.Dense(1)

    def call(self, dense, keys):
        rows = sok.lookup_sparse(self.tables, keys, combiners=["sum"] * len(self.tables))
        x0 = x = tf.concat([self.bottom(dense), *rows], 1)
        for low, high in zip(self.low, self.high):
            x = x0 * high(low(x)) + x
        return self.logit(x)


write(Path(sys.argv[1]))
data, model = BinaryDataset(Path(sys.argv[1])), DCN()
rate = tf.keras.optimizers.schedules.PolynomialDecay(0.2, BATCHES * 12, 0.02, power=2)
emb_opt, dense_opt = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(rate)), tf.keras.optimizers.Adagrad(0.05)


@tf.function
def step(dense, keys, label, first):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, model(dense, keys)))
    own, others = sok.filter_variables(model.trainable_variables)
    emb_grads, grads = tape.gradient(loss, [own, others])
    emb_opt.apply_gradients(zip(emb_grads, own))
    dense_opt.apply_gradients(zip([hvd.allreduce(one, op=hvd.Average) for one in grads], others))
    if first:
        hvd.broadcast_variables(others, root_rank=0)
    return loss


losses = [float(step(*data[i % BATCHES], i == 0)) for i in range(BATCHES * 12)]
assert len(sok.filter_variables(model.trainable_variables)[0]) == len(VOCABULARY)
print("LOSSES", np.mean(losses[:BATCHES]), np.mean(losses[-BATCHES:]))
