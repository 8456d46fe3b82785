"""Uses that must raise or have the figures of the stock layer: see scenarios.py."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
from networks import BACKEND, DIM, KEYS, LABELS, SIZE, embedding, network, trained

import viviane.keras as vk


def partly_lost():
    """One of two lookups of a layer is cut off from the loss: the other one's update must not wait for ever."""
    keys = keras.Input((3,), dtype="int32")
    layer = embedding("own", keras.optimizers.SGD(0.1))
    cut = keras.layers.Lambda(keras.ops.stop_gradient, (3, DIM))(layer(keras.ops.flip(keys, 1)))
    both = keras.layers.Add()([layer(keys), cut])
    model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(both)))
    model.compile("sgd", "mse")
    try:
        model.fit(KEYS[: 3 * SIZE], LABELS[: 3 * SIZE], batch_size=SIZE, verbose=0)
        model.predict(KEYS[:2], verbose=0)  # JAX tells of errors when a result is read
    except Exception as error:
        return {"raised": str(error)}
    return {"raised": ""}


def outside_of_training():
    """A loop of one's own that forgets training=True."""
    model, _ = network("own", keras.optimizers.SGD(0.1))
    keys, labels, loss_of = KEYS[:SIZE], LABELS[:SIZE], keras.losses.MeanSquaredError()
    try:
        if BACKEND == "torch":
            loss_of(labels, model(keys)).backward()
        elif BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(keys))
            tape.gradient(loss, model.trainable_variables)
        else:
            import jax

            own = [[one.value for one in part] for part in (model.trainable_variables, model.non_trainable_variables)]
            jax.grad(lambda trained: loss_of(labels, model.stateless_call(trained, own[1], keys)[0]))(own[0])
    except Exception as error:
        return {"raised": str(error)}
    return {"raised": ""}


def persistent_tape():
    if BACKEND != "tensorflow":
        return {"raised": "a gradient came for a lookup that does not wait"}
    import tensorflow as tf

    model, _ = network("own", keras.optimizers.SGD(0.1))
    with tf.GradientTape(persistent=True) as tape:
        loss = keras.losses.MeanSquaredError()(LABELS[:SIZE], model(KEYS[:SIZE], training=True))
    tape.gradient(loss, model.trainable_variables)
    try:
        tape.gradient(loss, model.trainable_variables)
    except Exception as error:
        return {"raised": str(error)}
    return {"raised": ""}


def several_devices():
    """Two devices of one process, by the framework's own means."""
    if BACKEND == "torch":
        return {"raised": "several"}
    try:
        if BACKEND == "jax":
            keras.distribution.set_distribution(keras.distribution.DataParallel())
            trained("own", lambda: keras.optimizers.SGD(0.1), steps=2)
        else:
            import tensorflow as tf

            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            with strategy.scope():
                trained("own", lambda: keras.optimizers.SGD(0.1), steps=2)
    except Exception as error:
        return {"raised": str(error)}
    finally:
        keras.distribution.set_distribution(None)
    return {"raised": ""}


def weights_in_memory():
    """What EarlyStopping(restore_best_weights=True) does, and weights that lack rows."""
    found = {}
    for kind in ("stock", "own"):
        model, _, _ = trained(kind, lambda: keras.optimizers.SGD(0.1), steps=3)
        kept, wanted = model.get_weights(), model.predict(KEYS[:8], verbose=0)
        model.fit(KEYS, LABELS, batch_size=SIZE, verbose=0)
        moved = float(np.abs(model.predict(KEYS[:8], verbose=0) - wanted).max())
        model.set_weights(kept)
        again = float(np.abs(model.predict(KEYS[:8], verbose=0) - wanted).max())
        copy = keras.models.clone_model(model)
        copy.set_weights(kept)
        found[kind] = (moved > 0, again, float(np.abs(copy.predict(KEYS[:8], verbose=0) - wanted).max()))
    try:
        model.set_weights([0.5 * (one + one) for one in kept])
        refused = ""
    except Exception as error:
        refused = str(error)
    return {**found, "refused": refused}


