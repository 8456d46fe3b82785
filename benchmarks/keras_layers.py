"""Viviane's Keras layers against the stock layer and keras-rs: time of a whole step, and what the layer itself adds.

Run once for each backend: KERAS_BACKEND=torch, jax or tensorflow.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import NamedTuple

import keras
import numpy as np

import viviane.keras as vk
from record import record
from viviane.config import SGD
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, UniformInit

BACKEND = keras.backend.backend()
GOAL = {"torch": 20.0, "jax": 80.0, "tensorflow": 400.0}
FAST_GOAL = 30.0
FEATURES, SIZE, DIM = 26, 2048, 16
STEP_GOAL = {("tensorflow", "stock"): 10.0, ("jax", "keras-rs"): 2.0, ("torch", "keras-rs"): 100.0}


def model_of(kind: str, rows: int, dim: int, features: int) -> keras.Model:
    """A sum of all vectors and a dense layer: nearly all of the step is the embedding."""
    ids = keras.Input((features,), dtype="int32")
    rule = keras.optimizers.SGD(0.01)
    if kind == "viviane":
        tables = [TableConfig(name=f"t{i}", num_rows=rows, dim=dim, init=UniformInit()) for i in range(features)]
        own = [FeatureConfig(name=f"f{i}", table=f"t{i}") for i in range(features)]
        layer = vk.DistributedEmbedding(own, tables=tables, optimizer=rule)
        found = layer([ids[:, i] for i in range(features)])
        parts = [found[one.name] for one in own]
    elif kind == "keras-rs":
        import keras_rs

        configs = []
        for i in range(features):
            table = keras_rs.layers.TableConfig(
                f"t{i}", rows, dim, initializer="uniform", optimizer=rule, combiner="sum"
            )
            configs.append(keras_rs.layers.FeatureConfig(f"f{i}", table, (None, 1), (None, dim)))
        parts = keras_rs.layers.DistributedEmbedding(configs)([ids[:, i : i + 1] for i in range(features)])
    else:
        parts = [keras.layers.Embedding(rows, dim)(ids[:, i]) for i in range(features)]
    out = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(parts))
    model = keras.Model(ids, out)
    model.compile(rule, "binary_crossentropy")
    return model


class Result(NamedTuple):
    """Times of a step in milliseconds."""

    median: float
    spread: tuple[float, float]
    cpu: float


class Steps:
    """Steps of a model on one batch, and their times."""

    def __init__(self, model: keras.Model, x: np.ndarray, y: np.ndarray, fast: bool) -> None:
        self._step = vk.FastTrainer(model).step if fast else model.train_on_batch
        self._data, self.times, self.cpu_times = (x, y), [], []

    def run(self, count: int, keeps: bool = True) -> None:
        """Make some steps, and keep their times in milliseconds."""
        for _ in range(count):
            start, busy = time.perf_counter(), time.process_time()
            self._step(*self._data)
            if keeps:
                self.times.append((time.perf_counter() - start) * 1e3)
                self.cpu_times.append((time.process_time() - busy) * 1e3)

    @property
    def result(self) -> Result:
        """The median time, the 20th and 80th percentile, and the median of the processor's time."""
        median = statistics.median(self.times)
        cut = statistics.quantiles(self.times, n=5) if len(self.times) > 2 else [median] * 4
        return Result(median, (cut[0], cut[3]), statistics.median(self.cpu_times))


def whole_steps(kinds: list[str], rows: int, rounds: int) -> dict[str, Result]:
    """Time steps of ours and of one peer at a time in turns, so that both meet what else the machine does."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, rows, (SIZE, FEATURES)).astype(np.int32)
    y = generator.integers(0, 2, (SIZE, 1)).astype(np.float32)

    def steps_of(kind: str) -> Steps:
        model = model_of("viviane" if kind == "fast" else kind, rows, DIM, FEATURES)
        steps = Steps(model, x, y, kind == "fast")
        steps.run(3, keeps=False)
        return steps

    own = {kind: steps_of(kind) for kind in kinds if kind in ("viviane", "fast")}
    found = {}
    for peer in [kind for kind in kinds if kind not in own] or [None]:
        other = None if peer is None else steps_of(peer)
        for _ in range(rounds):
            if other is not None:
                other.run(1)
            for steps in own.values():
                steps.run(5)
        if other is not None:
            found[peer] = other.result
        del other
        gc.collect()
    return {**{kind: steps.result for kind, steps in own.items()}, **found}


def own_us(rows: int, repeat: int, between=lambda: None) -> float:
    """Time that Viviane's own lookup and update take for one key, outside of any framework.

    Args:
        between: runs before each lookup, outside of the time, and leaves the processor's caches as a step does.
    """
    import torch

    table = [TableConfig(name="t", num_rows=rows, dim=16)]
    own = EmbeddingCollection(table, [FeatureConfig(name="f", table="t")], SGD())
    keys, gradient = {"f": torch.zeros(1, dtype=torch.int32)}, torch.ones(1, 16)
    times = []
    for _ in range(repeat):
        between()
        start = time.perf_counter()
        own(keys).flat.backward(gradient)
        own.step(0.1)
        times.append((time.perf_counter() - start) * 1e6)
    return min(times)


def layer_us(rows: int, repeat: int) -> tuple[float, float]:
    """Times of one key through the layer and back, in the framework's own terms, and of the same with no lookup."""
    layer = vk.Embedding(rows, 16, optimizer=keras.optimizers.SGD(0.1))
    layer.build()
    keys = keras.ops.convert_to_tensor(np.zeros((1,), np.int32))
    with_it, without = _functions(layer)
    found = []
    for call in (with_it, without):
        for _ in range(20):
            call(keys)
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call(keys)
            times.append((time.perf_counter() - start) * 1e6)
        found.append(min(times))
    return found[0], found[1]


