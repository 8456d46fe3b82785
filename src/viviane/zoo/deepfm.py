"""DeepFM: a factorisation machine and a deep network over the same embeddings."""

from __future__ import annotations

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, finish, join, linear, linear_dense


@ZOO.register("deepfm")
class DeepFM(ZooModel):
    """DeepFM.

        v     = e_1, ..., e_S, and x_j a_j of each dense number x_j        (S + N vectors of width dim)
        first = sum_i w[id_i] + w_d . dense + b
        pairs = sum_{i < j} v_i . v_j
        deep  = u . MLP([v]) + c
        logit = first + pairs + deep

    Source: Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction".

    Args:
        deep_mlp: widths of the deep network.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> [node.name for node in DeepFM().nodes(schema) if node.node == "SparseEmbedding"]
        ['first_weights', 'emb']
    """

    deep_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        vectors = self.vectors()
        numbers = schema.num_dense
        nodes: list[Node] = [
            begin(schema),
            self.weights("first_weights", "cats"),  # (B, S, 1): w[id] of each column
            DenseLayer("first_flat", "Reshape", bottom="first_weights", shape=[-1]),
            DenseLayer("first_sum", "ReduceSum", bottom="first_flat"),
            *vectors.nodes,
        ]
        fields = [vectors.flat]
        if numbers:
            nodes.append(linear_dense("first_dense"))
            # Small at first, as the tables are; else the pairs of dense vectors drown the rest.
            vectors_of = {"weight_dims": [numbers, self.dim], "weight_init_type": "uniform"}
            nodes.append(DenseLayer("dense_vectors", "WeightMultiply", bottom="dense", params=vectors_of))
            fields.append("dense_vectors")
        together, v = join("fields", fields)
        return [
            *nodes,
            *together,
            DenseLayer("fm", "FmOrder2", bottom=v, out_dim=self.dim),
            DenseLayer("pairs", "ReduceSum", bottom="fm"),
            self.mlp("deep", v, self.deep_mlp),
            linear("deep_logit", "deep"),
            *finish(["first_sum", "pairs", "deep_logit", *(["first_dense"] if numbers else [])]),
        ]
