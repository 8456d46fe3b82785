"""What a user of Keras tries after the first model: see scenarios.py."""

import tempfile
import warnings
from functools import partial
from pathlib import Path

import keras
import numpy as np
from networks import BACKEND, DIM, KEYS, LABELS, SIZE, TWICE, VOCABULARY, embedding, network, trained

import viviane.keras as vk
from viviane.core.errors import ConfigError
from viviane.embedding import FeatureConfig, TableConfig, UniformInit


class Unused(keras.Model):
    """A model that looks rows up and does not use them."""

    def __init__(self):
        super().__init__()
        self.rows = embedding("own", keras.optimizers.SGD(0.1))
        self.out = keras.layers.Dense(1)

    def call(self, keys, training=None):
        self.rows(keys, training=training)
        return self.out(keras.ops.cast(keys, "float32"))


def unused_output():
    """Rows whose vectors go nowhere: a model is not saved as if they had been trained."""
    model = Unused()
    model.compile("sgd", "mse")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, epochs in (("save", 1), ("training", 35)):
            try:
                model.fit(KEYS[: 2 * SIZE], LABELS[: 2 * SIZE], batch_size=SIZE, epochs=epochs, verbose=0)
                if what == "save":
                    model.save(Path(folder) / "model.keras")
                found[what] = ""
            except Exception as error:
                found[what] = str(error)
    return found


def files_of_weights():
    """Files of weights load into a model whose layers Keras has counted up, those of the stock layer too."""
    model, _, _ = trained("own", lambda: keras.optimizers.Adam(0.01), steps=3)
    stock, _, _ = trained("stock", lambda: keras.optimizers.SGD(0.1), steps=3)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, one in (("own", model), ("stock", stock)):
            one.save_weights(Path(folder) / f"{name}.weights.h5")
            again, layer = network("own", keras.optimizers.Adam(0.01))
            again.load_weights(Path(folder) / f"{name}.weights.h5")
            found[name] = float(np.abs(again.predict(KEYS[:8], verbose=0) - one.predict(KEYS[:8], verbose=0)).max())
        found["names"] = layer.name != vk.table_layers(model)[0].name
        again, _ = network("own", keras.optimizers.Adam(0.01))
        again.set_weights(model.get_weights())
        found["memory"] = float(np.abs(again.predict(KEYS[:8], verbose=0) - model.predict(KEYS[:8], verbose=0)).max())
        try:
            model.save(Path(folder) / "model.h5")
            found["hdf5"] = ""
        except Exception as error:
            found["hdf5"] = str(error)
    return found


def weighted_bag():
    """The weights of a bag are a second input of the layer."""
    keys, scales = keras.Input((3,), dtype="int32"), keras.Input((3,))
    layer = vk.EmbeddingBag(VOCABULARY, DIM, combiner="sum", optimizer="sgd", embeddings_initializer="ones")
    model = keras.Model([keys, scales], layer(keys, scales))
    given = np.array([[1.0, 2.0, 0.5]], "float32")
    return {"row": model.predict([KEYS[:1], given], verbose=0)[0].tolist()}


def batches_of_torch():
    """A DataLoader of torch in both forms: the figures of arrays."""
    import torch

    keys, labels = KEYS[: 3 * SIZE], LABELS[: 3 * SIZE]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(keys), torch.from_numpy(labels)), batch_size=SIZE
    )
    rows = []
    for form in ("arrays", "layer", "fast"):
        optimizer = keras.optimizers.SGD(0.1)
        model, layer = network("own", optimizer)
        model.compile(optimizer, "mse")
        if form == "arrays":
            model.fit(keys, labels, batch_size=SIZE, shuffle=False, verbose=0)
        elif form == "layer":
            model.fit(loader, verbose=0)
        else:
            vk.fit(model, loader, verbose=0)
        rows.append(layer.get_weights()[0])
    return {"same": all(bool((one == rows[0]).all()) for one in rows)}


def uneven_rows():
    given = keras.KerasTensor((None, 3), dtype="int32", sparse=True)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        given = tf.ragged.constant([[1, 2], [3]])
    found = {}
    for layer in (vk.Embedding(VOCABULARY, DIM), vk.EmbeddingBag(VOCABULARY, DIM)):
        try:
            layer(given)
        except Exception as error:
            found[type(layer).__name__] = str(error)
    return found


def sequential():
    """A Sequential in both forms, and one whose layers were added one by one, each time called again."""
    rows = []
    for train in (keras.Model.fit, vk.fit):
        optimizer = keras.optimizers.SGD(0.1)
        out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
        layers = [embedding("own", optimizer), keras.layers.Flatten(), out]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(optimizer, "mse")
        train(model, KEYS[: 3 * SIZE], LABELS[: 3 * SIZE], batch_size=SIZE, shuffle=False, verbose=0)
        rows.append(layers[0].get_weights()[0])
    model.add(keras.layers.Dense(1))
    try:
        vk.FastTrainer(model)
    except Exception as error:
        return {"same": bool((rows[0] == rows[1]).all()), "raised": str(error)}
    return {"same": False, "raised": ""}


