"""Behavior Sequence Transformer: self-attention over the history with the target at its end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from viviane.core.errors import SchemaError
from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.history import Activation, HistoryModel
from viviane.zoo.recipe import ZOO, join
from viviane.zoo.roles import Pair, history_pairs, one_id


@ZOO.register("bst")
class BST(HistoryModel):
    """Behavior Sequence Transformer.

        x_0     = [h_1, ..., h_L, t] + P                             (B, L + 1, n)
        s       = LN(x + W_o MultiHead(W_q x, W_k x, W_v x))         over the places that hold an item
        x_next  = LN(s + W_2 leaky(W_1 s))                           num_blocks times
        logit   = u . MLP([z, e_1, ..., e_S, dense]) + c

    P is a vector for the time between event and target, of its logarithm, where `times` names columns of times, as in
    the paper; otherwise one for each place, counted back from the target. n is dim times the number of histories.

    Source: Chen et al. 2019, "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba".

    Args:
        pooling: z; "concat" is the paper's, all places x side by side, zeros in empty ones; "mean" is the mean of x
            over the places, x of the target, and t, which small data needs: it has (L + 1) / 3 times fewer weights.
        num_blocks: number of transformer blocks.
        num_heads: number of attention heads; divides n.
        ffn_dim: width of the hidden layer W_1; None takes 4 n.
        times: columns of the events' times, a sequence of the history's length, and of the target's time, raw ids
            in any unit; None takes places.
        time_unit: time in the columns' unit below which ages are one, such as 3600 where they are in seconds.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist_items", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> [node.name for node in BST(dim=8, num_heads=2).nodes(schema)[-8:-5]]
        ['x_held', 'x_flat', 'top_0']
    """

    top_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    activation: Activation = "leaky_relu"
    pooling: Literal["concat", "mean"] = "concat"
    num_blocks: int = Field(default=1, ge=1)
    num_heads: int = Field(default=4, ge=1)
    ffn_dim: int | None = Field(default=None, ge=1)
    times: tuple[str, str] | None = None
    time_unit: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check_heads(self) -> BST:
        if self.dim % self.num_heads and self.history is None:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        return self

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, pairs, length = self.start(schema, "concat", self._times(schema))
        if len(pairs) > 1:
            nodes.append(DenseLayer("sequence", "Concat", pairs, axis=2))
        _, sequence = join("sequence", pairs)
        nodes.append(DenseLayer("mask", "Reshape", "places", shape=[1, 1, length + 1]))
        if self.times is None:
            nodes.append(DenseLayer("x_0", "PositionEmbedding", [sequence, "places"]))
        else:
            nodes.append(DenseLayer("x_0", "TimeEmbedding", [sequence, "times"], unit=self.time_unit))
        for i in range(self.num_blocks):
            nodes += self._block(i, self.dim * len(pairs))
        pooled, fields = self._pool(f"x_{self.num_blocks}", sequence, length)
        return [*nodes, *pooled, *self.top(schema, fields, self.times or ())]

    def pairs(self, schema: Schema) -> list[Pair]:
        """Return each history with its target; the times are no history."""
        if self.times is None or self.history is not None:
            return super().pairs(schema)
        names = [one.name for one in schema.categorical if one.kind == "sequence" and one.name != self.times[0]]
        return history_pairs(schema, names or None, self.target)

    def _times(self, schema: Schema) -> dict[str, tuple[str, ...]]:
        """Return the group of the times, checked against the history."""
        if self.times is None:
            return {}
        events, target = self.times
        length = self.pairs(schema)[0][0].max_length
        column = schema.categorical_column(events)
        if column.kind == "one_hot" or column.max_length != length:
            fix = f"give it kind 'sequence' and max_length {length} in the schema"
            raise SchemaError("the events' times are a column as long as the history", value=events, fix=fix)
        return {"times": (events, one_id(schema, target, "times").name)}

    def _pool(self, x: str, sequence: str, length: int) -> tuple[list[Node], list[str]]:
        """Return the nodes from the places' vectors to what the top reads, and their outputs."""
        if self.pooling == "concat":
            held = DenseLayer("x_held", "MaskPlaces", [x, "places"])
            return [held, DenseLayer("x_flat", "Reshape", "x_held", shape=[-1])], ["x_flat"]
        return [
            DenseLayer("x_mean", "MeanPlaces", [x, "places"]),
            DenseLayer("x_target", "Reshape", x, selected=[length]),
            DenseLayer("t", "Reshape", sequence, selected=[length]),
        ], ["x_mean", "x_target", "t"]

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
            DenseLayer(f"ffn_{i}_act", "LeakyReLU", f"ffn_{i}"),
            DenseLayer(f"ffn_{i}_out", "InnerProduct", f"ffn_{i}_act", num_output=width),
        ]
        return [*nodes, *self._add_and_normalise(f"x_{i + 1}", f"s_{i}", f"ffn_{i}_out")]

    def _add_and_normalise(self, name: str, x: str, more: str) -> list[Node]:
        """Return LN(x + dropout(more))."""
        nodes: list[Node] = []
        if self.dropout:
            nodes.append(DenseLayer(f"{more}_drop", "Dropout", more, dropout_rate=self.dropout))
            more = f"{more}_drop"
        return [*nodes, DenseLayer(f"{name}_sum", "Add", [x, more]), DenseLayer(name, "LayerNorm", f"{name}_sum")]
