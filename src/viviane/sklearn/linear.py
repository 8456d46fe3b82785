"""Logistic regression as a graph: one weight for each id, one for each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from viviane.config import Adam
from viviane.embedding import ZeroInit
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding
from viviane.schema import Schema


@dataclass(frozen=True)
class Linear:
    """logit = sum_i w[id_i] + w_d . dense + b, with the L2 penalty `decay` on each w[id].

    Works without categorical columns, which the models of the zoo need.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
        >>> [node.name for node in Linear().nodes(schema)[1:]]
        ['numbers', 'loss']
    """

    decay: float = 0.0
    lr: float = 2e-3

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes: list[Node] = [Input(label="label", dense="dense", sparse="cats")]
        logits: list[str] = []
        if schema.categorical:
            rule = Adam(lr=self.lr, weight_decay=self.decay, update="global")
            nodes.append(SparseEmbedding("weights", "cats", 1, init=ZeroInit(), optimizer=rule))
            nodes.append(DenseLayer("weights_flat", "Reshape", bottom="weights", shape=[-1]))
            nodes.append(DenseLayer("ids", "ReduceSum", bottom="weights_flat"))
            logits.append("ids")
        # Without numbers it reads the ids' weights, for its bias alone: its own weights begin at zero as well.
        source = "dense" if schema.num_dense else "weights_flat"
        start: dict[str, Any] = {"weight_init_type": "zero", "bias_init_type": "zero"}
        nodes.append(DenseLayer("numbers", "InnerProduct", bottom=source, num_output=1, **start))
        logits.append("numbers")
        top = logits[0]
        if len(logits) > 1:
            nodes.append(DenseLayer("logit", "Add", bottom=logits))
            top = "logit"
        nodes.append(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=[top, "label"]))
        return nodes
