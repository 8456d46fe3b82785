"""A Keras DLRM on torch with Viviane's tables, on one GPU, beside Viviane's own model of the same sizes.

    KERAS_BACKEND=torch python benchmarks/keras_gpu.py [--small]

Both train in bf16 with SGD on batches that lie on the device; what is timed is a step after another, between two
events. Keras' torch trainer calls its layers in every step and records no CUDA graph; Viviane's model is timed in a
graph and from Python.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers, ops

import viviane as vv
import viviane.keras as vk
from dense_gpu import BOTTOM, NUM_DENSE, TOP
from embedding_gpu import CAP, CRITEO, DIM, SMALL
from record import record
from train_gpu import LR, NUM_BATCHES, dlrm, draw, schema_of, time_ms

BATCH, EXPONENT = (512 if SMALL else 65_536), 1.1


def keras_dlrm(rows: list[int]) -> keras.Model:
    """Return a compiled DLRM over {"numbers", "ids"}."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    numbers = keras.Input((NUM_DENSE,), name="numbers")
    ids = keras.Input((len(rows),), dtype="int32", name="ids")
    bottom = numbers
    for width in BOTTOM:
        bottom = layers.Dense(width, activation="relu")(bottom)
    names = [f"c{i}" for i in range(len(rows))]
    tables = [vv.TableConfig(name=name, num_rows=count, dim=DIM) for name, count in zip(names, rows, strict=True)]
    features = [vv.FeatureConfig(name=name, table=name) for name in names]
    found = vk.DistributedEmbedding(features, tables=tables, optimizer=vv.SGD())(
        {name: ids[:, i] for i, name in enumerate(names)}
    )
    every = ops.concatenate([bottom, *(ops.cast(found[name], "bfloat16") for name in names)], axis=1)
    every = layers.Reshape((len(rows) + 1, DIM))(every)
    dots = ops.matmul(every, ops.transpose(every, (0, 2, 1)))
    below = np.flatnonzero(np.tril(np.ones((len(rows) + 1, len(rows) + 1)), -1)).astype("int32")
    x = ops.concatenate([bottom, ops.take(layers.Reshape((-1,))(dots), below, axis=1)], axis=1)
    for width in TOP[:-1]:
        x = layers.Dense(width, activation="relu")(x)
    model = keras.Model({"numbers": numbers, "ids": ids}, layers.Dense(TOP[-1], dtype="float32")(x))
    model.compile(keras.optimizers.SGD(LR), keras.losses.BinaryCrossentropy(from_logits=True))
    vk.follow_optimizer(model)
    return model


def main() -> None:
    assert torch.cuda.is_available(), "needs a GPU"
    rows = [min(one, CAP) for one in CRITEO]
    schema = schema_of(rows, [1] * len(rows))
    batches = [draw(schema, [1] * len(rows), BATCH, EXPONENT, seed) for seed in range(NUM_BATCHES)]
    own = {}
    for graph in (True, False):
        model = dlrm(schema, graph)
        train = model.trainer.train_step
        own[graph] = float(np.median(time_ms(lambda i, train=train: train(batches[i % NUM_BATCHES]))))
        del model, train
        torch.cuda.empty_cache()
    given = [({"numbers": one.dense, "ids": one.one_hot.to(torch.int32)}, one.labels) for one in batches]
    model = keras_dlrm(rows)
    trainer = vk.FastTrainer(model)
    forms = {"layer form": model.train_on_batch, "fast form": trainer.step}
    shape = {"batch": BATCH, "rows": sum(rows), "dim": DIM}
    for form, step in forms.items():
        times = time_ms(lambda i, step=step: step(*given[i % NUM_BATCHES]))
        for graph, name in ((True, "in a CUDA graph"), (False, "from Python")):
            record(
                bench="keras_gpu", case=f"one-hot DLRM, SGD, bf16, {form}", metric=f"step, beside Viviane's {name}",
                value=float(np.median(times)), unit="ms", better="lower", goal=1.5 * own[graph],
                peer=f"viviane.Model {name}", peer_value=own[graph], shape=shape,
            )  # fmt: skip


if __name__ == "__main__":
    main()
