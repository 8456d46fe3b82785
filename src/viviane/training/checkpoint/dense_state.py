"""The dense weights of a module and the state of their optimizer, as named tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding.module_parts import dense_buffers, dense_modules, dense_parameters
from viviane.optim import DenseOptimizer

NUM_DIGEST_ROWS: Final = 16
"""How many rows of each table `weights_digest` reads."""


def dense_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that a checkpoint stores outside its tables: parameters and persistent buffers.

    Raises:
        CheckpointError: a submodule has extra state (`get_extra_state`) that torch would pickle.
    """
    tensors: dict[str, Tensor] = {**dense_parameters(module), **dense_buffers(module)}
    for prefix, part in dense_modules(module):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                "a submodule has extra state, which only a pickle could store",
                where=prefix.rstrip(".") or "the module itself",
                value=type(part).__name__,
                fix="keep the state in a buffer (register_buffer)",
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def weights_digest(dense: Mapping[str, Tensor], rows: Mapping[str, NDArray[np.uint8]]) -> int:
    """Return 62 bits of the SHA-256 of a model's weights, at least 1: equal for equal weights, on any device.

    Args:
        dense: what `dense_tensors` returns.
        rows: by table, the bytes of its first `NUM_DIGEST_ROWS` rows; dynamic tables are left out.
    """
    found = hashlib.sha256()
    for name in sorted(dense):
        tensor = dense[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    for name in sorted(rows):
        found.update(f"{name} {rows[name].shape}\n".encode())
        found.update(rows[name].tobytes())
    return int.from_bytes(found.digest()[:8], "little") >> 2 or 1


def optimizer_tensors(
    optimizer: DenseOptimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: (tensors, plain values) by "<parameter>:<state>".

    Step counts that a parameter group keeps are plain values with the key ":<group>:step".
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            where = f"{names[id(parameter)]}:{key}"
            if isinstance(value, Tensor):
                tensors[where] = value.detach()
            elif value is None or isinstance(value, bool | int | float | str):
                values[where] = value
            else:
                raise CheckpointError(
                    "the dense optimizer has state that is neither a tensor nor a number",
                    where=where,
                    value=type(value).__name__,
                )
    for i, group in enumerate(optimizer.param_groups):
        if "step" in group:
            values[f":{i}:step"] = group["step"]
    return tensors, values


def restore_optimizer(
    optimizer: DenseOptimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    where: str,
) -> None:
    """Restore what `optimizer_tensors` returned, replacing the optimizer's current state.

    Raises:
        CheckpointError: a parameter that the optimizer does not have, or state of another shape.
    """
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    fresh: dict[Tensor, dict[str, Any]] = {}
    steps: dict[int, int] = {}
    for full, value in {**tensors, **values}.items():
        name, _, key = full.rpartition(":")
        if name.startswith(":"):
            steps[int(name[1:])] = value
            continue
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in ours:
            raise CheckpointError("optimizer state for a parameter that is not trained", where=where, value=name)
        if isinstance(value, Tensor):
            if value.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name!r} has another shape",
                    where=where,
                    value=list(value.shape),
                    allowed=str(list(parameter.shape)),
                )
            fresh.setdefault(parameter, {})[key] = value.to(parameter.device, copy=True)
        else:
            fresh.setdefault(parameter, {})[key] = value
    for state in fresh.values():
        if set(state) != set(optimizer.state_names):
            raise CheckpointError(
                "the dense weights were trained with another optimizer",
                where=where,
                value=f"state: {', '.join(sorted(state))}",
                allowed=", ".join(optimizer.state_names) or "none",
                fix="resume with the optimizer of that run, or load with weights_only=True",
            )
    if steps.keys() != {i for i, group in enumerate(optimizer.param_groups) if "step" in group}:
        raise CheckpointError("the optimizer has other parameter groups", where=where, value=sorted(steps))
    for i, step in steps.items():
        optimizer.param_groups[i]["step"] = step
    optimizer.state.clear()
    optimizer.state.update(fresh)
