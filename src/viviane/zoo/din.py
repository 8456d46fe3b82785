"""Deep Interest Network: a history weighed by how each of its items fits the target."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.history import HistoryModel
from viviane.zoo.recipe import ZOO, linear


@ZOO.register("din")
class DIN(HistoryModel):
    """Deep Interest Network.

        h_1, ..., h_L, t                                         vectors of the history and of the target, one table
        a_i   = w . MLP_att([h_i, t, h_i - t, h_i * t]) + b      the activation unit, the same for all i
        v     = sum_i a_i h_i                                    over the places that hold an item
        logit = u . MLP_top([v, t, e_1, ..., e_S, dense]) + c

    The paper's weights are not normalised; "softmax" makes them sum to 1. Several histories, such as items and their
    categories, are side by side in h and t. With pooling "mean" v is the mean of the history, as in the paper's
    base model.

    Source: Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction".

    Args:
        pooling: "sum" or "softmax" of the attention, or "mean" without one.
        attention_mlp: widths of the activation unit.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist_items", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}, {"name": "user", "num_ids": 5}])
        >>> DIN(history="hist_items", target="item").nodes(schema)[0].sparse
        {'pair_0': ('hist_items', 'item'), 'cats': ('user',)}
    """

    pooling: Literal["sum", "softmax", "mean"] = "sum"
    attention_mlp: tuple[int, ...] = Field(default=(80, 40), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        if self.pooling == "mean":
            nodes, pairs, _ = self.start(schema, "mean")
            flat = [f"{name}_flat" for name in pairs]
            nodes += [DenseLayer(a, "Reshape", b, shape=[-1]) for a, b in zip(flat, pairs, strict=True)]
            return [*nodes, *self.top(schema, flat)]
        nodes, pairs, length = self.start(schema, "concat")
        width = self.dim * len(pairs)
        return [
            *nodes,
            DenseLayer("split", "FusedReshapeConcat", pairs, ["h", "t"]),  # (L B, width), (B, width)
            *self.network("unit", ["h", "t"], self.attention_mlp, thin=False, product="PairInnerProduct"),
            linear("a_rows", "unit"),
            DenseLayer("a", "Reshape", "a_rows", leading_dim=length),  # (B, L)
            DenseLayer("held", "Slice", "places", ranges=[[0, length]]),
            *self._weights(),
            DenseLayer("h_places", "Reshape", "h", leading_dim=width, time_step=length),  # (B, L, width)
            DenseLayer("v", "MatrixMultiply", ["weights", "h_places"]),
            *self.top(schema, ["v", "t"]),
        ]

    def _weights(self) -> list[Node]:
        if self.pooling == "sum":
            return [DenseLayer("weights", "ElementwiseMultiply", ["a", "held"])]
        # An empty history has no masked softmax to speak of; its vectors are zeros, and so is their sum.
        return [DenseLayer("weights", "Softmax", ["a", "held"])]