def fast_us(rows: int, repeat: int) -> tuple[float, float]:
    """Times for one key: of the fast form outside of its compiled step, and of the tables alone between such steps."""
    keys, label = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)
    ids, rule = keras.Input((1,), dtype="int32"), keras.optimizers.SGD(0.1)
    found = keras.layers.Flatten()(vk.Embedding(rows, 16, optimizer=rule)(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(found))
    model.compile(rule, "mse")
    trainer = vk.FastTrainer(model)
    trainer.step(keys, label)
    inner, times, inside = trainer._steps.train, [], []
    last = []

    def timed(*given):
        last[:] = given
        start = time.perf_counter()
        found = inner(*given)
        inside.append((time.perf_counter() - start) * 1e6)
        return found

    trainer._steps.train = timed
    for _ in range(repeat):
        start = time.perf_counter()
        trainer.step(keys, label)
        times.append((time.perf_counter() - start) * 1e6)
    least = min(whole - part for whole, part in zip(times, inside, strict=True))
    return least, own_us(rows, repeat, between=lambda: inner(*last))


def _functions(layer):
    if BACKEND == "torch":
        import torch

        def with_it(keys):
            layer.look_up(keys.view(-1, 1), None, True).backward(torch.ones(1, 16))

        leaf = torch.zeros(1, 16, requires_grad=True)

        def without(keys):
            (leaf * 1.0).backward(torch.ones(1, 16))

        return with_it, without
    if BACKEND == "jax":
        import jax

        mapping = [layer.anchor, layer.learning_rate]

        def loss(anchor, keys):
            with keras.StatelessScope(state_mapping=[(mapping[0], anchor), (mapping[1], jax.numpy.float32(0.1))]):
                return layer.look_up(keys.reshape(-1, 1), None, True).sum()

        both = jax.jit(jax.grad(loss))
        plain = jax.jit(jax.grad(lambda anchor, keys: anchor * keys.sum().astype("float32")))
        anchor = jax.numpy.zeros(())
        return lambda keys: both(anchor, keys).block_until_ready(), lambda keys: plain(anchor, keys).block_until_ready()
    import tensorflow as tf

    leaf = tf.Variable(0.0)

    @tf.function
    def with_it(keys):
        with tf.GradientTape() as tape:
            out = tf.reduce_sum(layer.look_up(tf.reshape(keys, (-1, 1)), None, True))
        return tape.gradient(out, layer.anchor.value)

    @tf.function
    def without(keys):
        with tf.GradientTape() as tape:
            out = leaf * tf.cast(tf.reduce_sum(keys), tf.float32)
        return tape.gradient(out, leaf)

    return with_it, without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small tables, few steps")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--kinds", default="viviane,fast,stock,keras-rs", help="of whole steps, by comma; '' for none")
    options = parser.parse_args()
    rows, rounds = (1_000, 1) if options.small else (options.rows, 7)
    total, base = layer_us(1000, 20 if options.small else 300)
    tables = own_us(1000, 20 if options.small else 300)
    record(
        bench="keras_layers", case=f"{BACKEND}, layer form, one key", metric="overhead of a lookup and its update",
        value=max(0.0, total - base - tables), unit="us", better="lower", goal=GOAL[BACKEND],
        shape={"rows": 1000, "dim": 16},
    )  # fmt: skip
    fast, between = fast_us(1000, 20 if options.small else 300)
    for what, own in (("", tables), (", tables timed between steps", between)):
        record(
            bench="keras_layers", case=f"{BACKEND}, fast form, one key{what}",
            metric="overhead of a lookup and its update", value=max(0.0, fast - own), unit="us", better="lower",
            goal=FAST_GOAL, shape={"rows": 1000, "dim": 16},
        )  # fmt: skip
    found = whole_steps([kind for kind in options.kinds.split(",") if kind], rows, rounds)
    print(found, flush=True)
    shape = {"tables": FEATURES, "rows": rows, "dim": DIM, "batch": SIZE}
    for form, name in (("viviane", "layer form"), ("fast", "fast form")):
        for peer, title in (("stock", f"Keras {keras.__version__}"), ("keras-rs", "keras-rs 0.4.0")):
            if form in found and peer in found:
                ours, own = found[form].median, found[peer].median
                case = f"{BACKEND}, {name}, SGD" + (", stock layer" if peer == "stock" else "")
                record(
                    bench="keras_layers", case=case, metric="step", value=ours, unit="ms", better="lower", peer=title,
                    peer_value=own, spread=found[form].spread, shape=shape,
                )  # fmt: skip
                record(
                    bench="keras_layers", case=case, metric=f"step, times as fast as {title}", value=own / ours,
                    unit="x", better="higher", goal=STEP_GOAL.get((BACKEND, peer)), shape=shape,
                )  # fmt: skip
                # It depends less on what else the machine does, which long steps never escape and short ones do.
                record(
                    bench="keras_layers", case=case, metric="processor time of a step, median", value=found[form].cpu,
                    unit="ms", better="lower", peer=title, peer_value=found[peer].cpu, shape=shape,
                )  # fmt: skip


if __name__ == "__main__":
    main()