def _of_dynamic_table(**options):
    keys = keras.Input((3,), dtype="int64" if BACKEND != "jax" else "int32")
    layer = vk.Embedding(None, DIM, optimizer=keras.optimizers.Adam(0.1), key_dtype=keys.dtype, **options)
    model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(layer(keys))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, layer


def early_stopping():
    """Labels of validation are the opposite: the first epoch is the best one, whose rows come back."""
    rows, found = 10 * SIZE, {}
    for kind in ("fixed", "dynamic"):
        for form in ("layer", "fast"):
            model, layer = _of_dynamic_table() if kind == "dynamic" else network("own", keras.optimizers.SGD(0.1))
            model.compile(keras.optimizers.SGD(0.1) if kind == "dynamic" else layer.held.optimizer, "mse")
            kept = []
            stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
            note = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, kept=kept, layer=layer: kept.append(layer.get_weights())
            )
            train = model.fit if form == "layer" else lambda *a, model=model, **o: vk.fit(model, *a, **o)
            history = train(
                KEYS[:rows], LABELS[:rows], batch_size=SIZE, verbose=0, epochs=9, callbacks=[note, stop],
                validation_data=(KEYS[:rows], -LABELS[:rows]),
            )  # fmt: skip
            best = int(np.argmin(history.history["val_loss"]))
            pairs = [list(zip(one, layer.get_weights(), strict=True)) for one in (kept[best], kept[-1])]
            found[f"{kind} {form}"] = [len(kept), *(all(np.array_equal(a, b) for a, b in one) for one in pairs)]
    return found


def keys_and_rows():
    """A dynamic table's weights are its keys and rows."""
    model, layer = _of_dynamic_table(dynamic={"max_capacity": 64, "when_full": "raise"})
    vk.fit(model, KEYS[:SIZE], LABELS[:SIZE], verbose=0)
    keys, rows = layer.get_weights()
    layer.set_weights([np.array([7, 5]), np.ones((2, DIM), "float32")])
    again = layer.get_weights()
    messages = []
    for wrong in (
        [np.array([7.5]), np.ones((1, DIM))], [np.array([7]), np.ones((2, DIM))], [np.array([9, 9]), np.ones((2, DIM))],
        [np.arange(65), np.ones((65, DIM))], [[[1], 2], np.ones((2, DIM))], [np.array([7]), [[1.0] * DIM, [1.0]]],
    ):  # fmt: skip
        try:
            layer.set_weights(wrong)
            messages.append("")
        except Exception as error:
            messages.append(str(error))
    kept = [sorted(layer.get_weights()[0].tolist()), layer.get_weights()[1].tolist()]
    return {"keys": sorted(keys.tolist()) == sorted(set(KEYS[:SIZE].ravel().tolist())), "shape": list(rows.shape),
            "again": [sorted(again[0].tolist()), again[1].tolist()], "messages": messages, "kept": kept}  # fmt: skip


