"""What the reference models have in common: their registry, shared options, and how a graph begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from viviane.config import OptimizerSettings
from viviane.config.base import Settings
from viviane.core.errors import SchemaError
from viviane.core.registry import Registry
from viviane.embedding import DynamicOptions, UniformInit, ZeroInit
from viviane.embedding.config import InitSettings, OutOfRange
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding
from viviane.schema import Schema


class ZooModel(Settings):
    """Base of the reference models: settings that write the nodes of a graph.

    Args:
        dim: width of the embedding vectors.
        combiner: how the ids of a bag join, "sum" or "mean".
        init: initial values of the tables.
        out_of_range: what an id outside its table does.
        embedding_dropout: share of embedding numbers set to zero while training.
        dropout: share of activations set to zero after each hidden layer while training.
        batch_norm, layer_norm: normalise each hidden layer over the batch, or over its own numbers.
        linear_optimizer: rule of the tables of dim 1, where the model has them; None takes the tables' rule. They
            bear much less weight decay than vectors do.
        dynamic: how rows of dynamic tables come and go, see `viviane.SparseEmbedding`; columns of raw ids need none.
    """

    dim: int = Field(default=16, ge=1)
    combiner: Literal["sum", "mean"] = "sum"
    init: InitSettings = UniformInit()
    out_of_range: OutOfRange = "raise"
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    batch_norm: bool = False
    layer_norm: bool = False
    linear_optimizer: OptimizerSettings | None = None
    dynamic: DynamicOptions | None = None

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph for a schema: an Input, the layers, the loss."""
        raise TypeError(f"{type(self).__name__} does not define nodes")

    def embedding(self, name: str, bottom: str, dim: int) -> SparseEmbedding:
        """Return an embedding node with the shared options."""
        return SparseEmbedding(
            name, bottom, dim, combiner=self.combiner, init=self.init, out_of_range=self.out_of_range,
            dynamic=self.dynamic,
        )  # fmt: skip

    def weights(self, name: str, bottom: str) -> SparseEmbedding:
        """Return the node of one number per id, (B, S, 1), that begins at 0."""
        return SparseEmbedding(
            name, bottom, 1, combiner=self.combiner, init=ZeroInit(), out_of_range=self.out_of_range,
            optimizer=self.linear_optimizer, dynamic=self.dynamic,
        )  # fmt: skip

    def vectors(self, bottom: str = "cats") -> Vectors:
        """Return the nodes that look up `bottom` and, where asked for, thin it: (B, S, dim), and (B, S * dim)."""
        nodes: list[Node] = [self.embedding("emb", bottom, self.dim)]
        top = "emb"
        if self.embedding_dropout:
            nodes.append(DenseLayer("emb_drop", "Dropout", bottom=top, dropout_rate=self.embedding_dropout))
            top = "emb_drop"
        nodes.append(DenseLayer("emb_flat", "Reshape", bottom=top, shape=[-1]))
        return Vectors(nodes, top, "emb_flat")

    def mlp(self, name: str, bottom: str, widths: Sequence[int]) -> DenseLayer:
        """Return hidden layers with ReLU and the shared options."""
        options = ("dropout", "batch_norm", "layer_norm")
        more: dict[str, Any] = {key: getattr(self, key) for key in options if getattr(self, key)}
        return DenseLayer(name, "MLP", bottom=bottom, num_outputs=list(widths), **more)


class Vectors:
    """The nodes of a lookup, and the names of its output as (B, S, dim) and as (B, S * dim)."""

    def __init__(self, nodes: list[Node], stacked: str, flat: str) -> None:
        self.nodes = nodes
        self.stacked = stacked
        self.flat = flat


ZOO: Final[Registry[type[ZooModel]]] = Registry("zoo model")


def begin(schema: Schema, sparse: Mapping[str, tuple[str, ...]] | str = "cats", **inputs: Any) -> Input:
    """Return the Input: "label", "dense" and the groups of categorical columns, without empty ones.

    Raises:
        SchemaError: the schema does not have exactly one label, or has no categorical columns.
    """
    if len(schema.labels) != 1:
        raise SchemaError(
            "the models of the zoo predict one label",
            value=", ".join(label.name for label in schema.labels) or "no label",
            fix="take mmoe, ple or shared_bottom for several; or choose the columns: "
            "vv.Dataset(path, schema.select([...]))",
        )
    if not schema.categorical:
        raise SchemaError("the models of the zoo need categorical columns", fix="build a graph of dense layers instead")
    groups = sparse if isinstance(sparse, str) else {name: columns for name, columns in sparse.items() if columns}
    return Input(**{"label": "label", "dense": "dense", "sparse": groups, **inputs})


def join(name: str, bottoms: Sequence[str]) -> tuple[list[Node], str]:
    """Return the node that puts tensors side by side and its output; one tensor alone needs none."""
    if len(bottoms) == 1:
        return [], bottoms[0]
    return [DenseLayer(name, "Concat", bottom=list(bottoms))], name


def linear(name: str, bottom: str, **options: Any) -> DenseLayer:
    """Return w . x + b, (B, n) -> (B, 1), that begins with b = 0."""
    return DenseLayer(name, "InnerProduct", bottom=bottom, num_output=1, bias_init_type="zero", **options)


def linear_dense(name: str) -> DenseLayer:
    """Return the linear part of dense columns, which begins at 0 as that of ids does.

    Random weights on a few inputs would be far larger than what small data sets move them by.
    """
    return linear(name, "dense", weight_init_type="zero")


def finish(logits: Sequence[str]) -> list[Node]:
    """Return the nodes that add up logits (B, 1) and compare them with the label."""
    nodes: list[Node] = []
    top = logits[0]
    if len(logits) > 1:
        nodes.append(DenseLayer("logit", "Add", bottom=list(logits)))
        top = "logit"
    nodes.append(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=[top, "label"]))
    return nodes
