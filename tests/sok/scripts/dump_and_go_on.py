"""Train, dump tables with the optimizer's state, load them into new variables, go on with the losses of one run."""

import sys

import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf

sok.init()
folder, DIM, SIZE, STEPS = sys.argv[1], 8, 128, 8
rng = np.random.default_rng(6)
fixed = rng.normal(0, 0.3, (300, DIM)).astype(np.float32)
keys = [
    rng.integers(0, 300, (STEPS, SIZE, 2)),
    rng.integers(-(2**60), 2**60, 500)[rng.integers(0, 500, (STEPS, SIZE, 2))],
]
labels = (keys[0][:, :, :1] % 2).astype(np.float32)


class Model:
    """Two tables and a dense head, trained by their own optimizers."""

    def __init__(self, make, rate):
        self.tables = [
            sok.Variable(fixed, name="items"),
            sok.DynamicVariable(dimension=DIM, var_type="hybrid", initializer="0.1", name="users"),
        ]
        self.head = tf.Variable(np.full((2 * DIM, 1), 0.2, np.float32))
        self.rule, self.dense_rule = sok.OptimizerWrapper(make(rate)), tf.keras.optimizers.SGD(0.5)

    def step(self, number):
        with tf.GradientTape() as tape:
            ids = [tf.RaggedTensor.from_tensor(one[number % STEPS]) for one in keys]
            rows = sok.lookup_sparse(self.tables, ids, combiners=["sum", "mean"])
            logit = tf.matmul(tf.concat(rows, 1), self.head)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels[number % STEPS], logit))
        grads = tape.gradient(loss, [*self.tables, self.head])
        self.rule.apply_gradients(zip(grads, self.tables))
        self.dense_rule.apply_gradients([(grads[2], self.head)])
        return float(loss)


# Adam counts steps, which the files do not have.
for make, rate in ((tf.keras.optimizers.Adagrad, 1.0), (tf.keras.optimizers.SGD, 8.0)):
    model = Model(make, rate)
    losses = [model.step(i) for i in range(STEPS)]
    sok.dump(folder, model.tables, model.rule)
    head = model.head.numpy()
    losses += [model.step(i) for i in range(15 * STEPS)]
    again = Model(make, rate)
    sok.load(folder, again.tables, again.rule)
    again.head.assign(head)
    assert [again.step(i) for i in range(15 * STEPS)] == losses[STEPS:], make
    for one, two in zip(model.tables, again.tables):
        for part, other in zip(sok.export(one), sok.export(two)):
            assert np.array_equal(part.numpy(), other.numpy())
    if make is tf.keras.optimizers.Adagrad:
        first = losses
try:
    sok.load(folder, sok.Variable(fixed[:10], name="items"))
except Exception as error:
    print("refused:", type(error).__name__)
else:
    raise AssertionError("a table of another shape was loaded")
print("LOSSES", first[0], first[-1])