def rate_after_loading():
    """The rate of a loaded model's optimizer is that of its tables."""
    model, _, _ = trained("own", lambda: keras.optimizers.SGD(0.1), steps=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        loaded = keras.saving.load_model(Path(folder) / "model.keras")
    loaded.optimizer.learning_rate = 0.0
    (again,) = vk.table_layers(loaded)
    before = again.get_weights()[0]
    loaded.fit(KEYS[:SIZE], LABELS[:SIZE], verbose=0)
    return {"same": bool((again.get_weights()[0] == before).all()), "updates": again.num_updates}


def ways_to_run():
    """Eager steps, several steps a call: the stock layer's rows."""
    ways = {"eager": {"run_eagerly": True}}
    if BACKEND != "torch":
        ways["several"] = {"steps_per_execution": 3}
    out = {}
    for name, options in ways.items():
        rows = []
        for kind in ("stock", "own"):
            optimizer = keras.optimizers.SGD(0.1)
            model, layer = network(kind, optimizer)
            model.compile(optimizer, "mse", **options)
            model.fit(KEYS[: 6 * SIZE], LABELS[: 6 * SIZE], batch_size=SIZE, shuffle=False, verbose=0)
            rows.append(layer.get_weights()[0])
        out[name] = {"rows": float(np.abs(rows[0] - rows[1]).max()), "updates": layer.num_updates}
    return out


def fast_metrics():
    """Metrics, sample weights, a shorter last batch and validation in the fast form: the figures of model.fit."""
    last = 4 * SIZE - 5
    scales = np.linspace(0, 2, last).astype("float32")
    found = []
    for form in ("layer", "fast"):
        optimizer = keras.optimizers.SGD(0.1)
        model, layer = network("own", optimizer)
        model.compile(optimizer, "mse", metrics=["mae"])
        train = model.fit if form == "layer" else lambda *a, own=model, **o: vk.fit(own, *a, **o)
        history = train(
            KEYS[:last], LABELS[:last], batch_size=SIZE, shuffle=False, epochs=2, verbose=0, sample_weight=scales,
            validation_data=(KEYS[-40:], LABELS[-40:]),
        )  # fmt: skip
        found.append((layer.get_weights()[0], history.history))
    (rows, wanted), (own_rows, own) = found
    apart = {name: float(np.abs(np.array(own.get(name, np.inf)) - values).max()) for name, values in wanted.items()}
    return {"rows": float(np.abs(rows - own_rows).max()), "logs": apart}


def computed_keys():
    """Keys that layers compute, of a column or by hashing: the fast form has the figures of the keys themselves."""
    ways = {"column": (lambda keys: keys[:, 1:3], KEYS[:, 1:3])}
    if find_spec("tensorflow"):  # in which Keras hashes on every backend
        hashing = keras.layers.Hashing(num_bins=20)
        ways["hash"] = (hashing, keras.ops.convert_to_numpy(hashing(KEYS)).astype("int32"))
    out = {}
    for name, (compute, given) in ways.items():
        found = []
        for computes in (True, False):
            keras.utils.set_random_seed(1)
            data = KEYS if computes else given
            inputs = keras.Input(data.shape[1:], dtype="int32")
            layer = embedding("own", keras.optimizers.SGD(0.1))
            rows = layer(compute(inputs) if computes else inputs)
            model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
            model.compile(keras.optimizers.SGD(0.1), "mse")
            sizes = {"batch_size": SIZE, "shuffle": False, "epochs": 2, "verbose": 0}
            history = vk.fit(model, data[: 4 * SIZE - 5], LABELS[: 4 * SIZE - 5], **sizes)
            found.append((layer.get_weights()[0], np.array(history.history["loss"])))
        out[name] = max(float(np.abs(one - other).max()) for one, other in zip(*found, strict=True))
    return out


def crafted_files():
    """Rows of another type in a file, and settings that a layer cannot have: refused, not converted."""
    import h5py

    from viviane.core.errors import ConfigError

    model, layer, _ = trained("own", lambda: keras.optimizers.SGD(0.1))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/m.weights.h5"
        model.save_weights(file)
        with h5py.File(file, "a") as content:
            names: list[str] = []
            content.visit(names.append)
            place = next(name for name in names if name.endswith(".weight"))
            rows = content[place][()]
            for kind in ("int64", "complex64", "float64", "bool", "missing"):
                del content[place]
                if kind != "missing":
                    content[place] = rows.astype(kind)
                content.flush()
                before = layer.get_weights()[0]
                try:
                    model.load_weights(file)
                    found[kind] = "loaded"
                except Exception as error:  # Keras' own, with the message of ours
                    found[kind] = str(error)
                assert np.array_equal(before, layer.get_weights()[0])
                if kind == "missing":
                    break
    for change in ({"dynamic": 3}, {"dynamic": {"initial_capacity": "x"}}, {"optimizer": None}):
        settings = {**layer.get_config(), "input_dim": None, **change}
        if change == {"optimizer": None}:
            del settings["optimizer"]
        try:
            vk.Embedding.from_config(settings)
            found[str(change)] = "made"
        except ConfigError as error:
            found[str(change)] = error.what
    return found
