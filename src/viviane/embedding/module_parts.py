"""The parts of a module: its embedding collections, and the parameters and buffers outside of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from viviane.embedding.base import TableCollection


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
    for prefix, part in dense_modules(module):
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
    return found


def dense_buffers(module: nn.Module, *, persistent_only: bool = True) -> dict[str, Tensor]:
    """Return the buffers outside embedding collections, each once, by name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, part in dense_modules(module):
        for name, buffer in part._buffers.items():
            hidden = persistent_only and name in part._non_persistent_buffers_set
            if buffer is not None and not hidden and id(buffer) not in seen:
                seen.add(id(buffer))
                found[prefix + name] = buffer
    return found


def dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules outside embedding collections, each with the prefix of its names."""
    inside = tuple(f"{name}." if name else "" for name in collections_of(module))
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if not prefix.startswith(inside):
            yield prefix, part


def process_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return buffers that follow the batches of one process alone, by name; see `viviane.nn.registry.Layer`."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        found |= {prefix + own: part.get_buffer(own) for own in getattr(part, "process_buffers", ())}
    return found
