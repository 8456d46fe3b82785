"""Neural collaborative filtering: GMF, MLP and NeuMF."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, finish, linear
from viviane.zoo.roles import user_and_item


@ZOO.register("ncf")
class NCF(ZooModel):
    """Neural collaborative filtering, from the ids of user and item alone.

        gmf     logit = w . (p_u * q_i) + b                       a matrix factorisation with weights
        mlp     logit = w . MLP([p_u, q_i]) + b
        neumf   logit = w . [p_u * q_i, MLP([p'_u, q'_i])] + b    each part with tables of its own

    Source: He et al. 2017, "Neural Collaborative Filtering".

    Args:
        user, item: columns of one id; left out, the schema's two categorical columns, in order.
        structure: "gmf", "mlp" or "neumf".
        mlp_layers: widths of the MLP part.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "user_id", "num_ids": 9}, {"name": "movie_id", "num_ids": 5}])
        >>> [node.name for node in NCF(structure="gmf").nodes(schema)[3:]]
        ['gmf_user_flat', 'gmf_item_flat', 'gmf', 'logit', 'loss']
    """

    user: str | None = None
    item: str | None = None
    structure: Literal["gmf", "mlp", "neumf"] = "neumf"
    mlp_layers: tuple[int, ...] = Field(default=(64, 32, 16), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        user, item = user_and_item(schema, self.user, self.item)
        # The Input names the columns that are read, so that the schema may have others.
        nodes: list[Node] = [begin(schema, {"user": (user,), "item": (item,)}, dense={})]
        parts = ["gmf", "mlp"] if self.structure == "neumf" else [self.structure]
        for part in parts:
            nodes += self._lookups(part)
            pair = [f"{part}_user_flat", f"{part}_item_flat"]
            if part == "gmf":
                nodes.append(DenseLayer("gmf", "ElementwiseMultiply", pair))
            else:
                nodes += [DenseLayer("pair", "Concat", pair), self.mlp("mlp", "pair", self.mlp_layers)]
        if len(parts) > 1:
            nodes.append(DenseLayer("both", "Concat", parts))
        return [*nodes, linear("logit", "both" if len(parts) > 1 else parts[0]), *finish(["logit"])]

    def _lookups(self, part: str) -> list[Node]:
        """Return the nodes of the part's own tables and their vectors, (B, dim)."""
        roles = ("user", "item")
        nodes: list[Node] = [self.embedding(f"{part}_{role}", role, self.dim) for role in roles]
        for role in roles:
            vector = f"{part}_{role}"
            if self.embedding_dropout:
                nodes.append(DenseLayer(f"{vector}_drop", "Dropout", vector, dropout_rate=self.embedding_dropout))
                vector = f"{vector}_drop"
            nodes.append(DenseLayer(f"{part}_{role}_flat", "Reshape", vector, shape=[-1]))
        return nodes
