"""DLRM: dot products of all pairs of embeddings."""

from __future__ import annotations

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, finish, join, linear


@ZOO.register("dlrm")
class DLRM(ZooModel):
    """Deep Learning Recommendation Model.

        z_0   = MLP_bottom(dense)                           (B, dim)
        p     = [z_i . z_j for i > j of z_0, e_1, ..., e_S]
        logit = w . MLP_top([z_0, p]) + b                   with concat_embeddings: MLP_top([z_0, p, e_1, ..., e_S])

    Without dense columns there is no bottom network, and no z_0. With a single column and nothing to pair it
    with, the top network reads the embedding itself.

    Source: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems".

    Args:
        bottom_mlp: widths of the bottom network before its last layer, whose width is `dim`.
        top_mlp: widths of the top network before the logit.
        concat_embeddings: let the top network read the embeddings besides their products; small sets without
            dense columns gain by it.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> DLRM(dim=8, bottom_mlp=[32]).nodes(schema)[1].params["num_outputs"]
        [32, 8]
    """

    bottom_mlp: tuple[int, ...] = (256, 64)
    top_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    concat_embeddings: bool = False

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        vectors = self.vectors()
        dense: list[str] = []
        nodes: list[Node] = [begin(schema)]
        if schema.num_dense:
            nodes.append(self.mlp("bottom", "dense", [*self.bottom_mlp, self.dim]))
            dense = ["bottom"]
        if dense or len(schema.categorical) > 1:
            # The pairs read (B, S, dim), not the flat form.
            nodes += vectors.nodes if self.concat_embeddings else vectors.nodes[:-1]
            nodes.append(DenseLayer("pairs", "Interaction", bottom=[*dense, vectors.stacked], pad=False))
            together, top_input = join("top_input", ["pairs", *([vectors.flat] if self.concat_embeddings else [])])
            nodes += together
        else:
            nodes += vectors.nodes
            top_input = vectors.flat
        return [*nodes, self.mlp("top", top_input, self.top_mlp), linear("logit", "top"), *finish(["logit"])]
