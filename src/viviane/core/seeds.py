"""One seed per run, from which every part derives its own, so that parts are independent."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the part `names` of a run with this seed; equal on every machine.

    Example:
        >>> derive_seed(1, "reader", 0) == derive_seed(1, "reader", 0) != derive_seed(1, "reader", 1)
        True
    """
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (dropout and initial values use torch's)."""
    random.seed(seed)
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))
