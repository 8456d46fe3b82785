"""Names that HugeCTR gave layers at other times, so that a graph of any version finds its layers."""

from __future__ import annotations

from typing import Final

from viviane.nn.basic import ReLU
from viviane.nn.cross import ElementwiseMultiply, WeightMultiply
from viviane.nn.registry import LAYERS, Layer

OLDER_NAMES: Final[dict[str, type[Layer]]] = {
    "DotProduct": ElementwiseMultiply,  # 3.0 and 3.1
    "Multiply": WeightMultiply,  # JSON up to 3.0
    "ReLUHalf": ReLU,  # ReLU of an fp16 graph
}

for _name, _layer in OLDER_NAMES.items():
    LAYERS.register(_name)(_layer)
