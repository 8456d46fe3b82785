"""States of the random generators, as tensors and JSON, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import CheckpointError


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
    """Set the global generators back to what `random_state` returned.

    A checkpoint of a CPU run has no state of a GPU's generator; on a GPU that generator then keeps its own.

    Raises:
        CheckpointError: a generator's state is missing or of another kind.
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
