"""What benchmarks/embedding.py measures: our tables and those of other libraries, behind one pair of functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from viviane.batch import Batch, Layout
from viviane.config import SGD, AdaGrad, Adam
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.ops.embedding_bag import gather_rows
from viviane.ops.key_rows import RAISE, ColumnRule, KeyRules, key_rows
from viviane.ops.native.pages import advise_huge_pages
from viviane.ops.row_update import Entries, Scratch, initial_state, state_shape, update_rows

OUR_RULES = {"sgd": SGD(), "adagrad": AdaGrad(), "row_wise_adagrad": AdaGrad(row_wise=True), "adam": Adam()}


@dataclass(frozen=True)
class Case:
    """Tables of some sizes, batches of ids (B, F), int32, counted per table, and the gradient (B, F * D) of each."""

    dim: int
    size: int
    rule: str
    lr: float
    sizes: list[int]
    ids: list[Tensor]
    gradient: Tensor


@dataclass(frozen=True)
class Steps:
    """Look batch i up; look it up, go back, and update."""

    forward: Callable[[int], object]
    train: Callable[[int], object]


def power_law_ids(sizes: list[int], size: int, count: int) -> list[Tensor]:
    """Draw batches (B, F) of ids, P(id) ~ (id + 1)^-1.1, by inverting the continuous law."""
    rng, limit = np.random.default_rng(0), np.array(sizes, dtype=np.float64) + 1
    batches = []
    for _ in range(count):
        u = rng.random((size, len(sizes)))
        ids = np.floor((1 + u * (limit**-0.1 - 1)) ** -10) - 1
        batches.append(torch.from_numpy(np.clip(ids, 0, limit - 2).astype(np.int32)))
    return batches


def ours(case: Case) -> Steps:
    names = tuple(f"c{i}" for i in range(len(case.sizes)))
    tables = [TableConfig(name=name, num_rows=rows, dim=case.dim) for name, rows in zip(names, case.sizes, strict=True)]
    collection = EmbeddingCollection(
        tables, [FeatureConfig(name=name, table=name) for name in names], OUR_RULES[case.rule]
    )
    nothing = torch.zeros(case.size, 0)
    batches = [Batch(Layout((), (), names, ()), nothing, nothing, ids) for ids in case.ids]

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return collection(batches[i]).flat

    def train(i: int) -> None:
        collection(batches[i]).flat.backward(case.gradient)
        collection.step(case.lr)

    return Steps(forward, train)


def operations(case: Case) -> Steps:
    rule, width, num_rows = OUR_RULES[case.rule], len(case.sizes) * case.dim, sum(case.sizes)
    bases = np.concatenate([[0], np.cumsum(case.sizes)[:-1]]).tolist()
    columns = [ColumnRule(base, rows, RAISE) for base, rows in zip(bases, case.sizes, strict=True)]
    rules = KeyRules(columns, num_rows, torch.device("cpu"))
    weight = torch.empty(num_rows + 2, case.dim)
    advise_huge_pages(weight)
    weight.uniform_(-0.01, 0.01)
    state = {name: torch.full(state_shape(name, weight, rule), value) for name, value in initial_state(rule).items()}
    scratch, out = Scratch(), torch.empty(case.size, width)
    places = range(0, width, case.dim)
    sources = torch.arange(0, case.size * width, case.dim, dtype=torch.int32)

    def forward(i: int) -> Tensor:
        rows = key_rows(case.ids[i], rules)[0]
        gather_rows(weight, rows, out, places)
        return rows

    def train(i: int) -> None:
        entries = Entries(forward(i).view(-1), case.gradient.view(-1), sources)
        update_rows(weight, state, entries, rule, lr=case.lr, step=i + 1, scratch=scratch)

    return Steps(forward, train)


def torch_bags(case: Case) -> Steps | None:
    build: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam,
    }  # fmt: skip
    if case.rule not in build:
        return None
    bags = nn.ModuleList(nn.EmbeddingBag(rows, case.dim, mode="sum", sparse=True) for rows in case.sizes)
    optimizer, offsets = build[case.rule](list(bags.parameters()), lr=case.lr), torch.arange(case.size)
    columns = [list(ids.long().t().contiguous().unbind()) for ids in case.ids]

    def look_up(i: int) -> Tensor:
        return torch.cat([bag(ids, offsets) for bag, ids in zip(bags, columns[i], strict=True)], 1)

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return look_up(i)

    def train(i: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        look_up(i).backward(case.gradient)
        optimizer.step()

    return Steps(forward, train)


def fbgemm(case: Case) -> Steps | None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }  # fmt: skip
    if case.rule not in kinds:
        return None
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in case.sizes],
        optimizer=kinds[case.rule], learning_rate=case.lr, eps=1e-7,
    )  # fmt: skip
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    keys = [ids.t().contiguous().view(-1).long() for ids in case.ids]
    offsets = torch.arange(len(keys[0]) + 1)

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return tables(keys[i], offsets)

    return Steps(forward, lambda i: tables(keys[i], offsets).backward(case.gradient))


def torchrec(case: Case) -> Steps | None:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "row_wise_adagrad": RowWiseAdagrad}
    if case.rule not in kinds:
        return None
    names = [f"c{i}" for i in range(len(case.sizes))]
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=case.dim, feature_names=[name])
        for name, rows in zip(names, case.sizes, strict=True)
    ]
    collection = FusedEmbeddingBagCollection(
        tables, optimizer_type=kinds[case.rule], optimizer_kwargs={"lr": case.lr}, device=torch.device("cpu")
    )
    lengths = torch.ones(case.size * len(names), dtype=torch.int64)
    batches = [
        KeyedJaggedTensor.from_lengths_sync(names, ids.t().contiguous().view(-1).long(), lengths) for ids in case.ids
    ]

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return collection(batches[i]).values()

    return Steps(forward, lambda i: collection(batches[i]).values().backward(case.gradient))


def keras(case: Case) -> Steps | None:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras as library
    import tensorflow as tf

    build = {"sgd": library.optimizers.SGD, "adagrad": library.optimizers.Adagrad, "adam": library.optimizers.Adam}
    if case.rule not in build:
        return None
    layers = [library.layers.Embedding(rows, case.dim) for rows in case.sizes]
    for layer in layers:
        layer.build(None)
    variables, optimizer = [layer.embeddings for layer in layers], build[case.rule](case.lr)
    optimizer.build(variables)
    columns = [[tf.constant(column) for column in ids.t().contiguous().numpy()] for ids in case.ids]
    gradient = tf.constant(case.gradient.numpy())

    @tf.function
    def forward(ids: list[object]) -> object:
        return tf.concat([layer(column) for layer, column in zip(layers, ids, strict=True)], 1)

    @tf.function
    def train(ids: list[object]) -> None:
        with tf.GradientTape() as tape:
            out = forward(ids)
        optimizer.apply(tape.gradient(out, [one.value for one in variables], output_gradients=gradient), variables)

    return Steps(lambda i: forward(columns[i]), lambda i: train(columns[i]))


PEERS: dict[str, Callable[[Case], Steps | None]] = {
    "ours": ours, "operations": operations, "torch": torch_bags, "fbgemm": fbgemm, "torchrec": torchrec, "keras": keras,
}  # fmt: skip
