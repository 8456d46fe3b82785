"""Self-Attentive Sequential Recommendation: a causal transformer over the history."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.next_item import NextItemModel
from viviane.zoo.recipe import ZOO


@ZOO.register("sasrec")
class SASRec(NextItemModel):
    """Self-Attentive Sequential Recommendation.

        x_0    = [h_1, ..., h_L] + P                               (B, L, dim), P counted back from the newest item
        s      = x + W_o MultiHead(q, k, v)                        q, k, v = W LN(x); causal, empty places left out
        x_next = s + W_2 act(W_1 LN(s))                            num_blocks times
        states = LN(x)

    The loss is a softmax over items in place of the paper's one negative, which later work found far better; see
    `NextItemModel` for it, the roles and the vectors.

    Source: Kang and McAuley 2018, "Self-Attentive Sequential Recommendation"; Klenitskiy and Vasilev 2023, "Turning
    Dross Into Gold Loss: is BERT4Rec really better than SASRec?".

    Args:
        ffn_dim: width of the hidden layer W_1; None takes 4 dim.
        activation: act, "relu" or "silu".

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> [node.name for node in SASRec(dim=8).nodes(schema)[-5:]]
        ['states', 'user_vector', 'item_vector', 'softmax', 'loss']
    """

    ffn_dim: int | None = Field(default=None, ge=1)
    activation: Literal["relu", "silu"] = "relu"

    def encoder(self, x: str, schema: Schema) -> tuple[list[Node], str]:
        """Return the nodes of the transformer."""
        nodes: list[Node] = [
            DenseLayer("pairs", "CausalMask", "held"),
            DenseLayer("x_0", "PositionEmbedding", [x, "held"]),
        ]
        for i in range(self.num_blocks):
            nodes += self._block(i)
        return [*nodes, DenseLayer("states", "LayerNorm", f"x_{self.num_blocks}")], "states"

    def _block(self, i: int) -> list[Node]:
        nodes: list[Node] = [DenseLayer(f"attend_{i}", "LayerNorm", f"x_{i}")]
        heads = [f"q_{i}", f"k_{i}", f"v_{i}"]
        nodes += [self._linear(head, f"attend_{i}", self.dim) for head in heads]
        nodes += [
            DenseLayer(f"heads_{i}", "MultiHeadAttention", [*heads, "pairs"], num_attention_heads=self.num_heads),
            self._linear(f"o_{i}", f"heads_{i}", self.dim),
        ]
        nodes.append(DenseLayer(f"s_{i}", "Add", [f"x_{i}", self._thin(nodes, f"o_{i}", self.dropout)]))
        nodes += [
            DenseLayer(f"feed_{i}", "LayerNorm", f"s_{i}"),
            self._linear(f"ffn_{i}", f"feed_{i}", self.ffn_dim or 4 * self.dim),
            DenseLayer(f"ffn_{i}_act", "ReLU" if self.activation == "relu" else "SiLU", f"ffn_{i}"),
        ]
        hidden = self._thin(nodes, f"ffn_{i}_act", self.dropout)
        nodes.append(self._linear(f"ffn_{i}_out", hidden, self.dim))
        nodes.append(DenseLayer(f"x_{i + 1}", "Add", [f"s_{i}", self._thin(nodes, f"ffn_{i}_out", self.dropout)]))
        return nodes

    def _linear(self, name: str, x: str, width: int) -> DenseLayer:
        return DenseLayer(name, "InnerProduct", x, num_output=width, bias_init_type="zero")
