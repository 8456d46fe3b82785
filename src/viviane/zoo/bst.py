"""Behavior Sequence Transformer: self-attention over the history with the target at its end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.history import HistoryModel
from viviane.zoo.recipe import ZOO, join


@ZOO.register("bst")
class BST(HistoryModel):
    """Behavior Sequence Transformer.

        x_0     = [h_1, ..., h_L, t] + P                             (B, L + 1, n), P counted back from the target
        s       = LN(x + W_o MultiHead(W_q x, W_k x, W_v x))         over the places that hold an item
        x_next  = LN(s + W_2 relu(W_1 s))                            num_blocks times
        logit   = u . MLP([x, e_1, ..., e_S, dense]) + c             x flat, zeros in empty places

    P is learned for each place; the paper takes the time between event and target, and leaky ReLU. n is dim times the
    number of histories.

    Source: Chen et al. 2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba".

    Args:
        num_blocks: number of transformer blocks.
        num_heads: number of attention heads; divides n.
        ffn_dim: width of the hidden layer W_1; None takes 4 n.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist_items", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> [node.name for node in BST(dim=8, num_heads=2).nodes(schema)[-5:]]
        ['x_held', 'x_flat', 'top', 'logit', 'loss']
    """

    top_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    activation: Literal["dice", "relu"] = "relu"
    num_blocks: int = Field(default=1, ge=1)
    num_heads: int = Field(default=4, ge=1)
    ffn_dim: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_heads(self) -> BST:
        if self.dim % self.num_heads and self.history is None:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        return self

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, pairs, length = self.start(schema, "concat")
        if len(pairs) > 1:
            nodes.append(DenseLayer("sequence", "Concat", pairs, axis=2))
        _, sequence = join("sequence", pairs)
        nodes += [
            DenseLayer("mask", "Reshape", "places", shape=[1, 1, length + 1]),
            DenseLayer("x_0", "PositionEmbedding", [sequence, "places"]),
        ]
        for i in range(self.num_blocks):
            nodes += self._block(i, self.dim * len(pairs))
        return [
            *nodes,
            DenseLayer("x_held", "MaskPlaces", [f"x_{self.num_blocks}", "places"]),
            DenseLayer("x_flat", "Reshape", "x_held", shape=[-1]),
            *self.top(schema, ["x_flat"]),
        ]

    def _block(self, i: int, width: int) -> list[Node]:
        x = f"x_{i}"
        nodes: list[Node] = []
        for part in ("q", "k", "v"):
            nodes.append(DenseLayer(f"{part}_{i}", "InnerProduct", x, num_output=width))
        heads = [f"q_{i}", f"k_{i}", f"v_{i}", "mask"]
        nodes += [
            DenseLayer(f"heads_{i}", "MultiHeadAttention", heads, num_attention_heads=self.num_heads),
            DenseLayer(f"o_{i}", "InnerProduct", f"heads_{i}", num_output=width),
        ]
        nodes += self._add_and_normalise(f"s_{i}", x, f"o_{i}")
        nodes += [
            DenseLayer(f"ffn_{i}", "InnerProduct", f"s_{i}", num_output=self.ffn_dim or 4 * width),
            DenseLayer(f"ffn_{i}_relu", "ReLU", f"ffn_{i}"),
            DenseLayer(f"ffn_{i}_out", "InnerProduct", f"ffn_{i}_relu", num_output=width),
        ]
        return [*nodes, *self._add_and_normalise(f"x_{i + 1}", f"s_{i}", f"ffn_{i}_out")]

    def _add_and_normalise(self, name: str, x: str, more: str) -> list[Node]:
        """Return LN(x + dropout(more))."""
        nodes: list[Node] = []
        if self.dropout:
            nodes.append(DenseLayer(f"{more}_drop", "Dropout", more, dropout_rate=self.dropout))
            more = f"{more}_drop"
        return [*nodes, DenseLayer(f"{name}_sum", "Add", [x, more]), DenseLayer(name, "LayerNorm", f"{name}_sum")]
