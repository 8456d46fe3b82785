"""Files of named tensors, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from viviane.core.errors import CheckpointError


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped into memory and read when they are used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no iterator there
    except (SafetensorError, OSError) as error:
        raise CheckpointError("not a readable safetensors file", where=str(file), value=str(error)) from error


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file; from CPU memory this copies nothing that is contiguous."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
