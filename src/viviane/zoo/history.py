"""What the models of histories have in common: the roles, and the part that is the same whatever reads the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, model_validator

from viviane.model.nodes import DenseLayer, Node, SparseEmbedding
from viviane.schema import Schema
from viviane.zoo.recipe import ZooModel, begin, finish, join, linear
from viviane.zoo.roles import Names, Pair, history_pairs, others

Activation: TypeAlias = Literal["dice", "relu", "leaky_relu"]


class HistoryModel(ZooModel):
    """Base of the models that compare a target with a history.

    Args:
        history: columns of several ids, of one max_length, such as items and their categories; None takes the
            schema's sequences.
        target: for each history the column of one id of the same vocabulary; None finds it by the vocabulary.
        top_mlp: widths of the network over everything.
        activation: of the networks: "dice", whose switch follows the data, "relu" or "leaky_relu".
    """

    history: Names | None = Field(default=None, min_length=1)
    target: Names | None = Field(default=None, min_length=1)
    top_mlp: tuple[int, ...] = Field(default=(200, 80), min_length=1)
    activation: Activation = "dice"

    @model_validator(mode="after")
    def _check(self) -> HistoryModel:
        if self.activation == "dice" and (self.batch_norm or self.layer_norm):
            raise ValueError("dice normalises over the batch itself: leave batch_norm and layer_norm out, or take relu")
        return self

    def pairs(self, schema: Schema) -> list[Pair]:
        """Return each history with its target."""
        return history_pairs(schema, self.history, self.target)

    def start(
        self, schema: Schema, combiner: Literal["concat", "mean"], ids: Mapping[str, tuple[str, ...]] | None = None
    ) -> tuple[list[Node], list[str], int]:
        """Return the Input and the lookups, the tensors of the pairs, and the histories' length L.

        A "concat" gives (B, L + 1, dim) for each pair, the target at the end, and "places", its mask; a "mean" gives
        (B, 2, dim), the mean of the history and the target. The groups in `ids` are read as they are, not looked up.
        """
        pairs = self.pairs(schema)
        groups = {f"pair_{i}": (a.name, b.name) for i, (a, b) in enumerate(pairs)}
        ids = ids or {}
        rest = others(schema, [name for group in (*groups.values(), *ids.values()) for name in group])
        nodes: list[Node] = [begin(schema, {**groups, **ids, "cats": rest})]
        for i, group in enumerate(groups):
            mask = {"mask": "places"} if combiner == "concat" and i == 0 else {}
            nodes.append(
                SparseEmbedding(
                    f"{group}_emb", group, self.dim, combiner=combiner, init=self.init,
                    out_of_range=self.out_of_range, dynamic=self.dynamic, **cast(dict[str, Any], mask),
                )
            )  # fmt: skip
        tensors = [f"{group}_emb" for group in groups]
        if self.embedding_dropout:
            thinned = [f"{name}_drop" for name in tensors]
            rate = self.embedding_dropout
            nodes += [DenseLayer(a, "Dropout", b, dropout_rate=rate) for a, b in zip(thinned, tensors, strict=True)]
            tensors = thinned
        return nodes, tensors, pairs[0][0].max_length or 0

    def top(self, schema: Schema, fields: list[str], used: Sequence[str] = ()) -> list[Node]:
        """Return the nodes from the history's and target's vectors (B, n) to the loss.

        The columns that are neither of these nor `used` are looked up and join them.
        """
        pairs = self.pairs(schema)
        nodes: list[Node] = []
        if others(schema, [*(column.name for pair in pairs for column in pair), *used]):
            vectors = self.vectors()
            nodes, fields = vectors.nodes, [*fields, vectors.flat]
        together, x = join("top_input", [*fields, *(["dense"] if schema.num_dense else [])])
        return [*nodes, *together, *self.network("top", x, self.top_mlp), linear("logit", "top"), *finish(["logit"])]

    def network(
        self, name: str, bottom: str | list[str], widths: Sequence[int], *, thin: bool = True,
        product: str = "InnerProduct",
    ) -> list[Node]:  # fmt: skip
        """Return hidden layers with the chosen activation, the first of them from `product`; `thin` allows dropout."""
        if self.activation == "relu" and product == "InnerProduct":
            options = {
                "num_outputs": list(widths), "dropout": self.dropout if thin else 0.0, "batch_norm": self.batch_norm,
                "layer_norm": self.layer_norm,
            }  # fmt: skip
            return [DenseLayer(name, "MLP", bottom, params=options)]
        nodes: list[Node] = []
        for i, width in enumerate(widths):
            first: dict[str, Any] = {"num_output": width, "bias_init_type": "zero"}
            steps = [(f"{name}_{i}", product, first), *self._activate(f"{name}_{i}")]
            if thin and self.dropout:
                steps.append((f"{name}_{i}_drop", "Dropout", {"dropout_rate": self.dropout}))
            for j, (node, kind, params) in enumerate(steps):
                top = name if i == len(widths) - 1 and j == len(steps) - 1 else node
                nodes.append(DenseLayer(top, kind, bottom, params=params))
                bottom = top
            product = "InnerProduct"
        return nodes

    def _activate(self, name: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Return names, types and parameters of the layers between a product and its dropout."""
        if self.activation == "dice":
            # Running statistics: a prediction must not depend on the rows next to it.
            return [(f"{name}_dice", "PReLU_Dice", {"elu_alpha": 0.0, "factor": 0.01})]
        steps: list[tuple[str, str, dict[str, Any]]] = []
        if self.batch_norm:
            steps.append((f"{name}_norm", "BatchNorm", {"factor": 0.1}))
        if self.layer_norm:
            steps.append((f"{name}_norm", "LayerNorm", {}))
        return [*steps, (f"{name}_act", "ReLU" if self.activation == "relu" else "LeakyReLU", {})]
