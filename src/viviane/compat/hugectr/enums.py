"""HugeCTR's enumerations."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

Optimizer_t = Enum("Optimizer_t", ["Ftrl", "Adam", "RMSProp", "AdaGrad", "MomentumSGD", "Nesterov", "SGD"])
Update_t = Enum("Update_t", ["Local", "Global", "LazyGlobal"])
DataReaderType_t = Enum("DataReaderType_t", ["Norm", "Raw", "Parquet", "RawAsync"])
Check_t = Enum("Check_t", ["Sum", "Non"])
Alignment_t = Enum("Alignment_t", ["Auto", "Non"])
LrPolicy_t = Enum("LrPolicy_t", ["fixed"])
Activation_t = Enum("Activation_t", ["Relu", "Non"])
FcPosition_t = Enum("FcPosition_t", ["Head", "Body", "Tail", "Isolated", "Non"])
Regularizer_t = Enum("Regularizer_t", ["L1", "L2"])
Initializer_t = Enum("Initializer_t", ["Default", "Uniform", "XavierNorm", "XavierUniform", "Zero"])
MetricsType = Enum("MetricsType", ["AUC", "AverageLoss", "HitRate", "NDCG", "SMAPE"])
AllReduceAlgo = Enum("AllReduceAlgo", ["NCCL", "OneShot"])
DeviceLayout = Enum("DeviceLayout", ["LocalFirst", "NodeFirst"])
GroupLayer_t = Enum("GroupLayer_t", ["GroupFusedInnerProduct"])
Distribution_t = Enum("Distribution_t", ["PowerLaw", "Uniform"])
PowerLaw_t = Enum("PowerLaw_t", ["Long", "Medium", "Short", "Specific"])
CommunicationType = Enum("CommunicationType", ["IB_NVLink", "IB_NVLink_Hier", "NVLink_SingleNode"])
HybridEmbeddingType = Enum("HybridEmbeddingType", ["Distributed"])
CommunicationStrategy = Enum("CommunicationStrategy", ["Uniform", "Hierarchical"])
CompressionStrategy = Enum("CompressionStrategy", ["Reduction", "Unique"])
TrainPSType_t = Enum("TrainPSType_t", ["Staged", "Cached"])
Tensor_t = Enum("Tensor_t", ["Train", "Evaluate"])
DataReaderSparse_t = Enum("DataReaderSparse_t", ["Distributed", "Localized"])
FileSystemType_t = Enum("FileSystemType_t", ["Local", "HDFS", "S3", "GCS", "Other"])
DataSourceType_t = Enum("DataSourceType_t", ["HDFS", "Local", "S3"])
DatabaseType_t = Enum(
    "DatabaseType_t",
    ["disabled", "hash_map", "parallel_hash_map", "multi_process_hash_map", "redis_cluster", "rocks_db"],
)
Database_t = Enum("Database_t", ["Local", "Redis", "RocksDB", "ParallelLocal", "Hierarchy"])
DatabaseHashMapAlgorithm_t = Enum("DatabaseHashMapAlgorithm_t", ["stl", "phm"])
DatabaseOverflowPolicy_t = Enum("DatabaseOverflowPolicy_t", ["evict_oldest", "evict_least_used", "evict_random"])
UpdateSourceType_t = Enum("UpdateSourceType_t", ["null", "kafka_message_queue"])
EmbeddingCacheType_t = Enum("EmbeddingCacheType_t", ["Dynamic", "UVM", "Static", "Stochastic"])
Embedding_t = Enum(
    "Embedding_t",
    [
        "DistributedSlotSparseEmbeddingHash",
        "LocalizedSlotSparseEmbeddingHash",
        "LocalizedSlotSparseEmbeddingOneHot",
        "HybridSparseEmbedding",
    ],
)
Layer_t = Enum(
    "Layer_t",
    [
        "Add", "BatchNorm", "BinaryCrossEntropyLoss", "Cast", "Concat", "CrossEntropyLoss", "DotProduct", "Dropout",
        "ELU", "ElementwiseMultiply", "FmOrder2", "FusedInnerProduct", "FusedReshapeConcat",
        "FusedReshapeConcatGeneral", "GRU", "Gather", "InnerProduct", "Interaction", "LayerNorm", "MLP",
        "MatrixMultiply", "MultiCross", "MultiCrossEntropyLoss", "MultiHeadAttention", "PReLU_Dice", "ReLU",
        "ReLUHalf", "ReduceMean", "ReduceSum", "Reshape", "Scale", "Select", "SequenceMask", "Sigmoid", "Slice",
        "Softmax", "Sub", "WeightMultiply",
    ],
)  # fmt: skip

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
