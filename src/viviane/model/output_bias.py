"""Where training begins: output biases at the base rate of the labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from viviane.config import Solver
from viviane.data import Dataset
from viviane.model.nodes import DenseLayer, Node
from viviane.nn import LAYERS, MLP, InnerProduct, Loss
from viviane.schema import Schema

NUM_ROWS: Final = 65_536
_LEFT_OPEN: Final = ("default", "zero")


def base_rates(data: Dataset, solver: Solver) -> dict[str, float]:
    """Return the mean of each binary label as the loss sees it: with sample weights, class weights, smoothing.

    It is taken over the first rows of the shuffled data, 65,536 at most; a label that all rows lack is left out. A mean
    of 0 or 1 is moved by half a row towards 1/2.
    """
    names = [label.name for label in data.schema.labels if label.task == "binary"]
    sums, weights = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    with data.reader(8192, shuffle=True, seed=solver.seed, max_batches=NUM_ROWS // 8192, num_threads=1) as reader:
        for batch in reader:
            for name in names:
                label = batch.label(name).double()
                present = (label >= 0).double()
                weight = present if batch.weight is None else present * batch.weight.double()
                if solver.class_weights is not None:
                    weight = weight * torch.where(label > 0.5, solver.class_weights[1], solver.class_weights[0])
                sums[name] += float((weight * label).sum())
                weights[name] += float(weight.sum())
    rates = {}
    for name in names:
        if weights[name] > 0:
            rate = min(max(sums[name], 0.5), weights[name] - 0.5) / weights[name] if weights[name] > 1 else 0.5
            rates[name] = rate * (1 - solver.label_smoothing) + solver.label_smoothing / 2
    return rates


def start_at_rates(nodes: Sequence[Node], schema: Schema, module: nn.Module, rates: dict[str, float]) -> list[str]:
    """Set the bias behind each binary cross-entropy to ln(p / (1 - p)); returns the labels it was done for.

    The bias is that of the `InnerProduct` or `MLP` whose output the loss reads, or of the first one of those that an
    `Add` in front of the loss sums up. One whose initial value the graph chooses, other than zero, stays as it is.
    """
    makers = {top: node for node in nodes if isinstance(node, DenseLayer) for top in node.top}
    inputs = nodes[0]
    every = [label.name for label in schema.labels]
    columns = getattr(inputs, "label", "label")
    groups = {columns: tuple(every)} if isinstance(columns, str) else columns
    done: list[str] = []
    with torch.no_grad():
        for node in nodes:
            if not (isinstance(node, DenseLayer) and node.type.startswith("BinaryCrossEntropy")):
                continue
            if not issubclass(LAYERS[node.type], Loss):
                continue
            labels = groups.get(node.bottom[1], ())
            bias = _bias(node.bottom[0], makers, module)
            if bias is None or bias.numel() != len(labels):
                continue
            for place, label in enumerate(labels):
                if label in rates:
                    bias[place] = math.log(rates[label] / (1 - rates[label]))
                    done.append(label)
    return done


def _bias(tensor: str, makers: dict[str, DenseLayer], module: nn.Module) -> Tensor | None:
    """Return the bias that shifts a tensor; None where it has none, or the graph sets its initial value."""
    node = makers.get(tensor)
    if node is None:
        return None
    if node.type == "Add":
        found = (_bias(bottom, makers, module) for bottom in node.bottom)
        return next((bias for bias in found if bias is not None), None)
    if node.params.get("bias_init_type", "default") not in _LEFT_OPEN:
        return None
    layer = module._modules[node.name]
    if isinstance(layer, InnerProduct):
        return layer.bias
    if isinstance(layer, MLP):
        last = layer.layers[-1]
        return last.bias if isinstance(last, nn.Linear) else None
    return None
