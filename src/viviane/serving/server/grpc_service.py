"""The gRPC side of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from viviane.core.optional import require
from viviane.serving.server.messages import SERVICE, leading_texts, message
from viviane.serving.server.service import Answer, Service, chosen_outputs
from viviane.serving.server.settings import ServerSettings
from viviane.serving.server.status import describe, invalid, status_of
from viviane.serving.server.tensors import (
    BYTES,
    Tensor,
    check_shape,
    from_binary,
    number_tensor,
    numpy_type,
    text_tensor,
)

_INFER: Final = f"/{SERVICE}/ModelInfer"
Method = Callable[[Any], Awaitable[Any]]
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def make_grpc_server(service: Service, settings: ServerSettings) -> Any:
    """Return an asynchronous gRPC server without a port.

    Raises:
        MissingExtraError: grpcio is not installed.
    """
    grpc = require("grpc", extra="serving", purpose="serving over gRPC")
    aio = require("grpc.aio", extra="serving", purpose="serving over gRPC")
    server = aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a partner
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", settings.max_concurrent),  # of a connection; further calls wait there
            # gRPC itself would cancel calls beyond 1000 that wait to be taken, without a reason
            ("grpc.server.max_pending_requests", 1 << 20),
            ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.server_handshake_timeout_ms", int(settings.header_timeout_s * 1000)),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ],
    )
    calls = _Calls(service, grpc)
    handlers = {
        # messages are parsed by the calls, so that one which is none is answered as a malformed request
        f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
            calls.guarded(name, method), response_serializer=lambda reply: reply.SerializeToString()
        )
        for name, method in calls.methods().items()
    }
    refused = grpc.stream_unary_rpc_method_handler(calls.refused)  # a stream, since nothing of it is read

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc, name-defined]
        """Finds the method of a call; one for predictions may be refused before its message arrives."""

        def service(self, handler_call_details: Any) -> Any:
            method = handler_call_details.method
            return refused if method == _INFER and service.refuses_unread() else handlers.get(method)

    server.add_generic_rpc_handlers((Handler(),))
    return server


class _Calls:
    """One method for each call of the protocol."""

    def __init__(self, service: Service, grpc: Any) -> None:
        self._service, self._grpc = service, grpc
        self._decode_error = require(
            "google.protobuf.message", extra="serving", purpose="serving over gRPC"
        ).DecodeError

    def methods(self) -> dict[str, Method]:
        """Return the calls by name."""
        return {
            "ServerLive": self.live,
            "ServerReady": self.ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server,
            "ModelMetadata": self.model,
            "ModelConfig": self.config,
            "ModelStatistics": self.statistics,
            "ModelInfer": self.infer,
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }

    async def refused(self, _: Any, context: Any) -> None:
        """Refuse a call without reading its message."""
        await context.abort(self._grpc.StatusCode.UNAVAILABLE, "too many requests wait; try again later")

    def guarded(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[Any]]:
        """Answer failures of a method with a code and a message."""
        parse = message(f"{name}Request").FromString

        async def answered(data: bytes, context: Any) -> Any:
            try:
                if name == "ModelInfer" and (asked := leading_texts(data)) is not None:
                    self._service.check_room("grpc", *asked)
                try:
                    request = parse(data)
                except self._decode_error as error:
                    raise invalid("not a message of this call", value=str(error)[:200]) from None
                return await method(request)
            except Exception as error:  # every failure is an answer
                code = getattr(self._grpc.StatusCode, status_of(error).grpc)
                text = str(describe(error)["error"])
            await context.abort(code, text[:4000])  # what a trailer holds
            raise AssertionError("abort raises")

        return answered

    async def live(self, _: Any) -> Any:
        """Report that the process is alive."""
        return message("ServerLiveResponse")(live=True)

    async def ready(self, _: Any) -> Any:
        """Return whether requests are taken."""
        return message("ServerReadyResponse")(ready=self._service.ready)

    async def model_ready(self, request: Any) -> Any:
        """Return whether a model answers."""
        return message("ModelReadyResponse")(ready=self._service.is_ready(request.name, request.version))

    async def server(self, _: Any) -> Any:
        """Describe the server."""
        return message("ServerMetadataResponse")(**self._service.server_metadata())

    async def model(self, request: Any) -> Any:
        """Describe a model."""
        return message("ModelMetadataResponse")(**self._service.model_metadata(request.name, request.version or None))

    async def config(self, request: Any) -> Any:
        """Give a model's configuration."""
        config = self._service.model_config(request.name, request.version)
        return message("ModelConfigResponse")(config=config)

    async def statistics(self, request: Any) -> Any:
        """Give the statistics of a model, or of all."""
        names = [request.name] if request.name else list(self._service.repository.names())
        version = request.version if request.name else None
        found = [self._service.model_statistics(name, version) for name in names]
        return message("ModelStatisticsResponse")(model_stats=found)

    async def index(self, request: Any) -> Any:
        """List models and versions."""
        return message("RepositoryIndexResponse")(models=self._service.index(ready=request.ready))

    async def load(self, request: Any) -> Any:
        """Load a model."""
        await self._service.load(request.model_name)
        return message("RepositoryModelLoadResponse")()

    async def unload(self, request: Any) -> Any:
        """Unload a model."""
        await self._service.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def infer(self, request: Any) -> Any:
        """Answer tensors."""
        names = [one.name for one in request.outputs]
        for one in request.outputs:
            if "classification" in one.parameters or "shared_memory_region" in one.parameters:
                raise invalid("this server has no such extension", where=f"output {one.name!r}")
        answer = await self._service.infer_tensors(
            "grpc", request.model_name, request.model_version, request.ByteSize(), lambda: _tensors(request)
        )
        return _response(request.id, answer, names)


