"""What the layers have to do, on the backend that KERAS_BACKEND names: one process runs all and prints JSON.

Each function returns plain data, which the tests judge; an exception becomes {"error": ...}.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path

import keras
import numpy as np
from fit_options import fit_options, fit_refusals
from key_values import mixed_types, refused_in_training, refused_keys, taken_keys, wide_keys
from networks import (
    BACKEND,
    DIM,
    KEYS,
    LABELS,
    SIZE,
    STEPS,
    TWICE,
    VOCABULARY,
    Losses,
    difference,
    network,
    trained,
)  # fmt: skip
from pitfalls import (
    computed_keys,
    crafted_files,
    early_stopping,
    fast_metrics,
    keys_and_rows,
    outside_of_training,
    partly_lost,
    persistent_tape,
    rate_after_loading,
    several_devices,
    ways_to_run,
    weights_in_memory,
)  # fmt: skip
from trials import (
    batches_of_torch,
    files_of_weights,
    options_of_the_stock_layer,
    rank_of_keys,
    sequential,
    stock_copies,
    subclassed,
    uneven_rows,
    unused_output,
    ways_through_graphs,
    weighted_bag,
)  # fmt: skip

import viviane.keras as vk
from viviane.config import SGD
from viviane.config import AdaGrad as OwnAdaGrad
from viviane.embedding import DynamicTableConfig, FeatureConfig, TableConfig


def sgd():
    return difference(lambda: keras.optimizers.SGD(0.1), STEPS)


def sgd_twice():
    return difference(lambda: keras.optimizers.SGD(0.1), keys=TWICE)


def adagrad():
    return difference(lambda: keras.optimizers.Adagrad(0.1), STEPS)


def adam():
    return difference(keras.optimizers.Adam, STEPS)


def momentum():
    return difference(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


def rmsprop():
    return difference(lambda: keras.optimizers.RMSprop(0.01))


def adamax():
    return difference(lambda: keras.optimizers.Adamax(0.01))


def adadelta():
    return difference(lambda: keras.optimizers.Adadelta(1.0))


def shared():
    return difference(lambda: keras.optimizers.SGD(0.1), shared=True)


def schedule():
    return difference(lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)))


def rate_callback():
    """A callback sets the rate of the model's optimizer between epochs."""
    found = {}
    for kind in ("stock", "own"):
        optimizer = keras.optimizers.SGD(0.1)
        model, layer = network(kind, optimizer)
        model.compile(optimizer, "mse")
        before = model.get_weights()
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 * 0.5**epoch)
        model.fit(KEYS, LABELS, batch_size=SIZE, shuffle=False, verbose=0, epochs=3, callbacks=[halve])
        found[kind] = layer
    apart = np.abs(found["own"].get_weights()[0] - found["stock"].get_weights()[0]).max()
    model.set_weights(before)  # as callbacks do that restore the best weights; the optimizer's rate stays
    _, layer = network("own", SGD(lr=0.1))
    layer.learning_rate.assign(np.float32(0.5))
    rates = [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in (found["own"], layer)]
    return {"rows": float(apart), "rate": rates[0], "own_rate": rates[1]}


def ftrl():
    """Each key is once in each batch: Keras' dense gradient of the others would set their rows to zero."""
    found = []
    for kind in ("stock", "own"):
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.3)
        options = {"optimizer": optimizer} if kind == "own" else {}
        layer = {"stock": keras.layers.Embedding, "own": vk.Embedding}[kind](4, DIM, **options)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layer, keras.layers.Flatten()])
        model.compile(optimizer, "mse")
        found.append((model, layer))
    found[1][1].set_weights(found[0][1].get_weights())
    for model, _ in found:
        model.fit(np.tile(np.arange(4), (5, 1)), np.ones((5, 4 * DIM)), batch_size=1, shuffle=False, verbose=0)
    return {"rows": float(np.abs(found[0][1].get_weights()[0] - found[1][1].get_weights()[0]).max())}


