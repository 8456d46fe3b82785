"""Synthetic click data of any size, whose best reachable AUC is known."""

from viviane.data.synthetic.config import SyntheticBag, SyntheticConfig
from viviane.data.synthetic.generate import Generated, generate

__all__ = ["Generated", "SyntheticBag", "SyntheticConfig", "generate"]