def _graph(variant):
    """A model with three features, whose keys and vectors take another way in each variant; and its data."""
    tables = [TableConfig(name=name, num_rows=VOCABULARY, dim=dim, init=UniformInit()) for name, dim in _WIDTHS.items()]
    features = [FeatureConfig(name=name, table=name) for name in _WIDTHS]
    bag = variant == "bag"
    layer = vk.DistributedEmbedding(
        features, tables=tables, optimizer=keras.optimizers.SGD(0.1), lengths={"c": 2} if bag else None
    )
    ids, second = keras.Input((4,), dtype="int32", name="ids"), keras.Input((1,), name="second")
    columns = [ids[:, 1], ids[:, 2], ids[:, 2:4] if bag else ids[:, 3]]
    if variant == "gaps":
        columns = [ids[:, 0], ids[:, 3], ids[:, -3]]
    elif variant == "two inputs":
        columns[1] = second[:, 0]
    found = layer(columns)
    vectors = [found[name] for name in _WIDTHS]
    if variant == "unused":
        del vectors[1]
    if variant == "dense":
        vectors.append(second)
    joined = keras.layers.Concatenate()(vectors[::-1] if variant == "other order" else vectors)
    if variant == "taken twice":
        joined = keras.layers.Concatenate(axis=1)([joined, keras.ops.square(found["b"])])
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=1))(joined)
    model = keras.Model({"ids": ids, "second": second}, out)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    keys = np.concatenate([KEYS, KEYS[::-1, :1]], 1)[: 3 * SIZE]
    return model, layer, {"ids": keys, "second": keys[:, 0] if variant == "two inputs" else keys[:, :1]}


_WIDTHS = {"a": 4, "b": 2, "c": 4}


def ways_through_graphs():
    """Of each graph: how far the fast form is from the layer form; and what inputs of another shape raise."""
    out = {}
    for variant in ("columns", "gaps", "bag", "two inputs", "dense", "other order", "taken twice", "unused"):
        found = []
        for train in (keras.Model.fit, vk.fit):
            keras.utils.set_random_seed(0)
            model, layer, data = _graph(variant)
            options = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
            history = train(model, data, LABELS[: 3 * SIZE], **options)
            rows = [layer.collection.export_table(name).weight.cpu().numpy() for name in _WIDTHS]
            found.append([np.array(history.history["loss"]), *rows])
        out[variant] = max(float(np.abs(one - other).max()) for one, other in zip(*found, strict=True))
    raised = {}
    narrow = {**data, "ids": data["ids"][:, :3]}
    for name, call in {
        "shape": lambda: vk.fit(model, narrow, LABELS[: 3 * SIZE], verbose=0),
        "matrix": lambda: layer(KEYS[:3]),  # a row for each feature: it was taken for the features' keys
    }.items():
        try:
            call()
            raised[name] = ""
        except Exception as error:
            raised[name] = str(error)
    return {"apart": out, **raised}


@keras.saving.register_keras_serializable("trials")
class Own(keras.Model):
    """A subclassed model, which Keras builds and loads by tracing it."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind
        self.rows, self.flat = embedding(kind, keras.optimizers.SGD(0.1)), keras.layers.Flatten()
        self.out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))

    def call(self, keys, training=None):
        return self.out(self.flat(self.rows(keys, training=training)))

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


class Tied(Own):
    """A model that computes with all rows of its table."""

    def call(self, keys, training=None):
        found = keras.ops.mean(self.rows(keys, training=training), 1)
        return keras.ops.matmul(found, keras.ops.transpose(keras.ops.convert_to_tensor(self.rows.embeddings)))


def subclassed():
    """Subclassed models train and load as with the stock layer; one that computes with the rows themselves raises."""
    rows, found = [], {}
    for kind in ("stock", "own"):
        model = Own(kind)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(KEYS[: 3 * SIZE], LABELS[: 3 * SIZE], batch_size=SIZE, shuffle=False, verbose=0)
        rows.append(model.rows.get_weights()[0])
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            loaded = keras.saving.load_model(Path(folder) / "model.keras")
        found[kind] = float(np.abs(loaded.predict(KEYS, verbose=0) - model.predict(KEYS, verbose=0)).max())
    tied = Tied("own")
    tied.compile(keras.optimizers.SGD(0.1), "mse")
    try:
        tied.fit(KEYS[:SIZE], np.ones((SIZE, VOCABULARY)), verbose=0)
        raised = ""
    except Exception as error:
        raised = str(error)
    shape = tuple(model.rows.embeddings.shape)
    return {"apart": float(np.abs(rows[0] - rows[1]).max()), "loaded": found, "raised": raised, "shape": shape}


def options_of_the_stock_layer():
    """Options that others' scripts give the stock layer, and types that it takes."""
    found = {}
    for name, options in {
        "input_length": {"input_length": 3},
        "none": {"lora_rank": None, "quantization_config": None},
        "lora_rank": {"lora_rank": 2},
        "dtype": {"dtype": "float64"},
    }.items():
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                vk.Embedding(VOCABULARY, DIM, **options)
            found[name] = "; ".join(str(one.message) for one in seen)
        except Exception as error:
            found[name] = str(error)
    return found