def epochs():
    """Several epochs, and single batches, with nothing that sets the rate."""
    optimizer = keras.optimizers.SGD(0.1)
    model, layer = network("own", optimizer)
    model.compile(optimizer, "mse")
    rows = 2 * SIZE
    model.fit(KEYS[:rows], LABELS[:rows], batch_size=SIZE, epochs=3, verbose=0)
    for _ in range(3):
        model.train_on_batch(KEYS[:SIZE], LABELS[:SIZE])
    vk.fit(model, KEYS[:rows], LABELS[:rows], batch_size=SIZE, epochs=2, verbose=0)
    return {"updates": layer.num_updates, "rate": float(keras.ops.convert_to_numpy(layer.learning_rate))}


def lost_update():
    """The output of the layer is cut off from the loss."""
    keys = keras.Input((3,), dtype="int32")
    layer = vk.Embedding(VOCABULARY, DIM, optimizer="sgd")
    found = keras.layers.Flatten()(keras.layers.Lambda(keras.ops.stop_gradient, (3, DIM))(layer(keys)))
    model = keras.Model(keys, keras.layers.Dense(1)(found))
    model.compile("sgd", "mse")
    before = layer.get_weights()[0]
    try:
        model.fit(KEYS, LABELS, batch_size=SIZE, verbose=0)
        model.evaluate(KEYS, LABELS, verbose=0)
    except Exception as error:  # frameworks wrap it
        return {"raised": str(error), "updates": layer.num_updates}
    return {"raised": "", "updates": layer.num_updates, "moved": bool((before != layer.get_weights()[0]).any())}


def undifferentiated():
    """A lookup in training without any gradient."""
    layer = vk.Embedding(VOCABULARY, DIM, optimizer="sgd")
    keys = keras.ops.convert_to_tensor(KEYS[:4])
    try:
        if BACKEND == "torch":
            import torch

            with torch.no_grad():
                layer(keys, training=True)
        elif BACKEND == "jax":
            import jax

            jax.block_until_ready(layer(keys, training=True))
        else:
            for _ in range(70):
                layer(keys, training=True)
    except Exception as error:
        return {"raised": str(error)}
    return {"raised": ""}


def evaluation():
    model, layer, _ = trained("own", lambda: keras.optimizers.SGD(0.1), steps=2)
    before, count = layer.get_weights()[0], layer.num_updates
    model.evaluate(KEYS, LABELS, verbose=0)
    model.predict(KEYS[:7], verbose=0)
    return {"same": bool((before == layer.get_weights()[0]).all()), "updates": layer.num_updates - count}


def frozen():
    optimizer = keras.optimizers.SGD(0.1)
    model, layer = network("own", optimizer)
    layer.trainable = False
    model.compile(optimizer, "mse")
    before = layer.get_weights()[0]
    model.fit(KEYS, LABELS, batch_size=SIZE, verbose=0)
    return {"same": bool((before == layer.get_weights()[0]).all()), "updates": layer.num_updates}


