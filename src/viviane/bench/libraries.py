"""The embedding tables of several libraries behind one interface: look up a batch; train on it.

A library's function creates its tables once and returns a function that binds a load to them. Ids are prepared in the
format of each library outside the timed region.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from viviane.batch import Batch, Layout
from viviane.bench.workload import RULES, Load, Tables
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig


@dataclass(frozen=True)
class Steps:
    """Functions of batch i: lookup; and lookup, backward and update."""

    forward: Callable[[int], object]
    train: Callable[[int], object]


Bind = Callable[[Load], Steps]


@dataclass(frozen=True)
class Library:
    """A library that may be measured.

    Args:
        title: description of what is measured.
        modules: modules to import, besides torch.
        package: distribution that determines the version.
        install: install command, by type of device.
        rules: supported optimizers, by type of device; other devices are not supported.
        build: creates the tables.
    """

    title: str
    modules: tuple[str, ...]
    package: str
    install: Mapping[str, str]
    rules: Mapping[str, tuple[str, ...]]
    build: Callable[[Tables], Bind]


def _own(tables: Tables) -> Bind:
    names = tuple(f"c{i}" for i in range(len(tables.rows)))
    configs = [TableConfig(name=name, num_rows=n, dim=tables.dim) for name, n in zip(names, tables.rows, strict=True)]
    features = [FeatureConfig(name=name, table=name) for name in names]
    collection = EmbeddingCollection(configs, features, RULES[tables.rule], device=tables.device)

    def bind(load: Load) -> Steps:
        nothing = torch.zeros(load.size, 0, device=tables.device)
        batches = [Batch(Layout((), (), names, ()), nothing, nothing, ids) for ids in load.ids]

        def forward(i: int) -> Tensor:
            with torch.no_grad():
                flat: Tensor = collection(batches[i]).flat
                return flat

        def train(i: int) -> None:
            collection(batches[i]).flat.backward(load.gradient)
            collection.step(tables.lr)

        return Steps(forward, train)

    return bind


def _torch_bags(tables: Tables) -> Bind:
    build = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[tables.rule]
    bags = nn.ModuleList(
        nn.EmbeddingBag(rows, tables.dim, mode="sum", sparse=True, device=tables.device) for rows in tables.rows
    )
    optimizer = build(list(bags.parameters()), lr=tables.lr)

    def bind(load: Load) -> Steps:
        offsets = torch.arange(load.size, device=tables.device)
        columns = [list(ids.long().t().contiguous().unbind()) for ids in load.ids]

        def look_up(i: int) -> Tensor:
            return torch.cat([bag(ids, offsets) for bag, ids in zip(bags, columns[i], strict=True)], 1)

        def forward(i: int) -> Tensor:
            with torch.no_grad():
                return look_up(i)

        def train(i: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            look_up(i).backward(load.gradient)  # type: ignore[no-untyped-call]
            optimizer.step()

        return Steps(forward, train)

    return bind


def _fused(call: Callable[[Any], Tensor], batches: list[Any], gradient: Tensor) -> Steps:
    """Return the steps of a library with a fused update in backward."""

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return call(batches[i])

    def train(i: int) -> None:
        call(batches[i]).backward(gradient)  # type: ignore[no-untyped-call]

    return Steps(forward, train)


def _fbgemm(tables: Tables) -> Bind:
    kinds = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    places = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common").EmbeddingLocation
    ops: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    on_cpu = tables.device.type == "cpu"
    place = places.HOST if on_cpu else places.DEVICE
    computed = ops.ComputeDevice.CPU if on_cpu else ops.ComputeDevice.CUDA
    names = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "row_wise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
    module = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, tables.dim, place, computed) for rows in tables.rows],
        optimizer=getattr(kinds, names.get(tables.rule, "ADAM")), learning_rate=tables.lr, eps=1e-7,
        device=tables.device,
    )  # fmt: skip
    module.init_embedding_weights_uniform(-0.01, 0.01)

    def bind(load: Load) -> Steps:
        keys = [ids.t().contiguous().view(-1).long() for ids in load.ids]
        offsets = torch.arange(load.num_ids + 1, device=tables.device)
        return _fused(lambda own: module(own, offsets), keys, load.gradient)

    return bind


def _torchrec(tables: Tables) -> Bind:
    configs: Any = importlib.import_module("torchrec.modules.embedding_configs")
    fused: Any = importlib.import_module("torchrec.modules.fused_embedding_modules")
    rowwise: Any = importlib.import_module("torchrec.optim.rowwise_adagrad")
    jagged: Any = importlib.import_module("torchrec.sparse.jagged_tensor")
    optimizers = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "row_wise_adagrad": rowwise.RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }  # fmt: skip
    names = [f"c{i}" for i in range(len(tables.rows))]
    own = [
        configs.EmbeddingBagConfig(name=f"t_{name}", num_embeddings=n, embedding_dim=tables.dim, feature_names=[name])
        for name, n in zip(names, tables.rows, strict=True)
    ]
    collection = fused.FusedEmbeddingBagCollection(
        own, optimizer_type=optimizers[tables.rule], optimizer_kwargs={"lr": tables.lr}, device=tables.device
    )

    def bind(load: Load) -> Steps:
        lengths = torch.ones(load.num_ids, dtype=torch.int64, device=tables.device)
        batches = [
            jagged.KeyedJaggedTensor.from_lengths_sync(names, ids.t().contiguous().view(-1).long(), lengths)
            for ids in load.ids
        ]
        return _fused(lambda batch: collection(batch).values(), batches, load.gradient)

    return bind


def _keras(tables: Tables) -> Bind:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf: Any = importlib.import_module("tensorflow")
    keras: Any = importlib.import_module("keras")
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    tf.config.threading.set_inter_op_parallelism_threads(torch.get_num_threads())
    layers = [keras.layers.Embedding(rows, tables.dim) for rows in tables.rows]
    for layer in layers:
        layer.build(None)
    variables = [layer.embeddings for layer in layers]
    named = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "rmsprop": "RMSprop", "ftrl": "Ftrl"}
    optimizer = getattr(keras.optimizers, named[tables.rule])(tables.lr)
    optimizer.build(variables)

    def bind(load: Load) -> Steps:
        columns = [[tf.constant(column) for column in ids.t().contiguous().numpy()] for ids in load.ids]
        gradient = tf.constant(load.gradient.numpy())

        @tf.function  # type: ignore[untyped-decorator]
        def forward(ids: list[Any]) -> Any:
            return tf.concat([layer(column) for layer, column in zip(layers, ids, strict=True)], 1)

        @tf.function  # type: ignore[untyped-decorator]
        def train(ids: list[Any]) -> None:
            with tf.GradientTape() as tape:
                out = forward(ids)
            found = tape.gradient(out, [one.value for one in variables], output_gradients=gradient)
            optimizer.apply(found, variables)

        return Steps(lambda i: forward(columns[i]), lambda i: train(columns[i]))

    return bind


OURS: Final = "viviane"
_FUSED_RULES: Final = {
    "cpu": ("sgd", "adagrad", "row_wise_adagrad"), "cuda": ("sgd", "adagrad", "row_wise_adagrad", "adam")
}  # fmt: skip
LIBRARIES: Final[dict[str, Library]] = {
    OURS: Library(
        "EmbeddingCollection", (), "viviane", {}, {"cpu": tuple(RULES), "cuda": tuple(RULES)}, _own,
    ),
    "torch": Library(
        "nn.EmbeddingBag(sparse=True) for each table", (), "torch", {},
        dict.fromkeys(("cpu", "cuda"), ("sgd", "adagrad", "adam")), _torch_bags,
    ),
    "fbgemm": Library(
        "SplitTableBatchedEmbeddingBags", ("fbgemm_gpu",), "fbgemm-gpu",
        {"cpu": "pip install fbgemm-gpu-cpu", "cuda": "pip install fbgemm-gpu"}, _FUSED_RULES, _fbgemm,
    ),
    "torchrec": Library(
        "FusedEmbeddingBagCollection", ("fbgemm_gpu", "torchrec"), "torchrec",
        {"cpu": "pip install torchrec fbgemm-gpu-cpu", "cuda": "pip install torchrec fbgemm-gpu"}, _FUSED_RULES,
        _torchrec,
    ),
    "keras": Library(
        "keras.layers.Embedding for each table, on TensorFlow", ("tensorflow", "keras"), "keras",
        {"cpu": "pip install keras tensorflow"}, {"cpu": ("sgd", "adagrad", "rmsprop", "adam", "ftrl")}, _keras,
    ),
}  # fmt: skip
"""All libraries, this package first."""
