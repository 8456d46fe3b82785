"""Several labels from one graph: shared bottom and multi-gate mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from viviane.core.errors import SchemaError
from viviane.model.nodes import DenseLayer, Input, Node
from viviane.schema import Schema
from viviane.zoo.recipe import ZOO, ZooModel, join, linear


class MultiTaskModel(ZooModel):
    """Base of the models with a tower for each label of the schema.

    The losses are "loss_<label>", binary cross-entropy or squared error by the label's task; `loss_weights` of
    `Model.compile` weighs them. Characters that names of nodes cannot have become _: "loss_add_to_cart".

    Args:
        tower_mlp: widths of each label's own network.
    """

    tower_mlp: tuple[int, ...] = Field(default=(64,), min_length=1)

    def start(self, schema: Schema) -> tuple[list[Node], str, list[str]]:
        """Return the nodes up to x = [embeddings, dense], (B, n), its name, and the labels as names of nodes have them.

        Raises:
            SchemaError: there are not two labels, or no categorical columns.
        """
        labels = [label.name for label in schema.labels]
        if len(labels) < 2:
            fix = "add labels to the schema, or take a model of one label, such as DCNv2"
            raise SchemaError("a multi-task model predicts two labels or more", value=", ".join(labels), fix=fix)
        tasks = tasks_of(labels)
        if not schema.categorical:
            fix = "build a graph of dense layers instead"
            raise SchemaError("the models of the zoo need categorical columns", fix=fix)
        vectors = self.vectors()
        together, x = join("x", [vectors.flat, *(["dense"] if schema.num_dense else [])])
        named = {f"label_{task}": name for task, name in zip(tasks, labels, strict=True)}
        inputs = Input(label=named, dense="dense", sparse="cats")
        return [inputs, *vectors.nodes, *together], x, tasks

    def towers(self, schema: Schema, inputs: Sequence[str]) -> list[Node]:
        """Return each label's network over its input (B, h), its output and its loss."""
        nodes: list[Node] = []
        for label, task, x in zip(schema.labels, tasks_of([one.name for one in schema.labels]), inputs, strict=True):
            kind = "BinaryCrossEntropyLoss" if label.task == "binary" else "MeanSquaredErrorLoss"
            out = f"out_{task}"
            nodes.append(self.mlp(f"tower_{task}", x, self.tower_mlp))
            nodes.append(linear(out, f"tower_{task}"))
            nodes.append(DenseLayer(f"loss_{task}", kind, [out, f"label_{task}"]))
        return nodes


def tasks_of(labels: Sequence[str]) -> list[str]:
    """Return labels as they may stand in names of nodes: other characters become _, and no two are equal.

    Example:
        >>> tasks_of(["click", "add to cart", "add/to/cart"])
        ['click', 'add_to_cart', 'add_to_cart-2']
    """
    found: list[str] = []
    for label in labels:
        plain = re.sub(r"[^A-Za-z0-9_\-]", "_", label)
        name, number = plain, 2
        while name in found:
            name, number = f"{plain}-{number}", number + 1
        found.append(name)
    return found


def mixture(name: str, gate_input: str, experts: Sequence[str], width: int) -> list[Node]:
    """Return the nodes of sum_e g_e f_e, g = softmax(W x): experts (B, width) each -> (B, width)."""
    return [
        DenseLayer(f"{name}_experts", "Concat", list(experts)),
        DenseLayer(f"{name}_stack", "Reshape", f"{name}_experts", shape=[len(experts), width]),
        DenseLayer(f"{name}_scores", "InnerProduct", gate_input, num_output=len(experts), bias_init_type="zero"),
        DenseLayer(f"{name}_gate", "Softmax", f"{name}_scores"),
        DenseLayer(name, "MatrixMultiply", [f"{name}_gate", f"{name}_stack"]),
    ]


@ZOO.register("shared_bottom")
class SharedBottom(MultiTaskModel):
    """Shared bottom: one network, and a tower for each label.

        h     = MLP([e_1, ..., e_S, dense])
        out_k = w_k . MLP_k(h) + b_k

    Source: Caruana 1997, "Multitask Learning"; the baseline of Ma et al. 2018.

    Args:
        bottom_mlp: widths of the shared network.

    Example:
        >>> labels = [{"name": "click"}, {"name": "buy"}]
        >>> schema = Schema(labels=labels, categorical=[{"name": "c", "num_ids": 9}])
        >>> [node.name for node in SharedBottom().nodes(schema)[3:]]
        ['bottom', 'tower_click', 'out_click', 'loss_click', 'tower_buy', 'out_buy', 'loss_buy']
    """

    bottom_mlp: tuple[int, ...] = Field(default=(256, 128), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, x, tasks = self.start(schema)
        return [*nodes, self.mlp("bottom", x, self.bottom_mlp), *self.towers(schema, ["bottom"] * len(tasks))]


@ZOO.register("mmoe")
class MMoE(MultiTaskModel):
    """Multi-gate Mixture-of-Experts: each label mixes the same experts by a gate of its own.

        x     = [e_1, ..., e_S, dense]
        f_e   = MLP_e(x)                              e = 1 ... num_experts
        g_k   = softmax(W_k x)
        out_k = w_k . MLP_k(sum_e g_ke f_e) + b_k

    Source: Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts".

    Args:
        num_experts: number of experts.
        expert_mlp: widths of each expert.

    Example:
        >>> labels = [{"name": "click"}, {"name": "buy"}]
        >>> schema = Schema(labels=labels, categorical=[{"name": "c", "num_ids": 9}])
        >>> [node.name for node in MMoE(num_experts=2).nodes(schema)[3:7]]
        ['expert_0', 'expert_1', 'mix_click_experts', 'mix_click_stack']
    """

    num_experts: int = Field(default=4, ge=1)
    expert_mlp: tuple[int, ...] = Field(default=(128, 64), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, x, tasks = self.start(schema)
        experts = [f"expert_{e}" for e in range(self.num_experts)]
        nodes += [self.mlp(expert, x, self.expert_mlp) for expert in experts]
        for task in tasks:
            nodes += mixture(f"mix_{task}", x, experts, self.expert_mlp[-1])
        return [*nodes, *self.towers(schema, [f"mix_{task}" for task in tasks])]