def saving():
    """20 steps at once, and 10, saved, loaded, 10 more."""
    make = lambda: keras.optimizers.Adagrad(0.1)  # noqa: E731
    whole, layer, _ = trained("own", make, steps=20)
    part, _, _ = trained("own", make, steps=10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        part.save(path)
        loaded = keras.saving.load_model(path)
    again = next(one for one in loaded.layers if isinstance(one, vk.Embedding))
    rows = slice(10 * SIZE, 20 * SIZE)
    loaded.fit(KEYS[rows], LABELS[rows], batch_size=SIZE, shuffle=False, verbose=0)
    predicted = [one.predict(KEYS[:20], verbose=0) for one in (whole, loaded)]
    return {
        "rows": bool((again.get_weights()[0] == layer.get_weights()[0]).all()),
        "predictions": float(np.abs(predicted[0] - predicted[1]).max()),
        "params": layer.count_params(),
    }


def summary():
    model, _ = network("own", keras.optimizers.SGD(0.1))
    lines = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    return {"text": "\n".join(lines)}


def sixteen_bits():
    model, layer, losses = trained("own", lambda: keras.optimizers.SGD(0.1), steps=5, row_dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
    again = next(one for one in loaded.layers if isinstance(one, vk.Embedding))
    return {
        "finite": bool(np.isfinite(losses).all()),
        "same": bool((again.get_weights()[0] == layer.get_weights()[0]).all()),
        "type": str(layer.collection.table_rows(layer.name).dtype),
    }


def mixed():
    """Under mixed_float16 the loss is scaled by 2^15; rows must move as the stock layer's do."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        out = {}
        make = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
        _, stock, wanted = trained("stock", make, steps=20)
        for form in ("layer", "fast"):
            model, own, losses = trained("own", make, form=form, steps=20)
            out[form] = {
                "rows": float(np.abs(own.get_weights()[0] - stock.get_weights()[0]).max()),
                "loss": float(np.abs(losses - wanted).max()),
                "updates": own.num_updates,
            }
            if form == "layer":  # the loss scale of its last step stayed in the model, and raised here
                vk.fit(model, KEYS[:32], LABELS[:32], epochs=1, verbose=0)
        return out
    finally:
        keras.config.set_dtype_policy("float32")


def dynamic():
    """Keys of 64 bits in a table that grows."""
    large = KEYS.astype("int64") * 10_000_000_019 - 5
    keys = keras.Input((3,), dtype="int64")
    layer = vk.Embedding(None, DIM, embeddings_initializer="zeros", optimizer=OwnAdaGrad(lr=0.1))
    model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(layer(keys))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = 5 * SIZE
    refused = ""
    if BACKEND == "jax":
        try:
            model.fit(large[:rows], LABELS[:rows], batch_size=SIZE, verbose=0)
        except Exception as error:
            refused = str(error)
        vk.fit(model, large[:rows], LABELS[:rows], batch_size=SIZE, verbose=0)
    else:
        model.fit(large[:rows], LABELS[:rows], batch_size=SIZE, verbose=0)
    table = layer.collection.dynamic_table(layer.name)
    known = sorted(table.export().keys.tolist())
    return {"same_keys": known == sorted(set(large[:rows].ravel().tolist())), "refused": refused,
            "updates": layer.num_updates}  # fmt: skip


def bags():
    """Pooling against the stock layer's rows, pooled by hand."""
    keys, weights = TWICE[:6], np.abs(LABELS[:18].reshape(6, 3))
    out = {}
    for combiner in ("sum", "mean", "sqrtn"):
        layer = vk.EmbeddingBag(20, DIM, combiner=combiner, padding_key=0, optimizer="sgd")
        for name, own in (("plain", None), ("weighted", weights)):
            given = (keys,) if own is None else (keys, keras.ops.convert_to_tensor(own))
            found = keras.ops.convert_to_numpy(layer(*given))
            rows, scale = layer.get_weights()[0], (np.ones((6, 3)) if own is None else own) * (keys != 0)
            wanted = (rows[keys] * scale[..., None]).sum(1)
            divisor = {"sum": 1.0, "mean": scale.sum(1), "sqrtn": np.sqrt((scale**2).sum(1))}[combiner]
            wanted = wanted / np.where(divisor == 0, 1.0, divisor).reshape(-1, 1) if combiner != "sum" else wanted
            out[f"{combiner} {name}"] = float(np.abs(found - wanted).max())
    return out


def keras_rs_configs():
    """The same configurations in keras-rs's layer and in ours: outputs, and rows after training."""
    import keras_rs

    def layer_of(kind):
        init = keras.initializers.RandomUniform(seed=5)
        table = keras_rs.layers.TableConfig("item", 30, 4, initializer=init, optimizer=keras.optimizers.SGD(0.1),
                                            combiner="sum")  # fmt: skip
        configs = {
            "one": keras_rs.layers.FeatureConfig("one", table, (None, 1), (None, 4)),
            "many": keras_rs.layers.FeatureConfig("many", table, (None, 3), (None, 4)),
        }
        return (keras_rs.layers.DistributedEmbedding if kind == "stock" else vk.DistributedEmbedding)(configs)

    keys = {"one": TWICE[:, :1], "many": TWICE}
    losses = {}
    for form in ("stock", "layer", "fast"):
        inputs = {name: keras.Input((part.shape[1],), dtype="int32", name=name) for name, part in keys.items()}
        found = layer_of(form)(inputs)
        out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))(
            keras.layers.Concatenate()([found["one"], found["many"]])
        )
        model = keras.Model(inputs, out)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        seen = Losses()
        options = {"batch_size": 80, "shuffle": False, "verbose": 0, "callbacks": [seen]}
        vk.fit(model, keys, LABELS, **options) if form == "fast" else model.fit(keys, LABELS, **options)
        losses[form] = np.array(seen.values)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
    again = np.abs(loaded.predict(keys, verbose=0) - model.predict(keys, verbose=0)).max()
    return {
        "layer": float(np.abs(losses["layer"] - losses["stock"]).max()),
        "fast": float(np.abs(losses["fast"] - losses["stock"]).max()),
        "loaded": float(again),
    }


