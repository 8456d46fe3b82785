"""The HTTP side: the Open Inference Protocol, rows as JSON, metrics, and a page to try a row."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Final
from urllib.parse import urlsplit

from viviane.core.optional import require
from viviane.serving.server.example_rows import example_rows
from viviane.serving.server.json_wire import HEADER_LENGTH, load_strict, numbers, parse_request, render_answer
from viviane.serving.server.recommending import RecommendRequest
from viviane.serving.server.service import RECOMMEND, Service
from viviane.serving.server.settings import LOOPBACK
from viviane.serving.server.status import RequestError, Status, describe, invalid, listed, status_of

_LINGER_S: Final = 0.5
Handler = Callable[[Any], Awaitable[Any]]
_PAGE: Final = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"),
                "/page.js": ("page.js", "text/javascript")}  # fmt: skip
_OTHER_METHODS: Final = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")
_BODY_TYPES: Final = ("application/json", "application/octet-stream", "application/vnd.sagemaker-triton.binary+json")
_SAFE_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def make_app(service: Service) -> Any:
    """Return the ASGI application.

    Raises:
        MissingExtraError: Starlette is not installed.
    """
    purpose = "serving over HTTP"
    applications = require("starlette.applications", extra="serving", purpose=purpose)
    exceptions = require("starlette.exceptions", extra="serving", purpose=purpose)
    handlers = _Handlers(service)
    app = applications.Starlette(
        routes=handlers.routes(), exception_handlers={exceptions.HTTPException: handlers.not_routed}
    )
    return _Guard(app, handlers, service.settings.is_local)


class _Guard:
    """Refuses what a web page of another site could send: unknown hosts (DNS rebinding) and foreign origins."""

    def __init__(self, app: Any, handlers: _Handlers, is_local: bool) -> None:
        self._app, self._handlers, self._is_local = app, handlers, is_local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}
            error = self._problem(headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin"))
            if error is not None:
                await self._handlers.failure(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, host: str, origin: bytes | None) -> RequestError | None:
        if self._is_local and host and _host_name(host) not in LOOPBACK and not host.startswith("127."):
            return RequestError(Status.FORBIDDEN, "the Host header names another machine", value=host[:200],
                                fix="ask for 127.0.0.1 or localhost")  # fmt: skip
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            shown = origin.decode("latin-1")[:200]
            return RequestError(Status.FORBIDDEN, "a page of another site may not use this server", value=shown)
        return None


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class _Handlers:
    """One method for each kind of request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._responses = require("starlette.responses", extra="serving", purpose="serving over HTTP")
        self._requests = require("starlette.requests", extra="serving", purpose="serving over HTTP")
        folder = resources.files("viviane.serving.server") / "page"
        self._page = {path: (folder / name).read_bytes() for path, (name, _) in _PAGE.items()}

    def routes(self) -> list[Any]:
        """Return the routes."""
        routing = require("starlette.routing", extra="serving", purpose="serving over HTTP")

        def route(path: str, handler: Handler, method: str = "GET") -> Any:
            return routing.Route(path, self._guarded(handler), methods=[method])

        def verb(path: str, handler: Handler) -> list[Any]:
            # Other methods are refused here: `/v1/models/{model}` would take NAME:predict for a name.
            others = routing.Route(path, self.other_method, methods=_OTHER_METHODS)
            return [route(path, handler, "POST"), others]

        bases = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        found = [route(f"{base}/infer", self.infer, "POST") for base in bases]  # looked through in this order
        found += [
            *verb("/v1/models/{model}:predict", self.predict),
            *verb("/v1/models/{model}/versions/{version}:predict", self.predict),
            *verb("/v1/recommenders/{name}:recommend", self.recommend),
            route("/v1/recommenders/{name}", self.recommender),
            route("/v1/recommenders", self.recommender_names),
        ]
        found += [route(path, self.page) for path in _PAGE]
        found += [
            route("/metrics", self.metrics),
            route("/v2", self.server),
            route("/v2/health/live", self.live),
            route("/v2/health/ready", self.ready),
            route("/v2/repository/index", self.index, "POST"),
            route("/v2/repository/models/{model}/load", self.load, "POST"),
            route("/v2/repository/models/{model}/unload", self.unload, "POST"),
            route("/v2/repository/models/{model}/rollback", self.rollback, "POST"),
            route("/v2/models/stats", self.all_statistics),
            route("/v1/models", self.names),
            route("/v1/models/{model}", self.columns),
        ]
        for base in bases:
            found += [
                route(base, self.model),
                route(f"{base}/ready", self.model_ready),
                route(f"{base}/config", self.config),
                route(f"{base}/stats", self.statistics),
            ]
        return found

    def _guarded(self, handler: Handler) -> Handler:
        async def answered(request: Any) -> Any:
            try:
                return await handler(request)
            except self._requests.ClientDisconnect:
                return self._responses.Response(status_code=400)  # the client is gone
            except Exception as error:  # every failure is an answer
                return self.failure(error)

        return answered

    def failure(self, error: BaseException) -> Any:
        """Return the answer of a failed request."""
        status = status_of(error)
        headers = {}
        if status is Status.OVERLOADED:
            headers["retry-after"] = "1"
        if status in (Status.TOO_LARGE, Status.TIMEOUT):
            headers["connection"] = "close"  # the rest of the body is not read
        return self._json(describe(error), status.http, headers)

    async def not_routed(self, request: Any, error: Any) -> Any:
        """Answer a path or method that there is not."""
        what = "no such path" if error.status_code == 404 else str(error.detail)
        return self._json({"error": f"{what}: {request.method} {request.url.path[:200]}"}, error.status_code,
                          dict(error.headers or {}))  # fmt: skip

    async def other_method(self, request: Any) -> Any:
        """Refuse a method other than POST."""
        error = f"Method Not Allowed: {request.method} {request.url.path[:200]}"
        return self._json({"error": error}, 405, {"Allow": "POST"})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
        text = json.dumps(content, allow_nan=False).encode()
        return self._responses.Response(text, status, headers, media_type="application/json")

    # The server -------------------------------------------------------------------------------------------

    async def page(self, request: Any) -> Any:
        """Give the page to try a row."""
        path = request.url.path
        return self._responses.Response(self._page[path], 200, dict(_SAFE_HEADERS), media_type=_PAGE[path][1])

    async def metrics(self, _: Any) -> Any:
        """Give the metrics."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return self._responses.Response(self._service.metrics.text(), 200, media_type=kind)

    async def server(self, _: Any) -> Any:
        """Describe the server."""
        return self._json(self._service.server_metadata())

    async def live(self, _: Any) -> Any:
        """Report that the process is alive."""
        return self._json({"live": True})

    async def ready(self, _: Any) -> Any:
        """Return whether requests are taken."""
        ready = self._service.ready
        return self._json({"ready": ready}, 200 if ready else 503)

    async def index(self, request: Any) -> Any:
        """List models and versions."""
        content = await self._optional_json(request)
        ready = content.get("ready", False)
        if not isinstance(ready, bool):
            raise invalid("ready is true or false", value=repr(ready)[:100])
        return self._json(self._service.index(ready=ready))

    async def load(self, request: Any) -> Any:
        """Load a model: {"parameters": {"version": 2}}; without a version those of the settings."""
        await self._service.load(request.path_params["model"], await self._version(request))
        return self._json({})

    async def unload(self, request: Any) -> Any:
        """Unload a model, or one version of it: {"parameters": {"version": 2}}."""
        await self._service.unload(request.path_params["model"], await self._version(request))
        return self._json({})

    async def rollback(self, request: Any) -> Any:
        """Let an earlier version respond again: {"parameters": {"version": 1}}; without a version the one before."""
        number = await self._service.rollback(request.path_params["model"], await self._version(request))
        return self._json({"version": str(number)})

    # A model ----------------------------------------------------------------------------------------------

    async def model(self, request: Any) -> Any:
        """Describe a model."""
        return self._json(self._service.model_metadata(*_named(request)))

    async def model_ready(self, request: Any) -> Any:
        """Return whether a model answers."""
        name, version = _named(request)
        ready = self._service.is_ready(name, version)
        return self._json({"name": name, "ready": ready}, 200 if ready else 404)

    async def config(self, request: Any) -> Any:
        """Give a model's configuration."""
        return self._json(self._service.model_config(*_named(request)))

    async def statistics(self, request: Any) -> Any:
        """Give a model's statistics."""
        return self._json({"model_stats": [self._service.model_statistics(*_named(request))]})

    async def all_statistics(self, _: Any) -> Any:
        """Give the statistics of all models."""
        names = self._service.repository.names()
        return self._json({"model_stats": [self._service.model_statistics(name, None) for name in names]})

    async def names(self, _: Any) -> Any:
        """List the models."""
        return self._json({"models": list(self._service.repository.names())})

    async def columns(self, request: Any) -> Any:
        """Describe a model's columns, with a row as an example."""
        name, version = _named(request)
        content = self._service.columns(name, version)
        session = self._service.repository.get(name)
        ready = self._service.is_ready(name, version)
        return self._json({**content, "ready": ready, "example": example_rows(session.inputs, 1)[0]})

    async def infer(self, request: Any) -> Any:
        """Answer tensors."""
        name, version = _named(request)
        body = await self._body(request)
        self._service.check_room("http", name, version, entered=True)
        length = request.headers.get(HEADER_LENGTH)
        parsed = await self._service.parsed(len(body), lambda: parse_request(body, length))
        answer = await self._service.infer_tensors("http", name, version, len(body), lambda: parsed.tensors)
        size = sum(values.nbytes for values in answer.outputs.values())
        content, head = await self._service.parsed(size * 4, lambda: render_answer(parsed, answer))
        headers = {} if head is None else {HEADER_LENGTH: str(head)}
        kind = "application/json" if head is None else "application/octet-stream"
        return self._responses.Response(content, 200, headers, media_type=kind)

    async def predict(self, request: Any) -> Any:
        """Answer rows: {"instances": [{column: value, ...}, ...]}."""
        name, version = _named(request)
        body = await self._body(request)
        self._service.check_room("json", name, version, entered=True)
        rows, partial_rows = await self._service.parsed(len(body), lambda: _rows(body))
        answer = await self._service.infer_rows("json", name, version, rows, partial_rows=partial_rows)
        return self._json(await self._service.parsed(len(rows) * 64, lambda: _predictions(answer, partial_rows)))

    async def recommend(self, request: Any) -> Any:
        """Answer rows with items: {"instances": [{column: value, ...}, ...], "k": 10}."""
        name = request.path_params["name"]
        body = await self._body(request)
        self._service.check_room(RECOMMEND, name, entered=True)
        asked = await self._service.parsed(len(body), lambda: RecommendRequest.of(load_strict(body)))
        found = await self._service.recommend(name, asked)
        return self._json({"recommendations": found})

    async def recommender(self, request: Any) -> Any:
        """Describe a recommender's columns."""
        name = request.path_params["name"]
        if name not in self._service.recommenders:
            raise RequestError(Status.NOT_FOUND, "no recommender of this name is loaded", value=name[:200])
        return self._json({"name": name, **self._service.recommenders[name].columns()})

    async def recommender_names(self, _: Any) -> Any:
        """List the recommenders."""
        return self._json({"recommenders": sorted(self._service.recommenders)})

    # Bodies -----------------------------------------------------------------------------------------------

    async def _version(self, request: Any) -> int | None:
        """Return the version that a request about the repository names; other parameters are Triton's own."""
        parameters = (await self._optional_json(request)).get("parameters", {})
        version = parameters.get("version") if isinstance(parameters, dict) else None
        if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 1):
            raise invalid("a version is a whole number from 1", where="parameters", value=repr(version)[:100])
        return version

    async def _optional_json(self, request: Any) -> dict[str, Any]:
        body = await self._body(request)
        if not body:
            return {}
        content = load_strict(body)
        if not isinstance(content, dict):
            raise invalid("not a JSON object", where="the body of the request", value=repr(content)[:200])
        return content

    async def _body(self, request: Any) -> bytes:
        """Read a body, at most so much of it and for so long."""
        headers, settings = request.headers, self._service.settings
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind not in _BODY_TYPES:
            raise RequestError(Status.MEDIA_TYPE, "the body is of another type", where="content-type",
                               value=kind[:200], allowed=", ".join(_BODY_TYPES))  # fmt: skip
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError(Status.MEDIA_TYPE, "the server takes no compressed bodies", value=encoding[:200])
        length = headers.get("content-length")
        if length is not None and length.isdecimal() and int(length[:19]) > settings.max_body_bytes:
            await _discard(request, settings.max_body_bytes)
            raise _too_large(int(length[:19]), settings.max_body_bytes)
        parts, size = [], 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > settings.max_body_bytes:
                        raise _too_large(size, settings.max_body_bytes)
                    parts.append(part)
        except TimeoutError:
            raise RequestError(Status.TIMEOUT, "the body did not arrive in time",
                               allowed=f"{settings.body_timeout_s:g} s") from None  # fmt: skip
        return b"".join(parts)


