"""The part of a module outside embedding tables, and its optimizer's state, as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding import TableCollection
from viviane.optim import DenseOptimizer


def collections_of(module: nn.Module) -> dict[str, TableCollection]:
    """Return the embedding collections inside a module, by the name of the submodule.

    Those that are parts of another collection are not among them.
    """
    found: dict[str, TableCollection] = {}
    for name, one in module.named_modules():
        is_part = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(one, TableCollection) and not is_part:
            found[name] = one
    return found


def dense_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters outside embedding collections, each once, by name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, part in _dense_modules(module):
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
    return found


def dense_buffers(module: nn.Module, *, persistent_only: bool = True) -> dict[str, Tensor]:
    """Return the buffers outside embedding collections, each once, by name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, part in _dense_modules(module):
        for name, buffer in part._buffers.items():
            hidden = persistent_only and name in part._non_persistent_buffers_set
            if buffer is not None and not hidden and id(buffer) not in seen:
                seen.add(id(buffer))
                found[prefix + name] = buffer
    return found


def dense_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint stores of a module outside its tables: parameters and persistent buffers.

    Raises:
        CheckpointError: a submodule keeps extra state that is not a tensor (torch would pickle it).
    """
    tensors: dict[str, Tensor] = {**dense_parameters(module), **dense_buffers(module)}
    for prefix, part in _dense_modules(module):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                "a submodule keeps extra state, which only a pickle could hold",
                where=prefix.rstrip(".") or "the module itself",
                value=type(part).__name__,
                fix="keep the state in a buffer (register_buffer)",
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def optimizer_tensors(
    optimizer: DenseOptimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state: (tensors, plain values) by "<parameter>:<state>".

    Step counts that a parameter group keeps stand among the plain values as ":<group>:step".
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
                    "the dense optimizer keeps state that is neither a tensor nor a number",
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
    """Put back what `optimizer_tensors` returned, in place of the optimizer's present state.

    Raises:
        CheckpointError: state of a parameter that the optimizer does not have, or of another shape.
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
            raise CheckpointError("optimizer state of a parameter that is not trained here", where=where, value=name)
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
                "the dense weights were trained by another optimizer",
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


def _dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = tuple(f"{name}." if name else "" for name in collections_of(module))
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if not prefix.startswith(inside):
            yield prefix, part