def own_configs():
    tables = [TableConfig(name="user", num_rows=30, dim=2), DynamicTableConfig(name="item", dim=3)]
    features = [FeatureConfig(name="u", table="user"), FeatureConfig(name="i", table="item", combiner="mean")]
    kind = "int32"
    layer = vk.DistributedEmbedding(
        features, tables=tables, lengths={"i": 3}, optimizer=SGD(lr=0.1), key_dtype=kind, name="tables"
    )
    inputs = {"u": keras.Input((), dtype="int32", name="u"), "i": keras.Input((3,), dtype="int32", name="i")}
    found = layer(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([found["u"], found["i"]])))
    model.compile("sgd", "mse")
    model.fit({"u": TWICE[:, 0], "i": TWICE}, LABELS, batch_size=80, verbose=0)
    return {"keys": len(layer.collection.dynamic_table("item")), "updates": layer.num_updates}


def out_of_range():
    model, *_ = trained("own", lambda: keras.optimizers.SGD(0.1), steps=1)
    try:
        model.predict(np.full((2, 3), VOCABULARY, "int32"), verbose=0)
    except Exception as error:
        return {"raised": str(error)}
    return {"raised": ""}


def regularizer():
    """L2 adds 2 l2 w to the gradient of touched rows."""
    layer = vk.Embedding(5, 1, embeddings_initializer="ones", optimizer=keras.optimizers.SGD(0.5),
                         embeddings_regularizer=keras.regularizers.L2(0.25))  # fmt: skip
    keys = keras.Input((1,), dtype="int32")
    model = keras.Model(keys, keras.layers.Flatten()(layer(keys)))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(np.array([[2]]), np.array([[1.0]]), verbose=0)  # the loss is 0: only the regularizer moves the row
    return {"rows": layer.get_weights()[0].ravel().tolist()}


def rate_of_the_model():
    """Layers without a rate take that of the model's optimizer, and keep the rest of what they were given."""
    out = {}
    for name, given in (("regularizer", None), ("settings", SGD(weight_decay=0.5))):
        l2 = keras.regularizers.L2(0.25) if given is None else None
        layer = vk.Embedding(5, 1, embeddings_initializer="ones", optimizer=given, embeddings_regularizer=l2)
        keys = keras.Input((1,), dtype="int32")
        model = keras.Model(keys, keras.layers.Flatten()(layer(keys)))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        vk.follow_optimizer(model)
        model.fit(np.array([[2]]), np.array([[1.0]]), verbose=0)
        out[name] = layer.get_weights()[0].ravel().tolist()
    return out


def fit_again():
    """The step of `vk.fit` is traced once for a model, and again when it is compiled."""
    traced = []

    def loss(wanted, found):
        traced.append(1)
        return keras.ops.mean(keras.ops.square(wanted - found))

    out = []
    for calls, epochs in ((1, 2), (2, 1)):
        model, layer = network("own", optimizer := keras.optimizers.SGD(0.1))
        model.compile(optimizer, loss, jit_compile=BACKEND != "torch")
        counts = []
        for _ in range(calls):
            vk.fit(model, KEYS[:64], LABELS[:64], batch_size=16, epochs=epochs, shuffle=False, verbose=0)
            counts.append(len(traced))
        out.append(layer.get_weights()[0])
    model.compile(optimizer, loss, jit_compile=BACKEND != "torch")
    vk.fit(model, KEYS[:64], LABELS[:64], batch_size=16, verbose=0)
    return {"new": counts[1] - counts[0], "compiled": len(traced) - counts[1], "same": bool((out[0] == out[1]).all())}


