"""Hierarchical Sequential Transduction Units: attention without a softmax, gated."""

from __future__ import annotations

from pydantic import Field

from viviane.core.errors import SchemaError
from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.next_item import NextItemModel
from viviane.zoo.recipe import ZOO
from viviane.zoo.roles import Names


@ZOO.register("hstu")
class HSTU(NextItemModel):
    """Hierarchical Sequential Transduction Units, as a model of the next item.

        x_0        = [h_1, ..., h_L] + P                                    (B, L, dim)
        u, v, q, k = silu(W LN(x))
        a_i        = (1 / L) sum over j <= i of silu(q_i . k_j + p[i - j] + r[bucket(t_i - t_j)]) v_j
        x_next     = x + W_o (LN(a) * u)                                    num_blocks times
        states     = LN(x)

    There is no feed-forward network: the gate u does its work. The time bias r is there where `times` names the events'
    times. See `viviane.nn.PointwiseAttention` for the attention, which on a GPU is one kernel, and `NextItemModel` for
    the loss, the roles and the vectors.

    Source: Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
    Recommendations".

    Args:
        head_dim: width of a head's queries and keys; None takes dim / num_heads.
        value_dim: width of a head's values and gates; None takes dim / num_heads.
        times: column of the events' times, a sequence of raw ids as long as the history.
        time_unit: time in the column's unit below which ages are one, such as 3600 where it is in seconds.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "hist", "num_ids": 9, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        ...     {"name": "item", "num_ids": 9}])
        >>> [node.name for node in HSTU(dim=8, num_blocks=1).nodes(schema)[5:12]]
        ['norm_0', 'uvqk_0', 'uvqk_0_act', 'split_0', 'a_0', 'a_0_norm', 'gated_0']
    """

    head_dim: int | None = Field(default=None, ge=1)
    value_dim: int | None = Field(default=None, ge=1)
    times: str | None = None
    time_unit: int = Field(default=1, ge=1)

    def other_sequences(self) -> tuple[str, ...]:
        """Return the times, which are no history."""
        return () if self.times is None else (self.times,)

    def more_inputs(self, schema: Schema) -> dict[str, Names]:
        """Return the group of the times, checked against the history."""
        if self.times is None:
            return {}
        history, _ = self.pair(schema)
        column = schema.categorical_column(self.times)
        if column.kind == "one_hot" or column.max_length != history.max_length:
            fix = f"give it kind 'sequence' and max_length {history.max_length} in the schema"
            raise SchemaError("the events' times are a column as long as the history", value=self.times, fix=fix)
        return {"times": (self.times,)}

    def encoder(self, x: str, schema: Schema) -> tuple[list[Node], str]:
        """Return the nodes of the blocks."""
        nodes: list[Node] = [DenseLayer("x_0", "PositionEmbedding", [x, "held"])]
        for i in range(self.num_blocks):
            nodes += self._block(i)
        return [*nodes, DenseLayer("states", "LayerNorm", f"x_{self.num_blocks}")], "states"

    def _block(self, i: int) -> list[Node]:
        keys = self.num_heads * (self.head_dim or self.dim // self.num_heads)
        values = self.num_heads * (self.value_dim or self.dim // self.num_heads)
        ends = [values, 2 * values, 2 * values + keys, 2 * values + 2 * keys]
        ranges = [[0 if end == values else ends[k - 1], end] for k, end in enumerate(ends)]
        u, v, q, k = parts = [f"{part}_{i}" for part in "uvqk"]
        params: dict[str, object] = {"num_attention_heads": self.num_heads}
        times = []
        if self.times is not None:
            params["unit"], times = self.time_unit, ["times"]
        nodes: list[Node] = [
            DenseLayer(f"norm_{i}", "LayerNorm", f"x_{i}"),
            DenseLayer(f"uvqk_{i}", "InnerProduct", f"norm_{i}", num_output=ends[-1], bias_init_type="zero"),
            DenseLayer(f"uvqk_{i}_act", "SiLU", f"uvqk_{i}"),
            DenseLayer(f"split_{i}", "Slice", f"uvqk_{i}_act", parts, ranges=ranges),
            DenseLayer(f"a_{i}", "PointwiseAttention", [q, k, v, "held", *times], params=params),
            DenseLayer(f"a_{i}_norm", "LayerNorm", f"a_{i}"),
            DenseLayer(f"gated_{i}", "ElementwiseMultiply", [f"a_{i}_norm", u]),
        ]
        gated = self._thin(nodes, f"gated_{i}", self.dropout)
        nodes.append(DenseLayer(f"o_{i}", "InnerProduct", gated, num_output=self.dim, bias_init_type="zero"))
        return [*nodes, DenseLayer(f"x_{i + 1}", "Add", [f"x_{i}", f"o_{i}"])]
