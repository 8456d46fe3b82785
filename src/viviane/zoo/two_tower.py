"""Two towers: a vector of the user, a vector of the item, and their product."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from viviane.core.errors import SchemaError
from viviane.model.nodes import DenseLayer, Node, SparseEmbedding
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, join
from viviane.zoo.roles import Names, one_id, split_kinds

_RAW_ID_BUCKETS = 2**20


@ZOO.register("two_tower")
class TwoTower(ZooModel):
    """Two-tower retrieval, trained to pick a row's item out of the batch's.

        u = normalise(W_u MLP_u([e of the user's columns, dense]))       "user_vector", (B, out_dim)
        v = normalise(W_v MLP_v([e of the item's columns, dense]))       "item_vector", (B, out_dim)
        s_bj = u_b . v_j / temperature                                   the candidates j are the items of the batch
        loss = -mean_b y_b log softmax_j(s_bj - log q_j)_b

    q_j, how often item j comes up in a batch, is estimated while training (`LogFrequency`), so that popular items are
    not pushed away for being seen often. Rows of label 0 only give candidates. The prediction of a row is sigmoid(s).
    `Model.tensor("user_vector", rows)` and "item_vector" give the vectors for retrieval.

    With `negatives`, a bag column of sampled items with max_length K, the batch's B K samples are candidates too, or
    with in_batch False the only ones; the item tower then reads the item's id alone, and "item_vector" is (B, 1 + K,
    out_dim), the row's item first.

    Source: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"; Yang et
    al. 2020, "Mixed Negative Sampling".

    Args:
        user, item: categorical and dense columns of each tower; the item's first one is its id.
        negatives: column of sampled item ids, of the item's vocabulary.
        in_batch: whether the batch's other items are candidates.
        correct_bias: subtract log q.
        rate: weight of the newest gap in the estimate of q.
        temperature: divides the products of the unit vectors.
        out_dim: width of the vectors.
        user_mlp, item_mlp: widths of the hidden layers.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "user_id", "num_ids": 9}, {"name": "movie_id", "num_ids": 5}])
        >>> [node.name for node in TwoTower(user="user_id", item="movie_id").nodes(schema)[-5:]]
        ['item_out', 'item_vector', 'log_q', 'softmax', 'loss']
    """

    user: Names = Field(min_length=1)
    item: Names = Field(min_length=1)
    negatives: str | None = None
    in_batch: bool = True
    correct_bias: bool = True
    rate: float = Field(default=0.01, gt=0, le=1)
    temperature: float = Field(default=0.1, gt=0)
    out_dim: int = Field(default=32, ge=1)
    user_mlp: tuple[int, ...] = Field(default=(128,), min_length=1)
    item_mlp: tuple[int, ...] = Field(default=(128,), min_length=1)

    @model_validator(mode="after")
    def _check(self) -> TwoTower:
        if not self.in_batch and self.negatives is None:
            raise ValueError("without in_batch the candidates are sampled negatives: name their column in negatives")
        return self

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        ids = one_id(schema, self.item[0], "item")
        (user, user_dense), (item, item_dense) = split_kinds(schema, self.user, "user"), self._items(schema)
        both = set(self.user).intersection(self.item)
        if both:
            raise SchemaError("a column belongs to one tower", value=", ".join(sorted(both)), fix="name it once")
        dense = {name: columns for name, columns in (("user_x", user_dense), ("item_x", item_dense)) if columns}
        candidates = item if self.negatives else (ids.name,)
        nodes: list[Node] = [begin(schema, {"user": user, "item": item, "ids": candidates}, dense=dense)]
        nodes += self._tower("user", "user_x" in dense, self.user_mlp)
        places = 1 + (schema.categorical_column(self.negatives).max_length or 0 if self.negatives else 0)
        nodes += self._tower("item", "item_x" in dense, self.item_mlp, places)
        inputs = ["user_vector", "item_vector", "ids"]
        if self.correct_bias:
            first = 0 if self.in_batch else 1  # the frequency among the candidates
            counts = {"num_buckets": ids.num_ids or _RAW_ID_BUCKETS, "rate": self.rate, "first_counted": first}
            nodes.append(DenseLayer("log_q", "LogFrequency", "ids", params=counts))
            inputs.append("log_q")
        score = {"temperature": self.temperature, "in_batch": self.in_batch}
        return [
            *nodes,
            DenseLayer("softmax", "SampledSoftmax", inputs, params=score),
            DenseLayer("loss", "SampledSoftmaxLoss", ["softmax", "label"]),
        ]

    def _items(self, schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
        sparse, dense = split_kinds(schema, self.item, "item")
        if self.negatives is None:
            return sparse, dense
        bag, ids = schema.categorical_column(self.negatives), schema.categorical_column(sparse[0])
        if len(self.item) > 1 or bag.table != ids.table or bag.kind == "one_hot" or bag.max_length is None:
            fix = "give the column max_length and the item's vocabulary, and the item tower the item's id alone"
            raise SchemaError("sampled negatives are a bag of the item's ids", value=self.negatives, fix=fix)
        return (*sparse, self.negatives), ()

    def _tower(self, role: str, has_dense: bool, widths: Sequence[int], places: int = 1) -> list[Node]:
        """Return the nodes from a role's columns to its unit vectors, (B, out_dim) or (B, places, out_dim)."""
        vectors = f"{role}_emb"
        nodes: list[Node] = [
            SparseEmbedding(
                vectors, role, self.dim, combiner="concat" if places > 1 else self.combiner, init=self.init,
                out_of_range=self.out_of_range, dynamic=self.dynamic,
            )
        ]  # fmt: skip
        if self.embedding_dropout:
            nodes.append(DenseLayer(f"{vectors}_drop", "Dropout", vectors, dropout_rate=self.embedding_dropout))
            vectors = f"{vectors}_drop"
        # Apart, every candidate is a row of its own, so that one tower makes them all.
        form = {"leading_dim": self.dim} if places > 1 else {"shape": [-1]}
        nodes.append(DenseLayer(f"{role}_flat", "Reshape", vectors, params=form))
        together, x = join(f"{role}_input", [f"{role}_flat", *([f"{role}_x"] if has_dense else [])])
        out = f"{role}_rows" if places > 1 else f"{role}_vector"
        nodes += [
            *together,
            self.mlp(f"{role}_mlp", x, widths),
            DenseLayer(f"{role}_out", "InnerProduct", f"{role}_mlp", num_output=self.out_dim, bias_init_type="zero"),
            DenseLayer(out, "L2Normalize", f"{role}_out"),
        ]
        if places > 1:
            back = {"leading_dim": self.out_dim, "time_step": places}
            nodes.append(DenseLayer(f"{role}_vector", "Reshape", out, params=back))
        return nodes
