"""Reference models: settings that write the graph of a published model for any schema.

    model = vv.Model(vv.Solver(), data)
    model.add(vv.zoo.DCNv2(dim=16, dropout=0.2))

In JSON: {"zoo": "dcn_v2", "dim": 16, "dropout": 0.2}.
"""

from viviane.zoo.bst import BST
from viviane.zoo.dcn import DCN, DCNv2
from viviane.zoo.deepfm import DeepFM
from viviane.zoo.din import DIN
from viviane.zoo.dlrm import DLRM
from viviane.zoo.hstu import HSTU
from viviane.zoo.multitask import MMoE, SharedBottom
from viviane.zoo.ncf import NCF
from viviane.zoo.ple import PLE
from viviane.zoo.recipe import ZOO, ZooModel
from viviane.zoo.sasrec import SASRec
from viviane.zoo.two_tower import TwoTower
from viviane.zoo.wide_deep import WideDeep

__all__ = [
    "BST", "DCN", "DIN", "DLRM", "HSTU", "NCF", "PLE", "ZOO", "DCNv2", "DeepFM", "MMoE", "SASRec", "SharedBottom",
    "TwoTower", "WideDeep", "ZooModel",
]  # fmt: skip
