"""States of the random generators, as tensors and JSON, so that a resumed run draws the same random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import CheckpointError
from viviane.core.seeds import derive_seed, seed_everything
from viviane.parallel import Group


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of Python's, NumPy's and torch's global generators: (arrays, plain values).

    Example:
        >>> arrays, values = random_state(torch.device("cpu"))
        >>> sorted(arrays)
        ['numpy', 'python', 'torch']
    """
    version, words, gauss = random.getstate()
    kind, state, position, has_gauss, cached = np.random.get_state(legacy=True)
    arrays = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(state).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        arrays["cuda"] = torch.cuda.get_rng_state(device)
    values = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"kind": kind, "position": int(position), "has_gauss": int(has_gauss), "gauss": float(cached)},
    }
    return arrays, values


def restore_random_state(arrays: dict[str, Tensor], values: dict[str, Any], device: torch.device) -> None:
    """Restore the global generators from what `random_state` returned.

    A checkpoint of a CPU run has no GPU generator state; when it is loaded on a GPU, that generator is not changed.

    Raises:
        CheckpointError: a generator's state is missing or of another type.
    """
    try:
        words = tuple(arrays["python"].tolist())
        random.setstate((values["python"]["version"], words, values["python"]["gauss"]))
        one = values["numpy"]
        state = arrays["numpy"].numpy().astype(np.uint32)
        np.random.set_state((one["kind"], state, one["position"], one["has_gauss"], one["gauss"]))
        torch.set_rng_state(arrays["torch"])
        if device.type == "cuda" and "cuda" in arrays:
            torch.cuda.set_rng_state(arrays["cuda"], device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError("the state of a random generator cannot be restored", value=str(error)) from error


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed the global generators of one process: ranks differ, and rank 0 draws what a single process would."""
    seed_everything(seed if rank == 0 and step == 0 else derive_seed(seed, "rank", rank, "step", step))


def group_random_state(device: torch.device, group: Group) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of all processes' generators: rank 0's as in `random_state`, others as "rank<r>/..."."""
    arrays, values = random_state(device)
    everyone = group.gather_data(values)
    found: dict[str, Tensor] = {}
    for name, part in arrays.items():
        for rank, state in enumerate(group.gather(part)):
            found[name if rank == 0 else f"rank{rank}/{name}"] = state
    ranks = {str(rank): everyone[rank] for rank in range(1, group.size)}
    return found, {**everyone[0], **({"ranks": ranks} if ranks else {})}


def restore_group_random_state(
    arrays: dict[str, Tensor], values: dict[str, Any], device: torch.device, group: Group, seed: int, step: int
) -> None:
    """Restore this process's generators; a rank that the checkpoint does not contain is seeded from rank and step."""
    if group.rank == 0:
        restore_random_state(arrays, values, device)
    elif str(group.rank) in values.get("ranks", {}):
        prefix = f"rank{group.rank}/"
        own = {name.removeprefix(prefix): part for name, part in arrays.items() if name.startswith(prefix)}
        restore_random_state(own, values["ranks"][str(group.rank)], device)
    else:
        seed_rank(seed, group.rank, step)
