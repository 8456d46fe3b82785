"""Wide & Deep: a linear model that remembers beside a deep network that generalises."""

from __future__ import annotations

from pydantic import Field

from viviane.model.nodes import DenseLayer, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, begin, finish, join, linear, linear_dense


@ZOO.register("wide_deep")
class WideDeep(ZooModel):
    """Wide & Deep.

        wide  = sum_i w[id_i] + w_d . dense + b             one number per id: tables of dim 1
        deep  = v . MLP([e_1, ..., e_S, dense]) + c
        logit = wide + deep

    Crossed columns, such as "city_x_device", are made by the ETL and named in `wide`.

    Source: Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems".

    Args:
        deep_mlp: widths of the deep network.
        wide: categorical columns of the linear part; None takes all.
        deep: categorical columns of the deep network; None takes all that are not in `wide`, or all where
            `wide` is None.

    Example:
        >>> columns = [{"name": "a", "num_ids": 9}, {"name": "b", "num_ids": 9}]
        >>> schema = Schema(labels=[{"name": "y"}], categorical=columns)
        >>> WideDeep(wide=["a"]).nodes(schema)[0].sparse
        {'wide_cats': ('a',), 'deep_cats': ('b',)}
    """

    deep_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)
    wide: tuple[str, ...] | None = Field(default=None, min_length=1)
    deep: tuple[str, ...] | None = Field(default=None, min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        wide, deep = self._columns(schema)
        vectors = self.vectors("deep_cats")
        dense = ["dense"] if schema.num_dense else []
        together, deep_input = join("deep_input", [vectors.flat, *dense])
        return [
            begin(schema, {"wide_cats": wide, "deep_cats": deep}),
            self.weights("wide_weights", "wide_cats"),  # (B, S, 1): w[id] of each column
            DenseLayer("wide_flat", "Reshape", bottom="wide_weights", shape=[-1]),
            DenseLayer("wide_sum", "ReduceSum", bottom="wide_flat"),
            *([linear_dense("wide_dense")] if dense else []),
            *vectors.nodes,
            *together,
            self.mlp("deep", deep_input, self.deep_mlp),
            linear("deep_logit", "deep"),
            *finish(["wide_sum", "deep_logit", *(["wide_dense"] if dense else [])]),
        ]

    def _columns(self, schema: Schema) -> tuple[tuple[str, ...], tuple[str, ...]]:
        everything = tuple(column.name for column in schema.categorical)
        for name in (*(self.wide or ()), *(self.deep or ())):
            schema.categorical_column(name)
        wide = everything if self.wide is None else self.wide
        rest = everything if self.wide is None else tuple(name for name in everything if name not in wide)
        return wide, self.deep or rest or everything
