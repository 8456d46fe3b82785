"""Deep & Cross Networks, the first and the second version."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, finish, join, linear


class _CrossModel(ZooModel):
    num_cross_layers: int = Field(default=3, ge=1)
    deep_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)

    def _start(self, schema: Schema) -> tuple[list[Node], str]:
        """Return the nodes up to x_0 = [embeddings, dense], (B, n), and its name."""
        vectors = self.vectors()
        dense = ["dense"] if schema.num_dense else []
        together, top = join("x0", [vectors.flat, *dense])
        return [begin(schema), *vectors.nodes, *together], top


@ZOO.register("dcn")
class DCN(_CrossModel):
    """Deep & Cross Network: explicit crosses of bounded degree beside a deep network.

        x_0   = [e_1, ..., e_S, dense]                          (B, n)
        cross   x_{l+1} = x_0 (x_l . w_l) + b_l + x_l           num_cross_layers times
        deep    h = MLP(x_0)
        logit = w . [cross, h] + b

    Source: Wang, Fu, Fu and Wang 2017, "Deep & Cross Network for Ad Click Predictions".

    Args:
        num_cross_layers: number of cross layers; the crosses reach degree num_cross_layers + 1.
        deep_mlp: widths of the deep network.

    Example:
        >>> [node.name for node in DCN().nodes(Schema(
        ...     labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}]))[1:]]
        ['emb', 'emb_flat', 'cross', 'deep', 'both', 'logit', 'loss']
    """

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, x0 = self._start(schema)
        return [
            *nodes,
            DenseLayer("cross", "MultiCross", bottom=x0, num_layers=self.num_cross_layers),
            self.mlp("deep", x0, self.deep_mlp),
            DenseLayer("both", "Concat", bottom=["cross", "deep"]),
            linear("logit", "both"),
            *finish(["logit"]),
        ]


@ZOO.register("dcn_v2")
class DCNv2(_CrossModel):
    """Deep & Cross Network v2: crosses weighted by a matrix instead of a vector.

        x_0   = [e_1, ..., e_S, dense]                          (B, n)
        cross   x_{l+1} = x_0 * (W_l x_l + b_l) + x_l           W_l (n, n), or V_l U_l of rank `rank`
        parallel   logit = w . [cross, MLP(x_0)] + b
        stacked    logit = w . MLP(cross) + b

    Source: Wang et al. 2021, "DCN V2: Improved Deep & Cross Network".

    Args:
        num_cross_layers: number of cross layers.
        rank: of the cross layers' matrices; 0 takes whole (n, n) matrices.
        structure: "parallel" or "stacked".
        deep_mlp: widths of the deep network.

    Example:
        >>> DCNv2(structure="stacked", rank=8).structure
        'stacked'
    """

    rank: int = Field(default=0, ge=0)
    structure: Literal["parallel", "stacked"] = "parallel"

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, x0 = self._start(schema)
        form = {"projection_dim": self.rank} if self.rank else {"full_rank": True}
        nodes.append(DenseLayer("cross", "MultiCross", bottom=x0, num_layers=self.num_cross_layers, **form))
        if self.structure == "stacked":
            return [*nodes, self.mlp("deep", "cross", self.deep_mlp), linear("logit", "deep"), *finish(["logit"])]
        return [
            *nodes,
            self.mlp("deep", x0, self.deep_mlp),
            DenseLayer("both", "Concat", bottom=["cross", "deep"]),
            linear("logit", "both"),
            *finish(["logit"]),
        ]
