"""Tensors of a graph, as HugeCTR shows them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.compat.hugectr.processes import rows_of_all
from viviane.model import DenseLayer, GraphModule, Model
from viviane.training.evaluation import evaluating
from viviane.training.precision import Precision


def tensor_of(model: Model, name: str, batch: Batch) -> NDArray[np.float32]:
    """Return a tensor of a graph for a batch, (B, ...); where a loss reads it, its prediction."""
    trainer, module = model.trainer, model.module
    assert isinstance(module, GraphModule)
    with evaluating(module), (trainer.precision or Precision("fp32")).context(trainer.device):
        values = module.tensor(name, batch).float()
    losses = (node for node in model.nodes if isinstance(node, DenseLayer) and node.type.endswith("Loss"))
    reader = next((node.type for node in losses if node.bottom[0] == name), None)
    if reader is not None:
        values = values.softmax(1) if reader == "CrossEntropyLoss" else values.sigmoid()
    result: NDArray[np.float32] = rows_of_all(values).cpu().numpy()
    return result
