"""AUC of a DeepFM and a DLRM in Keras, with `viviane.keras` layers, beside Viviane's own models trained alike.

    KERAS_BACKEND=torch python benchmarks/keras_auc.py [--only dlrm] [--seeds 1] [--folds 5] [--keep FOLDER]

Both programs read the same files of the ETL, five folds of criteo_tb_80k, with the same widths, dropout, decay, rates
and epochs, and draw first weights by the same laws; the values and the order of rows are each program's own. On the
first fold a Keras model is also saved half-way, loaded by another process and trained on there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "quality"))

import keras
import numpy as np
from features import criteo_etl
from keras import layers, ops
from settings import Case, training
from sklearn.metrics import roc_auc_score

import viviane as vv
import viviane.keras as vk
from record import record
from run import prepare, train_once
from viviane.data import Dataset
from viviane.embedding import NormalInit, ZeroInit
from viviane.model.output_bias import base_rates
from viviane.schema import Schema

DIM, HIDDEN, BOTTOM, DROPOUT, SPREAD = 16, (128, 64), 64, 0.5, 0.01
RATE, LINEAR_DECAY, DENSE_DECAY = 0.0029, 5.9e-5, 7e-5
TABLE_DECAY = {"deepfm": 0.0029, "dlrm": 0.0003}  # with DeepFM's, rows of a DLRM that starts at the base rate stay at 0
BATCH, STEPS, EPOCHS = 512, 109, 4
MODELS = {
    "deepfm": {"zoo": "deepfm", "dim": DIM, "deep_mlp": HIDDEN},
    "dlrm": {"zoo": "dlrm", "dim": DIM, "bottom_mlp": [BOTTOM], "top_mlp": HIDDEN},
}
NAMES = {"deepfm": "DeepFM", "dlrm": "DLRM"}
PARTS = ("train", "test")


def case_of(kind: str) -> Case:
    """Viviane's side: a plain recipe, without early stopping and means of weights, which Keras' tables do not have."""
    train = training(
        {**MODELS[kind], "dropout": DROPOUT, "embedding_dropout": DROPOUT}, lr=RATE, table_lr=RATE,
        table_decay=TABLE_DECAY[kind], linear_decay=LINEAR_DECAY if kind == "deepfm" else None, dense_decay=DENSE_DECAY,
        init=SPREAD, batch_size=BATCH, steps=STEPS, epochs=EPOCHS, evaluations=1, decay_power=1.0,
    )  # fmt: skip
    for name in ("restore_best", "eval_every"):
        train["solver"].pop(name)
    return Case("criteo_tb_80k", NAMES[kind], criteo_etl(min_count=50, quantiles=20, text=False), train, folds=5)


# The same in Keras -------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="keras_auc")
class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """An epoch of warm-up, then a line that ends at 0 with the last epoch, as Viviane's solver has it."""

    def __call__(self, step):
        """Return the rate of a step, counted from 0."""
        number = ops.cast(step, "float32") + 1.0
        falling = (1.0 + EPOCHS * STEPS - number) / (EPOCHS * STEPS)
        return RATE * ops.where(number < STEPS, number / STEPS, ops.maximum(falling, 0.0))

    def get_config(self):
        """Return nothing: all is in this file."""
        return {}


def lookup(schema: Schema, ids, dim: int, decay: float, name: str, seed: int):
    """Look all columns up, one table each: (B, S, dim)."""
    init = ZeroInit() if dim == 1 else NormalInit(std=SPREAD)
    tables = [vv.TableConfig(name=f"{name}_{c.name}", num_rows=c.num_ids, dim=dim, init=init) for c in schema.one_hot]
    features = [vv.FeatureConfig(name=c.name, table=f"{name}_{c.name}") for c in schema.one_hot]
    layer = vk.DistributedEmbedding(
        features, tables=tables, optimizer=vv.Adam(weight_decay=decay), seed=seed, name=name
    )  # fmt: skip
    found = layer({c.name: ids[:, i] for i, c in enumerate(schema.one_hot)})
    return ops.stack([found[c.name] for c in schema.one_hot], axis=1)


