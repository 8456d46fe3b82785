"""HugeCTR's enumerations. Members are numbered from 0 in the order of HugeCTR's C++ code, and convert to numbers."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final


class Numbered:
    """Conversion of members to their numbers; as in HugeCTR, a member does not equal its number.

    Example:
        >>> int(Optimizer_t.Adam), Optimizer_t(1).name, Optimizer_t.Adam == 1
        (1, 'Adam', False)
    """

    value: int

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


Optimizer_t = Enum(
    "Optimizer_t", ["Ftrl", "Adam", "RMSProp", "AdaGrad", "MomentumSGD", "Nesterov", "SGD"], start=0, type=Numbered
)
Update_t = Enum("Update_t", ["Local", "Global", "LazyGlobal"], start=0, type=Numbered)
DataReaderType_t = Enum("DataReaderType_t", ["Norm", "Raw", "Parquet", "RawAsync"], start=0, type=Numbered)
Check_t = Enum("Check_t", ["Sum", "Non"], start=0, type=Numbered)
Alignment_t = Enum("Alignment_t", ["Auto", "Non"], start=0, type=Numbered)
LrPolicy_t = Enum("LrPolicy_t", ["fixed"], start=0, type=Numbered)
Activation_t = Enum("Activation_t", ["Relu", "Non"], start=0, type=Numbered)
FcPosition_t = Enum("FcPosition_t", ["Non", "Head", "Body", "Tail", "Isolated"], start=0, type=Numbered)
Regularizer_t = Enum("Regularizer_t", ["L1", "L2"], start=0, type=Numbered)
Initializer_t = Enum(
    "Initializer_t", ["Default", "Uniform", "XavierNorm", "XavierUniform", "Zero"], start=0, type=Numbered
)
MetricsType = Enum("MetricsType", ["AUC", "AverageLoss", "HitRate", "NDCG", "SMAPE"], start=0, type=Numbered)
AllReduceAlgo = Enum("AllReduceAlgo", ["NCCL", "OneShot"], start=0, type=Numbered)
DeviceLayout = Enum("DeviceLayout", ["LocalFirst", "NodeFirst"], start=0, type=Numbered)
GroupLayer_t = Enum("GroupLayer_t", ["GroupFusedInnerProduct"], start=0, type=Numbered)
Distribution_t = Enum("Distribution_t", ["PowerLaw", "Uniform"], start=0, type=Numbered)
PowerLaw_t = Enum("PowerLaw_t", ["Long", "Medium", "Short", "Specific"], start=0, type=Numbered)
CommunicationType = Enum(
    "CommunicationType", ["IB_NVLink", "IB_NVLink_Hier", "NVLink_SingleNode"], start=0, type=Numbered
)
HybridEmbeddingType = Enum("HybridEmbeddingType", ["Distributed"], start=0, type=Numbered)
CommunicationStrategy = Enum("CommunicationStrategy", ["Uniform", "Hierarchical"], start=0, type=Numbered)
CompressionStrategy = Enum("CompressionStrategy", ["Reduction", "Unique"], start=0, type=Numbered)
TrainPSType_t = Enum("TrainPSType_t", ["Staged", "Cached"], start=0, type=Numbered)
Tensor_t = Enum("Tensor_t", ["Train", "Evaluate"], start=0, type=Numbered)
DataReaderSparse_t = Enum("DataReaderSparse_t", ["Distributed", "Localized"], start=0, type=Numbered)
FileSystemType_t = Enum("FileSystemType_t", ["Local", "HDFS", "S3", "GCS", "Other"], start=0, type=Numbered)
DataSourceType_t = Enum("DataSourceType_t", ["HDFS", "Local", "S3"], start=0, type=Numbered)
DatabaseType_t = Enum(
    "DatabaseType_t",
    ["disabled", "hash_map", "parallel_hash_map", "multi_process_hash_map", "redis_cluster", "rocks_db"],
    start=0,
    type=Numbered,
)
Database_t = Enum("Database_t", ["Local", "Redis", "RocksDB", "ParallelLocal", "Hierarchy"], start=0, type=Numbered)
DatabaseHashMapAlgorithm_t = Enum("DatabaseHashMapAlgorithm_t", ["stl", "phm"], start=0, type=Numbered)
DatabaseOverflowPolicy_t = Enum(
    "DatabaseOverflowPolicy_t", ["evict_oldest", "evict_least_used", "evict_random"], start=0, type=Numbered
)
UpdateSourceType_t = Enum("UpdateSourceType_t", ["null", "kafka_message_queue"], start=0, type=Numbered)
EmbeddingCacheType_t = Enum("EmbeddingCacheType_t", ["Dynamic", "UVM", "Static", "Stochastic"], start=0, type=Numbered)
Embedding_t = Enum(
    "Embedding_t",
    [
        "DistributedSlotSparseEmbeddingHash",
        "LocalizedSlotSparseEmbeddingHash",
        "LocalizedSlotSparseEmbeddingOneHot",
        "HybridSparseEmbedding",
    ],
    start=0,
    type=Numbered,
)
Layer_t = Enum(
    "Layer_t",
    [
        "BatchNorm", "BinaryCrossEntropyLoss", "Reshape", "Concat", "CrossEntropyLoss", "Dropout", "ELU",
        "InnerProduct", "FusedInnerProduct", "Interaction", "MultiCrossEntropyLoss", "ReLU", "ReLUHalf", "GRU",
        "MatrixMultiply", "Scale", "FusedReshapeConcat", "FusedReshapeConcatGeneral", "Softmax", "PReLU_Dice",
        "ReduceMean", "Sub", "Gather", "Sigmoid", "Slice", "WeightMultiply", "FmOrder2", "Add", "ReduceSum",
        "MultiCross", "Cast", "ElementwiseMultiply", "LayerNorm", "MLP", "MultiHeadAttention", "SequenceMask",
        "Select", "DotProduct",
    ],
    start=0,
    type=Numbered,
)  # fmt: skip
"""The order of HugeCTR 3.4, then the layers of later and earlier versions, whose numbers differ by version."""

ENUMS: Final[tuple[type[Enum], ...]] = (
    Optimizer_t, Update_t, DataReaderType_t, Check_t, Alignment_t, LrPolicy_t, Activation_t, FcPosition_t,
    Regularizer_t, Initializer_t, MetricsType, AllReduceAlgo, DeviceLayout, GroupLayer_t, Distribution_t, PowerLaw_t,
    CommunicationType, HybridEmbeddingType, Embedding_t, Layer_t, CommunicationStrategy, CompressionStrategy,
    TrainPSType_t, Tensor_t, DataReaderSparse_t, FileSystemType_t, DataSourceType_t, DatabaseType_t, Database_t,
    DatabaseHashMapAlgorithm_t, DatabaseOverflowPolicy_t, UpdateSourceType_t,
)  # fmt: skip


def exported_members() -> dict[str, Any]:
    """Return the enumeration members that HugeCTR's module exports.

    For a name in several enumerations the first is exported, except `Non` and `Uniform`, which are ambiguous.

    Example:
        >>> exported_members()["Adam"] is Optimizer_t.Adam, "Non" in exported_members()
        (True, False)
    """
    members: dict[str, Any] = {}
    for kind in ENUMS:
        for member in kind:
            members.setdefault(member.name, member)
    return {name: member for name, member in members.items() if name not in ("Non", "Uniform")}


def plain(value: Any) -> Any:
    """Convert members to their names, also in lists, as in JSON and layer parameters.

    Example:
        >>> plain([Activation_t.Relu, 3])
        ['Relu', 3]
    """
    if isinstance(value, Enum):
        return value.name
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
