"""Clients that a load test sends its requests with."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol
from urllib.parse import urlsplit

from viviane.core.errors import RemoteError, VivianeError
from viviane.core.json_files import parse_json
from viviane.core.optional import require
from viviane.serving.columns import ColumnSpec
from viviane.serving.load.described import checked_columns, checked_inputs
from viviane.serving.load.requests import PreparedRequest
from viviane.serving.load.settings import LoadSettings
from viviane.serving.server.messages import SERVICE, message

OK = "OK"


class Client(Protocol):
    """Talks to a server, many requests at a time."""

    async def models(self) -> list[str]:
        """Return the names of the loaded models."""
        ...

    async def describe(self, model: str, version: str | None) -> tuple[list[dict[str, Any]], list[ColumnSpec] | None]:
        """Return a model's inputs, and its columns where the server describes them."""
        ...

    def prepare(self, model: str, version: str | None, request: PreparedRequest) -> Any:
        """Return a request as `send` takes it."""
        ...

    async def send(self, prepared: Any) -> str:
        """Send a request; returns "OK", or what went wrong in a word."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def make_client(settings: LoadSettings) -> Client:
    """Return a client of the protocol of the settings."""
    return HttpClient(settings) if settings.protocol == "http" else GrpcClient(settings)


class HttpClient:
    """Over HTTP, a connection for each request in progress."""

    def __init__(self, settings: LoadSettings) -> None:
        self._aiohttp = require("aiohttp", extra="serving", purpose="a load test over HTTP")
        self._url = settings.url.rstrip("/") if "://" in settings.url else f"http://{settings.url.rstrip('/')}"
        self._session = self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=self._aiohttp.ClientTimeout(total=settings.timeout_s),
            # Triton would compress replies for a client that takes compressed ones: 9 ms for 64 KiB of scores.
            headers={"accept-encoding": "identity"},
        )

    async def _json(self, method: str, path: str) -> Any:
        try:
            async with self._session.request(method, self._url + path, json={} if method == "POST" else None) as reply:
                content = parse_json(await reply.read() or b"null", where=self._url + path, error=RemoteError)
                if reply.status != 200:
                    raise RemoteError("the server refuses", where=self._url + path, value=str(content)[:500])
                return content
        except VivianeError:
            raise
        except (self._aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: a redirection to an invalid address.
            raise RemoteError("the server does not respond", where=self._url, value=str(error)) from error

    async def models(self) -> list[str]:
        """Return the names of the loaded models."""
        index = await self._json("POST", "/v2/repository/index")
        try:
            return list(dict.fromkeys(str(one["name"]) for one in index if one.get("state") == "READY"))
        except (KeyError, TypeError, AttributeError):
            raise self._strange("no list of models", index) from None

    async def describe(self, model: str, version: str | None) -> tuple[list[dict[str, Any]], list[ColumnSpec] | None]:
        """Return a model's inputs, and its columns where the server describes them."""
        described = await self._json("GET", _path(model, version))
        inputs = checked_inputs(described, self._url)
        try:
            return inputs, checked_columns(await self._json("GET", f"/v1/models/{model}"), inputs)
        except RemoteError:  # another server than ours
            return inputs, None

    def _strange(self, what: str, content: object) -> RemoteError:
        allowed = "a server of the Open Inference Protocol"
        return RemoteError(f"the server sends {what}", where=self._url, value=str(content)[:300], allowed=allowed)

    def prepare(self, model: str, version: str | None, request: PreparedRequest) -> Any:
        """Return path, body and headers."""
        body, head = request.http_body()
        headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(head)}
        return f"{self._url}{_path(model, version)}/infer", body, headers

    async def send(self, prepared: Any) -> str:
        """Send a request; returns "OK", the status, or the kind of the error."""
        url, body, headers = prepared
        try:
            async with self._session.post(url, data=body, headers=headers) as reply:
                await reply.read()
                return OK if reply.status == 200 else str(reply.status)
        except TimeoutError:
            return "timeout"
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            return type(error).__name__

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


class GrpcClient:
    """Over gRPC, on a few channels."""

    def __init__(self, settings: LoadSettings) -> None:
        self._grpc = require("grpc", extra="serving", purpose="a load test over gRPC")
        aio = require("grpc.aio", extra="serving", purpose="a load test over gRPC")
        parts = urlsplit(settings.url if "://" in settings.url else f"//{settings.url}")
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._target = parts.netloc
        self._channels = [aio.insecure_channel(self._target, options) for _ in range(4)]
        self._timeout_s = settings.timeout_s
        self._turn = 0
        self._infer = [self._method(channel, "ModelInfer") for channel in self._channels]

    @staticmethod
    def _method(channel: Any, call: str) -> Any:
        return channel.unary_unary(
            f"/{SERVICE}/{call}",
            request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
            response_deserializer=message(f"{call}Response").FromString,
        )

    async def _ask(self, call: str, **fields: Any) -> Any:
        try:
            return await self._method(self._channels[0], call)(message(f"{call}Request")(**fields), timeout=10)
        except self._grpc.RpcError as error:
            raise RemoteError("the server does not respond", where=self._target, value=error.details()) from error

    async def models(self) -> list[str]:
        """Return the names of the loaded models."""
        index = await self._ask("RepositoryIndex", ready=True)
        return list(dict.fromkeys(one.name for one in index.models if one.state == "READY"))

    async def describe(self, model: str, version: str | None) -> tuple[list[dict[str, Any]], list[ColumnSpec] | None]:
        """Return a model's inputs; gRPC has no call that describes columns."""
        found = await self._ask("ModelMetadata", name=model, version=version or "")
        inputs = [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in found.inputs]
        return checked_inputs({"inputs": inputs}, self._target), None

    def prepare(self, model: str, version: str | None, request: PreparedRequest) -> Any:
        """Return the message's bytes."""
        inputs = [
            {"name": name, "datatype": datatype, "shape": list(shape)} for name, datatype, shape, _ in request.inputs
        ]
        raw = [data for *_, data in request.inputs]
        fields = {"model_name": model, "model_version": version or "", "inputs": inputs, "raw_input_contents": raw}
        return message("ModelInferRequest")(**fields).SerializeToString()

    async def send(self, prepared: Any) -> str:
        """Send a request; returns "OK" or the name of the code."""
        self._turn = (self._turn + 1) % len(self._infer)
        try:
            await self._infer[self._turn](prepared, timeout=self._timeout_s)
        except self._grpc.RpcError as error:
            return str(error.code().name)
        except asyncio.CancelledError:
            raise
        return OK

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            await channel.close()


def _path(model: str, version: str | None) -> str:
    return f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