def rank_of_keys():
    """Keys (B,) for an input (B, 1), as Keras takes them, in both forms; and ragged keys in the fast form."""
    rows = []
    for train in (keras.Model.fit, vk.fit):
        keys, optimizer = keras.Input((1,), dtype="int32"), keras.optimizers.SGD(0.1)
        layer = embedding("own", optimizer)
        out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
        model = keras.Model(keys, out(keras.layers.Flatten()(layer(keys))))
        model.compile(optimizer, "mse")
        train(model, KEYS[: 2 * SIZE, 0], LABELS[: 2 * SIZE], batch_size=SIZE, shuffle=False, verbose=0)
        rows.append(layer.get_weights()[0])
    raised = "to_tensor"
    if BACKEND == "tensorflow":
        import tensorflow as tf

        try:
            vk.fit(model, tf.ragged.constant([[1, 2], [3]]), LABELS[:2], verbose=0)
            raised = ""
        except Exception as error:
            raised = str(error)
    return {"same": bool((rows[0] == rows[1]).all()), "ragged": raised}


def _parts(kind, keys, weights):
    optimizer = keras.optimizers.SGD(0.1)
    if kind == "embedding":
        return [keras.layers.Flatten()(vk.Embedding(VOCABULARY, DIM, optimizer=optimizer)(keys))]
    if kind == "bags":
        bag = partial(vk.EmbeddingBag, VOCABULARY, DIM, optimizer=optimizer)
        return [
            bag(combiner="mean", padding_key=0)(keys), bag(combiner="sum")(keys),
            bag(combiner="sqrtn", padding_key=-1)(keys, weights), bag(combiner="mean")(keys, weights),
        ]  # fmt: skip
    tables = [TableConfig(name="t", num_rows=VOCABULARY, dim=DIM), TableConfig(name="u", num_rows=VOCABULARY, dim=3)]
    features = [
        FeatureConfig(name="mean", table="t", combiner="mean"), FeatureConfig(name="one", table="u"),
        FeatureConfig(name="sum", table="t", combiner="sum"),
    ]  # fmt: skip
    layer = vk.DistributedEmbedding(features, tables=tables, lengths={"mean": 3, "sum": 3}, optimizer=optimizer)
    return list(layer({"mean": keys, "one": keys[:, 0], "sum": keys}).values())


def stock_copies():
    """Copies with Keras' own layers, as they are and after saving; on TensorFlow from a SavedModel, too."""
    given, found = {"keys": TWICE[:40], "weights": np.abs(LABELS[:120].reshape(40, 3))}, {}
    for kind in ("embedding", "bags", "distributed"):
        keys, weights = keras.Input((3,), dtype="int32", name="keys"), keras.Input((3,), name="weights")
        hidden = keras.layers.Concatenate()([*_parts(kind, keys, weights), weights])
        model = keras.Model({"keys": keys, "weights": weights}, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(given, LABELS[:40], verbose=0)
        wanted, copy = model.predict(given, verbose=0), vk.stock_model(model)
        with tempfile.TemporaryDirectory() as folder:
            copy.save(Path(folder) / "copy.keras")
            outputs = [copy.predict(given, verbose=0)]
            outputs.append(keras.saving.load_model(Path(folder) / "copy.keras").predict(given, verbose=0))
            if BACKEND == "tensorflow":
                import tensorflow as tf

                copy.export(f"{folder}/saved", verbose=False)
                saved = tf.saved_model.load(f"{folder}/saved")
                outputs.append(saved.serve({name: tf.constant(one) for name, one in given.items()}).numpy())
        found[kind] = [float(np.abs(one - wanted).max()) for one in outputs]
        assert not vk.table_layers(copy)
    refused = []
    for options in ({"input_dim": None, "key_dtype": "int32"}, {"input_dim": 9, "out_of_range": "hash"}):
        layer = vk.Embedding(output_dim=DIM, optimizer="sgd", **options)
        try:
            vk.stock_model(keras.Sequential([keras.Input((3,), dtype="int32"), layer]))
        except ConfigError as error:
            refused.append(str(error))
    return {"apart": found, "refused": refused}