def _tensors(request: Any) -> list[Tensor]:
    raw, given = request.raw_input_contents, request.inputs
    if not given:
        raise invalid("a request has inputs", where="inputs", value="none")
    if raw and len(raw) != len(given):
        what = "raw_input_contents has one entry for each input, or none"
        raise invalid(what, value=len(raw), allowed=str(len(given)))
    found = []
    for place, one in enumerate(given):
        name = one.name
        shape = check_shape(name, list(one.shape))
        if "shared_memory_region" in one.parameters:
            raise invalid("this server takes no shared memory", where=f"input {name!r}")
        if raw:
            if one.HasField("contents"):
                raise invalid("an input has contents or raw_input_contents, not both", where=f"input {name!r}")
            found.append(from_binary(name, one.datatype, shape, raw[place]))
        else:
            found.append(_of_contents(name, one.datatype, shape, one.contents))
    return found


def _of_contents(name: str, datatype: str, shape: tuple[int, ...], contents: Any) -> Tensor:
    if datatype != BYTES:
        numpy_type(name, datatype)
    field = _CONTENTS.get(datatype)
    if field is None:
        fix = "send raw_input_contents"
        raise invalid("a datatype has no typed contents", where=f"input {name!r}", value=datatype, fix=fix)
    others = [one.name for one, _ in contents.ListFields() if one.name != field]
    if others:
        where = f"input {name!r}, {datatype}"
        raise invalid("contents are in the field of another datatype", where=where, value=others[0], allowed=field)
    values = getattr(contents, field)
    if datatype == BYTES:
        return text_tensor(name, shape, list(values))
    wide = np.array(values, numpy_type(name, {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32",
                                              "UINT16": "UINT32"}.get(datatype, datatype)))  # fmt: skip
    narrow = wide.astype(numpy_type(name, datatype))
    if datatype[:3] in ("INT", "UIN") and not np.array_equal(narrow, wide):
        value = int(wide[narrow != wide][0])
        raise invalid("a number is out of range", where=f"input {name!r}", value=value, allowed=datatype)
    return number_tensor(name, datatype, shape, narrow)


def _response(identity: str, answer: Answer, names: list[str]) -> Any:
    response = message("ModelInferResponse")(model_name=answer.model, model_version=str(answer.version), id=identity)
    for name, values in chosen_outputs(answer, names).items():
        response.outputs.add(name=name, datatype="FP32", shape=[len(values), 1])
        response.raw_output_contents.append(values.astype("<f4", copy=False).tobytes())
    return response
