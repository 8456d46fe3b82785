"""The losses of a graph: what each compares, checked against the schema, and in the order training wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from viviane.core.errors import ConfigError, SchemaError, suggest
from viviane.model.nodes import DenseLayer, Node
from viviane.nn import LAYERS, Loss
from viviane.nn.loss import LossParameters
from viviane.schema import Schema
from viviane.training.step.objective import LossTerm


@dataclass(frozen=True)
class GraphLoss:
    """One loss node.

    Args:
        name: the node's.
        layer: the loss.
        output: the tensor it reads, (B, width).
        width: number of its columns.
        labels: the label columns it compares them with.
    """

    name: str
    layer: Loss
    output: str
    width: int
    labels: tuple[str, ...]


def in_order(losses: Sequence[GraphLoss], schema: Schema) -> list[GraphLoss]:
    """Return the losses in the schema's order of their first labels, after checking that each label has one.

    Raises:
        SchemaError: there is no label. ConfigError: a label has no loss, two, or one of another task.
    """
    labels = {label.name: label for label in schema.labels}
    if not labels:
        raise SchemaError("the schema has no label, so there is nothing to train")
    if not losses:
        example = "model.add(vv.DenseLayer('loss', 'BinaryCrossEntropyLoss', bottom=['logit', 'label']))"
        raise ConfigError("the graph has no loss", fix=f"end it with one: {example}")
    seen: set[str] = set()
    for loss in losses:
        kind = type(loss.layer)
        for name in loss.labels:
            if name in seen:
                raise ConfigError("two losses of one label", where=f"layer {loss.name!r}", value=name,
                                  fix="keep one loss a label")  # fmt: skip
            seen.add(name)
            if labels[name].task != kind.task:
                what = f"{kind.__name__} needs a {kind.task} label"
                raise ConfigError(what, where=f"layer {loss.name!r}", value=name, allowed=f"task {kind.task!r}")
    for name in labels:
        if name not in seen:
            fix = "add a loss for it, or leave it out: vv.Dataset(path, schema.select([...]))"
            raise ConfigError("a label has no loss", value=name, fix=fix)
    places = {name: i for i, name in enumerate(labels)}
    return sorted(losses, key=lambda loss: min(places[name] for name in loss.labels))


def terms(losses: Sequence[GraphLoss], schema: Schema) -> list[LossTerm]:
    """Return the losses as training sees them: over the columns of the outputs side by side."""
    places = {label.name: i for i, label in enumerate(schema.labels)}
    result, start = [], 0
    for loss in losses:
        labels = tuple(places[name] for name in loss.labels)
        result.append(LossTerm(loss.layer, (start, start + loss.width), labels))
        start += loss.width
    return result


def weigh_losses(nodes: Sequence[Node], weights: Mapping[str, float]) -> list[Node]:
    """Return a graph whose losses carry these weights, by the name of the loss node or of the label tensor it reads.

    Raises:
        ConfigError: no loss of that name, or two names for one loss.

    Example:
        >>> node = DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "click"])
        >>> weigh_losses([node], {"click": 0.5})[0].params
        {'loss_weight': 0.5}
    """
    losses = [node for node in nodes if isinstance(node, DenseLayer) and issubclass(LAYERS[node.type], Loss)]
    owners = {node.name: node.name for node in losses} | {node.bottom[-1]: node.name for node in losses}
    chosen: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in owners:
            raise ConfigError("no loss of this name", where="loss_weights", value=name, fix=suggest(name, owners))
        if owners[name] in chosen:
            raise ConfigError("a loss is weighed twice", where="loss_weights", value=name)
        chosen[owners[name]] = weight
    return [
        DenseLayer(node.name, node.type, node.bottom, node.top, {**node.params, "loss_weight": chosen[node.name]})
        if isinstance(node, DenseLayer) and node.name in chosen
        else node
        for node in nodes
    ]


def loss_options(node: DenseLayer) -> list[str]:
    """Describe the weight and regularizer of a loss, if it has any.

    Example:
        >>> loss_options(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "click"], loss_weight=0.5))
        ['weight 0.5']
    """
    settings = LAYERS[node.type].Parameters(**node.params)
    assert isinstance(settings, LossParameters)
    lines = [] if settings.loss_weight == 1.0 else [f"weight {settings.loss_weight:g}"]
    return lines + ([f"{settings.regularizer_type} {settings.lambda_:g}"] if settings.use_regularizer else [])
