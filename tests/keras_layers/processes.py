"""Train a DistributedEmbedding over the processes that torchrun started, save its tables, and predict."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

import viviane.keras as vk
from viviane.embedding import FeatureConfig, TableConfig
from viviane.parallel.start import join_processes

folder, target = sys.argv[1:3]
group = join_processes("cpu")
rng = np.random.default_rng(0)
STEPS, SIZE, ROWS = 6, 8, 40
keys, labels = rng.integers(0, ROWS, (STEPS, SIZE, 2)).astype("int32"), rng.normal(size=(STEPS, SIZE, 1))
optimizer = keras.optimizers.Adagrad(0.1)
tables = [TableConfig(name=f"t{i}", num_rows=ROWS, dim=4, init="normal") for i in range(2)]
features = [FeatureConfig(name=f"f{i}", table=f"t{i}") for i in range(2)]
inputs = [keras.Input((), dtype="int32", name=f"f{i}") for i in range(2)]
layer = vk.DistributedEmbedding(features, tables=tables, optimizer=optimizer, name="tables", plan={"t0": "row"})
found = layer({one.name: one for one in inputs})
# The dense layer is frozen: how its gradients are averaged is the framework's matter.
head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=1), trainable=False)
model = keras.Model(inputs, head(keras.layers.Concatenate()([found["f0"], found["f1"]])))
own = slice(group.rank * SIZE // group.size, (group.rank + 1) * SIZE // group.size)
loss = keras.losses.MeanSquaredError()
for step in range(STEPS):
    part, wanted = keys[step, own], torch.tensor(labels[step, own], dtype=torch.float32)
    value = loss(wanted, model([part[:, 0], part[:, 1]], training=True)) / group.size
    value.backward()
vk.save_tables(model, folder)
if group.rank == 0:
    print("updates", layer.num_updates)
vk.load_tables(model, folder)
np.save(f"{target}-{group.rank}.npy", model([keys[0][:, 0], keys[0][:, 1]], training=False).detach().numpy())