def _too_large(size: int, most: int) -> RequestError:
    return RequestError(Status.TOO_LARGE, "the body is too large", value=size, allowed=f"up to {most} bytes")


async def _discard(request: Any, most: int) -> None:
    """Read some of a body that is refused: a client that is still sending would miss the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    return


def _named(request: Any) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


def _rows(body: bytes) -> tuple[list[Any], bool]:
    content = load_strict(body)
    example = '{"instances": [{"column": value, ...}, ...]}'
    if not isinstance(content, dict) or not isinstance(content.get("instances"), list):
        raise invalid("a request has a list of rows", where="instances", fix=f"send {example}")
    for key in content:
        if key not in ("instances", "partial"):
            raise invalid("unknown key", where="the request", value=key[:200], allowed="instances, partial")
    partial_rows = content.get("partial", False)
    if not isinstance(partial_rows, bool):
        raise invalid("partial is true or false", where="partial", value=repr(partial_rows)[:100])
    return content["instances"], partial_rows


def _predictions(answer: Any, partial_rows: bool) -> dict[str, Any]:
    refused = {problem.row for problem in answer.problems}
    by_name = {name: numbers(values) for name, values in answer.outputs.items()}
    if len(by_name) == 1:
        predictions: list[Any] = next(iter(by_name.values()))
    else:
        rows = zip(*by_name.values(), strict=True)
        predictions = [dict(zip(by_name, row, strict=True)) for row in rows]
    predictions = [None if row in refused else one for row, one in enumerate(predictions)] if refused else predictions
    content: dict[str, Any] = {"predictions": predictions, "model_version": str(answer.version)}
    if partial_rows:
        content["problems"] = listed(answer.problems)
    return content
