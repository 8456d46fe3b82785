"""The messages of the Open Inference Protocol over gRPC, built from a table.

They live in a descriptor pool of their own, so that a process may load other definitions of the same protocol, such as
those of tritonclient, beside them.

Source: the protocol's public definition, package "inference", service "GRPCInferenceService".
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from viviane.core.optional import require

SERVICE: Final = "inference.GRPCInferenceService"
_PACKAGE: Final = "inference"
_TYPES: Final = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "message": 11,
                 "bytes": 12, "uint32": 13, "enum": 14}  # fmt: skip

# message -> fields "number name type": "*" behind the type for a repeated field, ">" before a map from text,
# "|" before a member of a oneof.
_MESSAGES: Final[dict[str, str]] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse": "1 name string, 2 versions string*, 3 platform string, "
    "4 inputs ModelMetadataResponse.TensorMetadata*, 5 outputs ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "InferParameter": "1 bool_param |bool, 2 int64_param |int64, 3 string_param |string, 4 double_param |double, "
    "5 uint64_param |uint64",
    "InferTensorContents": "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, "
    "4 uint_contents uint32*, 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, "
    "8 bytes_contents bytes*",
    "ModelInferRequest": "1 model_name string, 2 model_version string, 3 id string, 4 parameters >InferParameter, "
    "5 inputs ModelInferRequest.InferInputTensor*, 6 outputs ModelInferRequest.InferRequestedOutputTensor*, "
    "7 raw_input_contents bytes*",
    "ModelInferRequest.InferInputTensor": "1 name string, 2 datatype string, 3 shape int64*, "
    "4 parameters >InferParameter, 5 contents InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 name string, 2 parameters >InferParameter",
    "ModelInferResponse": "1 model_name string, 2 model_version string, 3 id string, 4 parameters >InferParameter, "
    "5 outputs ModelInferResponse.InferOutputTensor*, 6 raw_output_contents bytes*",
    "ModelInferResponse.InferOutputTensor": "1 name string, 2 datatype string, 3 shape int64*, "
    "4 parameters >InferParameter, 5 contents InferTensorContents",
    "ModelConfigRequest": "1 name string, 2 version string",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": "1 name string, 2 platform string, 4 max_batch_size int32, 5 input ModelInput*, "
    "6 output ModelOutput*, 7 instance_group ModelInstanceGroup*, 11 dynamic_batching ModelDynamicBatching, "
    "17 backend string",
    "ModelInput": "1 name string, 2 data_type DataType, 4 dims int64*, 8 optional bool",
    "ModelOutput": "1 name string, 2 data_type DataType, 3 dims int64*",
    "ModelInstanceGroup": "1 name string, 2 count int32, 4 kind Kind",
    "ModelDynamicBatching": "2 max_queue_delay_microseconds uint64",
    "ModelStatisticsRequest": "1 name string, 2 version string",
    "ModelStatisticsResponse": "1 model_stats ModelStatistics*",
    "ModelStatistics": "1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64, "
    "5 execution_count uint64, 6 inference_stats InferStatistics, 7 batch_stats InferBatchStatistics*",
    "InferStatistics": "1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration, "
    "4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration, "
    "7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration",
    "StatisticDuration": "1 count uint64, 2 ns uint64",
    "InferBatchStatistics": "1 batch_size uint64, 2 compute_input StatisticDuration, "
    "3 compute_infer StatisticDuration, 4 compute_output StatisticDuration",
    "RepositoryIndexRequest": "1 repository_name string, 2 ready bool",
    "RepositoryIndexResponse": "1 models RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": "1 name string, 2 version string, 3 state string, 4 reason string",
    "ModelRepositoryParameter": "1 bool_param |bool, 2 int64_param |int64, 3 string_param |string, "
    "4 bytes_param |bytes",
    "RepositoryModelLoadRequest": "1 repository_name string, 2 model_name string, "
    "3 parameters >ModelRepositoryParameter",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "1 repository_name string, 2 model_name string, "
    "3 parameters >ModelRepositoryParameter",
    "RepositoryModelUnloadResponse": "",
}
_ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "DataType": tuple(
        f"TYPE_{name}"
        for name in ("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
                     "FP16", "FP32", "FP64", "STRING")
    ),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU"),
}  # fmt: skip


@cache
def message(name: str) -> Any:
    """Return a message's class by its name without the package.

    Raises:
        MissingExtraError: protobuf is not installed.

    Example:
        >>> message("ModelReadyRequest")(name="ctr", version="2").SerializeToString()
        b'\\n\\x03ctr\\x12\\x012'
    """
    factory = require("google.protobuf.message_factory", extra="serving", purpose="serving over gRPC")
    return factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    descriptors = require("google.protobuf.descriptor_pb2", extra="serving", purpose="serving over gRPC")
    pools = require("google.protobuf.descriptor_pool", extra="serving", purpose="serving over gRPC")
    file = descriptors.FileDescriptorProto(name="viviane_open_inference.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    made: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        made[name] = made[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _add_field(made[name], name, *field.split(" "))
    pool = pools.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_field(owner: Any, owner_name: str, number: str, name: str, kind: str) -> None:
    repeated, one_of, of_map = kind.endswith("*"), kind.startswith("|"), kind.startswith(">")
    kind = kind.strip("*|>")
    field = owner.field.add(name=name, number=int(number), label=3 if repeated or of_map else 1)
    if of_map:
        entry_name = f"{name.capitalize()}Entry"
        entry = owner.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=_TYPES["string"])
        entry.field.add(name="value", number=2, label=1, type=_TYPES["message"], type_name=f".{_PACKAGE}.{kind}")
        field.type, field.type_name = _TYPES["message"], f".{_PACKAGE}.{owner_name}.{entry_name}"
    elif kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = _TYPES["enum" if kind in _ENUMS else "message"]
        field.type_name = f".{_PACKAGE}.{kind}"
    if one_of:
        if not owner.oneof_decl:
            owner.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


def leading_texts(data: bytes) -> tuple[str, str] | None:
    """Return the first two fields of a message, texts, without parsing what follows them; "" for one that is absent.

    Of a request for predictions they are the model and its version. Serializers write fields in the order of their
    numbers, which protobuf does not promise: of bytes that begin in another way None is returned.

    Example:
        >>> leading_texts(message("ModelInferRequest")(model_name="ctr", id="7").SerializeToString())
        ('ctr', '')
    """
    found = {1: "", 2: ""}
    place = 0
    while place + 1 < len(data) and data[place] in (0x0A, 0x12):  # field 1 or 2, bytes of a length
        number, size = data[place] >> 3, data[place + 1]
        end = place + 2 + size
        if size > 127 or end > len(data) or found[number]:  # a longer text is no model's name
            return None
        try:
            found[number] = data[place + 2 : end].decode()
        except UnicodeDecodeError:
            return None
        place = end
    return (found[1], found[2]) if found[1] else None
