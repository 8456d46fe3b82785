"""Several trained models as one graph: their logits, weighed and shifted, are one logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError
from viviane.model import Model
from viviane.model.nodes import DenseLayer, Input, Node, SparseEmbedding
from viviane.schema import Schema

_LOSS = "BinaryCrossEntropyLoss"


def blend(
    models: Sequence[Model], weights: Sequence[float], shift: float, schema: Schema, solver: Solver, name: str
) -> Model:
    """Return one model that predicts sigmoid(sum_m w_m x_m + b), x_m the logit of model m.

    It is an ordinary graph: it can be saved, served, exported and trained further. Each model keeps its own tables;
    their weights, and the running means where a model keeps them, are copied.

    Args:
        models: compiled graphs of one binary label over the same schema; those with weight 0 are left out. Where all
            weights are 0, for the columns say nothing about the label, the first stays, and the prediction is constant.
        weights, shift: w and b.
        schema: of the rows.
        solver: of the model that is made.
        name: of the model that is made.
    """
    every = [(f"m{n}_", model, weight) for n, (model, weight) in enumerate(zip(models, weights, strict=True))]
    kept = [one for one in every if one[-1]] or every[:1]
    groups: dict[str, tuple[str, ...]] = {}
    nodes: list[Node] = []
    logits: list[str] = []
    for prefix, model, _ in kept:
        own, logit = _renamed(model.nodes, prefix, schema, groups)
        nodes += own
        logits.append(logit)
    made = Model(solver, schema, name=name)
    made.add(Input(label="label", dense="dense", sparse=groups or "cats"))
    for node in nodes:
        made.add(node)
    together = logits[0]
    if len(logits) > 1:
        made.add(DenseLayer("logits", "Concat", bottom=logits))
        together = "logits"
    made.add(DenseLayer("logit", "InnerProduct", bottom=together, num_output=1, bias_init_type="zero"))
    made.add(DenseLayer("loss", _LOSS, bottom=["logit", "label"]))
    made.compile(Adam(), metrics=["log_loss", "auc"])
    own_modules: dict[str, Any] = made.module._modules
    for prefix, model, _ in kept:
        with model.trainer.averaged():
            for part, module in model.module._modules.items():
                if module is not None:
                    own_modules[prefix + part].load_state_dict(module.state_dict())
    with torch.no_grad():
        final = own_modules["logit"]
        final.weight.copy_(torch.tensor([[weight for *_, weight in kept]]))
        final.bias.fill_(shift)
    made.etl = kept[0][1].etl
    return made


def _renamed(
    nodes: Sequence[Node], prefix: str, schema: Schema, groups: dict[str, tuple[str, ...]]
) -> tuple[list[Node], str]:
    """Return the nodes of one model with its own names and without its loss, and the name of its logit."""
    names: dict[str, str] = {}
    made: list[Node] = []
    logit = ""
    for node in nodes:
        if isinstance(node, Input):
            sparse = node.sparse
            own = {sparse: tuple(one.name for one in schema.categorical)} if isinstance(sparse, str) else sparse
            for group, columns in own.items():
                if columns:
                    groups[prefix + group] = columns
                    names[group] = prefix + group
            if not isinstance(node.dense, str):
                raise ConfigError("a blend takes models that read all dense columns as one tensor", value=node.dense)
            names[node.dense] = "dense"
        elif isinstance(node, SparseEmbedding):
            data = node.model_dump(exclude={"node"})
            for top in ("name", "mask", "all_rows"):
                if data[top] is not None:
                    names[data[top]] = data[top] = prefix + data[top]
            data["bottom"] = names[node.bottom]
            made.append(SparseEmbedding(**data))
        elif node.type == _LOSS:
            logit = names[node.bottom[0]]
        else:
            tops = [prefix + top for top in node.top]
            names.update(zip(node.top, tops, strict=True))
            bottoms = [names[bottom] for bottom in node.bottom]
            made.append(DenseLayer(prefix + node.name, node.type, bottom=bottoms, top=tops, params=node.params))
    return made, logit