def dense(width: int, name: str, **options) -> layers.Dense:
    """A dense layer with Viviane's decay and first weights, U(-a, a) with a^2 = 1 / inputs, as torch's layers have.

    An input is called "dense", so that every layer needs a name of its own.
    """
    init = options.pop("kernel_initializer", keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform"))
    return layers.Dense(width, name=name, kernel_initializer=init, kernel_regularizer=decayed(), **options)


def decayed() -> keras.regularizers.Regularizer:
    """L2 whose gradient is DENSE_DECAY w."""
    return keras.regularizers.L2(DENSE_DECAY / 2)


def tower(x, name: str, start: float = 0.0):
    """Hidden layers with dropout, then the logit, whose bias starts at `start`."""
    for place, width in enumerate(HIDDEN):
        x = layers.Dropout(DROPOUT)(dense(width, f"{name}_{place}", activation="relu")(x))
    bias = keras.initializers.Constant(start)
    return dense(1, f"{name}_logit", kernel_initializer="glorot_normal", bias_initializer=bias)(x)


def deepfm(schema: Schema, numbers, ids, seed: int, rate: float):
    """Logits of a DeepFM, (B, 1)."""
    count = schema.num_dense
    first = ops.sum(lookup(schema, ids, 1, LINEAR_DECAY, "first", seed), axis=1)
    vectors = layers.Dropout(DROPOUT)(lookup(schema, ids, DIM, TABLE_DECAY["deepfm"], "vectors", seed + 1))
    small = keras.initializers.RandomUniform(-1 / (count + DIM), 1 / (count + DIM), seed=seed)
    of_numbers = layers.EinsumDense(
        "bn,nd->bnd", (count, DIM), name="dense_vectors", kernel_initializer=small, kernel_regularizer=decayed()
    )(numbers)
    every = ops.concatenate([vectors, of_numbers], axis=1)
    total = ops.sum(every, axis=1)
    pairs = 0.5 * (ops.sum(total * total, axis=1) - ops.sum(every * every, axis=(1, 2)))
    deep = tower(layers.Flatten()(every), "deep")
    return first + ops.expand_dims(pairs, 1) + deep + dense(1, "first_dense", kernel_initializer="zeros")(numbers)


def dlrm(schema: Schema, numbers, ids, seed: int, rate: float):
    """Logits of a DLRM, (B, 1), which starts at the base rate as Viviane's does."""
    bottom = numbers
    for place, width in enumerate((BOTTOM, DIM)):
        bottom = layers.Dropout(DROPOUT)(dense(width, f"bottom_{place}", activation="relu")(bottom))
    vectors = layers.Dropout(DROPOUT)(lookup(schema, ids, DIM, TABLE_DECAY["dlrm"], "vectors", seed))
    every = ops.concatenate([ops.expand_dims(bottom, 1), vectors], axis=1)
    dots = ops.matmul(every, ops.transpose(every, (0, 2, 1)))
    size = len(schema.one_hot) + 1
    below = np.flatnonzero(np.tril(np.ones((size, size)), -1)).astype("int32")
    pairs = ops.take(layers.Flatten()(dots), below, axis=1)
    return tower(ops.concatenate([bottom, pairs], axis=1), "top", start=math.log(rate / (1 - rate)))


def build(kind: str, data: Dataset, seed: int) -> keras.Model:
    """A compiled model over {"dense", "ids"}."""
    schema = data.schema
    keras.utils.set_random_seed(seed)
    numbers = keras.Input((schema.num_dense,), name="dense")
    ids = keras.Input((len(schema.one_hot),), dtype="int32", name="ids")
    make = {"deepfm": deepfm, "dlrm": dlrm}[kind]
    rate = base_rates(data, vv.Solver(seed=seed))[schema.labels[0].name]
    model = keras.Model({"dense": numbers, "ids": ids}, make(schema, numbers, ids, seed, rate))
    model.compile(keras.optimizers.Adam(Rate()), keras.losses.BinaryCrossentropy(from_logits=True))
    vk.follow_optimizer(model)
    return model


def train(model: keras.Model, data: Path, seed: int, epochs: range) -> None:
    feed = vk.batches(Dataset(data / "train"), BATCH, columns="matrices", seed=seed, first_epoch=epochs.start)
    model.fit(feed, epochs=epochs.stop, initial_epoch=epochs.start, verbose=0, shuffle=False)


def logits(model: keras.Model, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels of the test part."""
    feed = vk.batches(Dataset(data / "test"), 4096, columns="matrices", shuffle=False)
    pairs = [(model.predict_on_batch(x), y) for x, y, *_ in (feed[i] for i in range(len(feed)))]
    return np.concatenate([one for one, _ in pairs]), np.concatenate([one for _, one in pairs])


def auc(model: keras.Model, data: Path) -> float:
    found, labels = logits(model, data)
    return float(roc_auc_score(labels.ravel(), found.ravel()))


# Saved, loaded elsewhere, trained on -------------------------------------------------------------------------


def go_on(file: Path, data: Path, seed: int) -> None:
    """Load a model that was saved half-way, and train it to the end; prints figures for the process that asked."""
    model = keras.saving.load_model(file)
    vk.follow_optimizer(model)
    before = float(np.abs(logits(model, data)[0] - np.load(file.with_suffix(".npy"))).max())
    train(model, data, seed, range(EPOCHS // 2, EPOCHS))
    print("RESUMED", json.dumps([before, auc(model, data)]))


def resumed(kind: str, data: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Return the greatest change of a logit by saving and loading, and the AUC in the end."""
    model = build(kind, Dataset(data / "train"), seed)
    train(model, data, seed, range(EPOCHS // 2))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}.keras"
    model.save(file)
    np.save(file.with_suffix(".npy"), logits(model, data)[0])
    command = [sys.executable, __file__, "--go-on", str(file), str(data), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy(), check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    before, found = json.loads(done.stdout.split("RESUMED", 1)[1])
    return before, found


def measure(kind: str, options: argparse.Namespace, folder: Path) -> None:
    backend, case = keras.backend.backend(), case_of(kind)
    data = [prepare(case, fold, folder) for fold in range(options.folds)]
    own, found = [], []
    for seed in range(1, options.seeds + 1):
        for fold, place in enumerate(data):
            run_folder = folder / "runs" / f"{kind}-{seed}-{fold}"
            own.append(train_once(case, place, seed, run_folder, "cpu")["auc"])
            model = build(kind, Dataset(place / "train"), seed)
            train(model, place, seed, range(EPOCHS))
            found.append(auc(model, place))
            print(f"{kind}, seed {seed}, fold {fold}: Keras {found[-1]:.4f}, Viviane {own[-1]:.4f}", flush=True)
            if (seed, fold) == (1, 0):
                change, again = resumed(kind, place, seed, folder / "saved" / backend)
                whole = found[-1]
    figure = {"bench": "keras_auc", "case": f"criteo_tb_80k, {NAMES[kind]}, Keras on {backend}", "unit": "",
              "shape": {"seeds": options.seeds, "folds": options.folds, "epochs": EPOCHS}}  # fmt: skip
    peer = {"peer": "Viviane's own model", "peer_value": statistics.mean(own)}
    record(**figure, metric="test AUC", better="higher", value=statistics.mean(found), goal=peer["peer_value"] - 0.002,
           spread=(min(found), max(found)), **peer)  # fmt: skip
    record(**figure, metric="test AUC of the first fold, saved half-way and gone on with in another process",
           better="higher", value=again, peer="in one process", peer_value=whole)  # fmt: skip
    record(**figure, metric="greatest change of a logit by saving and loading", better="lower", value=change, goal=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="deepfm,dlrm", help="models, by comma")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="the first fold alone; nothing is recorded")
    parser.add_argument("--keep", type=Path, help="work in this folder, and keep what is trained for a later call")
    parser.add_argument("--go-on", nargs=3, metavar=("FILE", "DATA", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.go_on:
        file, data, seed = options.go_on
        go_on(Path(file), Path(data), int(seed))
        return
    if options.small:
        options.folds = options.seeds = 1
    with tempfile.TemporaryDirectory(prefix="keras-auc-") as temporary:
        for kind in options.only.split(","):
            measure(kind, options, options.keep or Path(temporary))


if __name__ == "__main__":
    main()
