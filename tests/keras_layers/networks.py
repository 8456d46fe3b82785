"""The networks, data and trainings that scenarios share, on the backend that KERAS_BACKEND names."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    import tensorflow

    two = [tensorflow.config.LogicalDeviceConfiguration()] * 2
    tensorflow.config.set_logical_device_configuration(tensorflow.config.list_physical_devices("CPU")[0], two)

import keras
import numpy as np

import viviane.keras as vk

BACKEND = keras.backend.backend()
STEPS, SIZE, VOCABULARY, DIM = 50, 16, 400, 4
_rng = np.random.default_rng(0)
# No key twice in a batch of a column: on TensorFlow Keras' own AdaGrad and Adam take a key that comes twice for two.
KEYS = np.concatenate([_rng.permutation(VOCABULARY)[: SIZE * 3].reshape(SIZE, 3) for _ in range(STEPS)]).astype("int32")
TWICE = _rng.integers(0, 20, KEYS.shape).astype("int32")
LABELS = _rng.normal(size=(len(KEYS), 1)).astype("float32")


class Losses(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))


def embedding(kind, optimizer, **options):
    init = keras.initializers.RandomUniform(seed=3)
    if kind == "stock":
        return keras.layers.Embedding(VOCABULARY, DIM, embeddings_initializer=init)
    return vk.Embedding(VOCABULARY, DIM, embeddings_initializer=init, optimizer=optimizer, **options)


def network(kind, optimizer, shared=False, **options):
    keys = keras.Input((3,), dtype="int32")
    layer = embedding(kind, optimizer, **options)
    found = keras.layers.Flatten()(layer(keys))
    if shared:
        found = keras.layers.Concatenate()([found, keras.layers.Flatten()(layer(keras.ops.flip(keys, 1)[:, :2]))])
    hidden = keras.layers.Dense(8, "relu", kernel_initializer=keras.initializers.GlorotUniform(seed=1))(found)
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))(hidden)
    return keras.Model(keys, out), layer


def trained(kind, make, keys=KEYS, form="layer", steps=STEPS, callbacks=(), jit="auto", **options):
    optimizer = make()
    model, layer = network(kind, optimizer, **options)
    model.compile(optimizer, "mse", jit_compile=jit)
    losses = Losses()
    rows = steps * SIZE
    whole = True if jit is True else None
    train = model.fit if form == "layer" else lambda *a, **o: vk.fit(model, *a, jit_compile=whole, **o)
    train(
        keys[:rows], LABELS[:rows], batch_size=SIZE, shuffle=False, verbose=0, callbacks=[losses, *callbacks], epochs=1
    )
    return model, layer, np.array(losses.values)


def difference(make, steps=10, **options):
    keys = options.get("keys", KEYS)
    shared = options.get("shared", False)
    _, stock, wanted = trained("stock", make, keys, steps=steps, shared=shared)
    out = {}
    for form in ("layer",) if shared else ("layer", "fast"):
        _, own, losses = trained("own", make, form=form, steps=steps, **options)
        out[form] = {
            "loss": float(np.abs(losses - wanted).max()),
            "rows": float(np.abs(own.get_weights()[0] - stock.get_weights()[0]).max()),
            "bits": bool((own.get_weights()[0] == stock.get_weights()[0]).all() and (losses == wanted).all()),
            "updates": own.num_updates,
        }
    return out
