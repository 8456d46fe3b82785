"""Tensors of a graph and their gradients, as HugeCTR returns them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Batch
from viviane.compat.hugectr.processes import rows_of_all
from viviane.core.errors import ConfigError, suggest
from viviane.model import DenseLayer, GraphModule, Model, SparseEmbedding
from viviane.training.evaluation import evaluating
from viviane.training.step.precision import Precision


def tensor_of(model: Model, name: str, batch: Batch) -> NDArray[np.float32]:
    """Return a tensor of a graph for a batch, (B, ...); if it is the input of a loss, its prediction."""
    trainer, module = model.trainer, model.module
    assert isinstance(module, GraphModule)
    with evaluating(module), (trainer.precision or Precision("fp32")).context(trainer.device):
        values = _value(model, module, name, batch).float()
    losses = (node for node in model.nodes if isinstance(node, DenseLayer) and node.type.endswith("Loss"))
    reader = next((node.type for node in losses if node.bottom[0] == name), None)
    if reader is not None:
        values = values.softmax(1) if reader == "CrossEntropyLoss" else values.sigmoid()
    result: NDArray[np.float32] = rows_of_all(values).cpu().numpy()
    return result


def _value(model: Model, module: GraphModule, name: str, batch: Batch) -> torch.Tensor:
    """Return a tensor; a layer that no loss depends on is run for it.

    Raises:
        ConfigError: the graph has no tensor of this name.
    """
    try:
        return module.tensor(name, batch)
    except ConfigError:
        node = next((one for one in model.nodes if isinstance(one, DenseLayer) and name in one.top), None)
        layer = None if node is None else module._modules.get(node.name)
        if node is None or layer is None:
            raise
    found = layer(*(_value(model, module, one, batch) for one in node.bottom))
    value: torch.Tensor = found[node.top.index(name)] if isinstance(found, tuple) else found
    return value


_wanted = False


def want_gradients(wanted: bool) -> None:
    """Set whether models compiled from now on keep the gradients of their tensors.

    Gradients need memory and disable fusion of layers, so they are kept only for scripts that request them.
    """
    global _wanted  # noqa: PLW0603 - one script runs at a time, and models are made by it
    _wanted = wanted


def are_gradients_wanted() -> bool:
    """Return whether models keep the gradients of their tensors."""
    return _wanted


class Gradients:
    """Keeps the gradient of every tensor of a graph in the last training step, for the loss of the global batch.

    Args:
        model: a compiled model.
    """

    def __init__(self, model: Model) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        for node in model.nodes:
            if isinstance(node, DenseLayer | SparseEmbedding):
                part = model.module._modules.get(node.name)  # None: a loss, or an unused node
                if part is not None:
                    part.register_forward_hook(partial(self._listen, node))

    def _listen(self, node: DenseLayer | SparseEmbedding, module: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        width = None
        if isinstance(node, SparseEmbedding):
            output, width = output.flat, node.dim
        for name, tensor in zip(node.top, output if isinstance(output, tuple) else (output,), strict=False):
            self._kept.pop(name, None)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep, name, width))

    def _keep(self, name: str, width: int | None, gradient: torch.Tensor) -> None:
        kept = gradient.detach().float().clone()
        self._kept[name] = kept if width is None else kept.view(len(kept), -1, width)

    def of(self, name: str) -> NDArray[np.float32]:
        """Return the gradient of a tensor, (B, ...).

        Raises:
            ConfigError: no step has run, or the tensor has no gradient.
        """
        if name not in self._kept:
            fix = suggest(name, self._kept) if self._kept else "call model.train() or model.fit() first"
            raise ConfigError("no gradient of this tensor was kept", where="check_out_tensor", value=name, fix=fix)
        result: NDArray[np.float32] = rows_of_all(self._kept[name]).cpu().numpy()
        return result
