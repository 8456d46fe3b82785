"""Reference models: settings that write the graph of a published model for any schema.

    model = vv.Model(vv.Solver(), data)
    model.add(vv.zoo.DCNv2(dim=16, dropout=0.2))

In JSON: {"zoo": "dcn_v2", "dim": 16, "dropout": 0.2}.
"""

from viviane.zoo.dcn import DCN, DCNv2
from viviane.zoo.deepfm import DeepFM
from viviane.zoo.dlrm import DLRM
from viviane.zoo.recipe import ZOO, ZooModel
from viviane.zoo.wide_deep import WideDeep

__all__ = ["DCN", "DLRM", "ZOO", "DCNv2", "DeepFM", "WideDeep", "ZooModel"]