def jit():
    """jit_compile=True."""
    if BACKEND == "torch":
        return {}
    out = {}
    try:
        _, layer, _ = trained("own", lambda: keras.optimizers.SGD(0.1), steps=2, jit=True)
        out["layer"] = layer.num_updates
    except Exception as error:
        out["refused"] = str(error)
    _, layer, _ = trained("own", lambda: keras.optimizers.SGD(0.1), steps=2, jit=True, form="fast")
    out["fast"] = layer.num_updates
    return out


def unaligned():
    """Memory that is not aligned to 64 bytes crosses as a copy; TensorFlow would end the process."""
    import torch

    if BACKEND != "tensorflow":
        return {}
    from viviane.keras.backends.tensorflow_backend import to_tensorflow

    whole = torch.arange(101.0)
    crossed = [to_tensorflow(whole[start:]) for start in range(17)]
    return {"same": all(float(one[1:].numpy().sum()) == float(whole[i + 1 :].sum()) for i, one in enumerate(crossed))}


def dataset():
    """Viviane's data set as input of fit."""
    from viviane.data import Dataset
    from viviane.data.synthetic import SyntheticConfig, generate

    with tempfile.TemporaryDirectory() as folder:
        generate(SyntheticConfig(rows=600, num_dense=2, cardinalities=(40, 40, 40)), Path(folder) / "data")
        feed = vk.batches(Dataset(Path(folder) / "data"), 100, columns="matrices")
        dense, ids = keras.Input((2,), name="dense"), keras.Input((3,), dtype="int32", name="ids")
        rows = vk.Embedding(100, DIM, optimizer=keras.optimizers.SGD(0.1))(ids)
        out = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([keras.layers.Flatten()(rows), dense]))
        model = keras.Model({"dense": dense, "ids": ids}, out)
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        history = model.fit(feed, epochs=2, verbose=0, shuffle=False)
        fast = vk.fit(model, feed, epochs=1, verbose=0)
    return {"losses": [float(v) for v in history.history["loss"]], "fast": [float(v) for v in fast.history["loss"]]}


def strings():
    if BACKEND != "tensorflow":
        return {}
    words = np.array([["red"], ["green"], ["blue"], ["red"]], dtype=object)
    look = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
    import tensorflow as tf

    given = keras.Input((1,), dtype="string")
    layer = vk.Embedding(4, DIM, optimizer="sgd")
    model = keras.Model(given, keras.layers.Dense(1)(keras.layers.Flatten()(layer(look(given)))))
    model.compile("sgd", "mse")
    model.fit(tf.constant(words.astype(str)), np.ones((4, 1)), verbose=0)
    return {"updates": layer.num_updates}


SCENARIOS = [
    sgd, ftrl, sgd_twice,
    adagrad, adam, momentum, rmsprop, adamax, adadelta, shared, schedule, rate_callback, epochs,
    lost_update, undifferentiated,
    evaluation, frozen, saving, summary, sixteen_bits, mixed, dynamic, bags, keras_rs_configs, own_configs,
    out_of_range, regularizer, rate_of_the_model, fit_again, jit, unaligned, dataset, strings, partly_lost,
    outside_of_training, persistent_tape, crafted_files,
    weights_in_memory, early_stopping, keys_and_rows,
    rate_after_loading, ways_to_run, fast_metrics, computed_keys, wide_keys, refused_keys,
    refused_in_training, taken_keys, mixed_types, fit_options, fit_refusals, several_devices,
    unused_output, files_of_weights, weighted_bag, batches_of_torch, uneven_rows, sequential, subclassed,
    ways_through_graphs, stock_copies,
    options_of_the_stock_layer, rank_of_keys,
]  # fmt: skip


def main(names):
    for scenario in SCENARIOS:
        if names and scenario.__name__ not in names:
            continue
        keras.utils.set_random_seed(0)
        try:
            result = scenario()
        except Exception:
            result = {"error": traceback.format_exc()}
        print("RESULT", json.dumps([scenario.__name__, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
