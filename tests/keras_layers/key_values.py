"""Keys that are no whole numbers, or that a backend would change: what each way to a layer says of them."""

import keras
import numpy as np
from networks import BACKEND, DIM, LABELS, SIZE, VOCABULARY, embedding

import viviane.keras as vk

BAD = {
    "fraction": np.array([[1, 2, 3], [4, 1.5, 6]], "float32"),
    "nan": np.array([[1, 2, 3], [4, 5, np.nan]], "float32"),
    "infinity": np.array([[1, -np.inf, 3], [4, 5, 6]], "float32"),
    "rounded": np.array([[1, 2, 3], [2**24, 5, 6]], "float32"),
    "double": np.array([[1, 2, 2.5]], "float64"),
    "rounded_double": np.array([[1, 2, 2.0**53]], "float64"),
    "half": np.array([[1, 2, 2048]], "float16"),
    "truth": np.array([[True, False, True]]),
    "text": np.array([["7", "8", "9"]]),
    "object": np.array([[None, 8, 9]], dtype=object),
    "unsigned": np.array([[1, 2, 2**63 + 5]], "uint64"),
    "complex": np.array([[1j, 2, 3]], "complex64"),
    "out_of_range": np.array([[1, 2, VOCABULARY]], "float32"),
    "negative": np.array([[1, 2, -1.0]], "float32"),
}
GOOD = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_WIDE_IN_JAX = ("float64", "uint64")  # its compiled code has neither without jax_enable_x64


def _message(call):
    try:
        out = call()
        if BACKEND == "jax":
            import jax

            jax.block_until_ready(out)
    except Exception as error:  # frameworks wrap it
        return str(error)
    return ""


def _traced(layer):
    """Return the layer as compiled code calls it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(layer)
    if BACKEND == "jax":
        import jax

        return jax.jit(layer)
    import torch

    return torch.compile(layer, backend="eager")


def _tensor(array):
    """Return an array as the framework itself makes it, or the array where the framework would change or refuse it."""
    try:
        made = keras.ops.convert_to_tensor(array)
        same = keras.backend.standardize_dtype(made.dtype) == str(array.dtype)
    except Exception:
        return array
    return made if same else array


def refused_keys():
    """Each bad array, given eagerly, in compiled code, to fit and to the fast form."""
    layer = embedding("own", "sgd")
    compiled = _traced(layer)
    found = {"eager": {}, "tensor": {}, "traced": {}}
    for name, array in BAD.items():
        found["eager"][name] = _message(lambda array=array: layer(array))
        if (tensor := _tensor(array)) is array:
            continue
        found["tensor"][name] = _message(lambda tensor=tensor: layer(tensor))
        found["traced"][name] = _message(lambda tensor=tensor: compiled(tensor))
    return found


def refused_in_training():
    """fit with keras.Input's own type, float32, and the fast form: nothing is trained."""
    found = {}
    for form in ("layer", "fast"):
        keys = keras.Input((3,))
        layer = embedding("own", keras.optimizers.SGD(0.1))
        model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(layer(keys))))
        model.compile("sgd", "mse")
        before = layer.get_weights()[0]
        train = model.fit if form == "layer" else lambda *a, own=model, **o: vk.fit(own, *a, **o)
        array = BAD["fraction"]
        message = _message(lambda train=train, array=array: train(array, LABELS[: len(array)], verbose=0))
        found[form] = {"raised": message, "same": bool((layer.get_weights()[0] == before).all())}
    return found


def taken_keys():
    """Each type that holds keys gives the rows of int32, eagerly and in compiled code."""
    layer = embedding("own", "sgd")
    keys = np.random.default_rng(0).integers(0, 100, (SIZE, 3))
    wanted = keras.ops.convert_to_numpy(layer(keys.astype("int32")))
    compiled = _traced(layer)
    wrong = []
    for dtype in GOOD:
        array = keys.astype(dtype)
        ways = {"eager": layer(array)}
        if (tensor := _tensor(array)) is not array:
            ways |= {"tensor": layer(tensor), "traced": compiled(tensor)}
        elif BACKEND == "jax" and dtype not in (*_WIDE_IN_JAX, "int64"):
            wrong.append(f"{dtype} made no tensor")
        wrong += [
            f"{dtype} {way}" for way, out in ways.items() if not np.array_equal(keras.ops.convert_to_numpy(out), wanted)
        ]
    return {"wrong": wrong}


def mixed_types():
    """A feature of floats beside one of large integers: joining them must not make floats of the integers."""
    from viviane.config import SGD
    from viviane.embedding import FeatureConfig, TableConfig, UniformInit

    large = 2**24 + 1
    tables = [TableConfig(name="a", num_rows=large + 1, dim=1, init=UniformInit()),
              TableConfig(name="b", num_rows=9, dim=1, init=UniformInit())]  # fmt: skip
    features = [FeatureConfig(name="a", table="a"), FeatureConfig(name="b", table="b")]
    layer = vk.DistributedEmbedding(features, tables=tables, optimizer=SGD(lr=0.1))
    given = {"a": np.array([large], "int32"), "b": np.array([3.0], "float32")}
    found = layer(given)
    rows = layer.collection.export_table("a").weight
    given["b"] = np.array([3.5], "float32")
    tensors = {name: keras.ops.convert_to_tensor(one) for name, one in given.items()}
    same = float(keras.ops.convert_to_numpy(found["a"])[0, 0]) == float(rows[large, 0])
    return {"same": same, "raised": _message(lambda: layer(tensors))}


def wide_keys():
    """A 64-bit key is not cut to 32 bits, which would make it another key; nor in the fast form's computed keys."""
    layer = vk.Embedding(VOCABULARY, DIM, optimizer="sgd")
    wide = np.full((1, 1), 2**32 + 1, "int64")
    found = {"eager": _message(lambda: layer(wide))}
    keys = keras.Input((1,), dtype="int64")
    out = keras.layers.Dense(1)(keras.layers.Flatten()(vk.Embedding(VOCABULARY, DIM, optimizer="sgd")(keys + 0)))
    model = keras.Model(keys, out)
    model.compile("sgd", "mse")
    found["computed"] = _message(lambda: vk.fit(model, wide, np.ones((1, 1)), verbose=0))
    return found
