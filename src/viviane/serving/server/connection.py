"""HTTP connections that cannot be held open or filled without end."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from viviane.core.optional import require
from viviane.serving.server.settings import ServerSettings

_PHRASES: Final = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
                   503: b"Service Unavailable"}  # fmt: skip


def protocol_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on headers, on the time that they take, and on connections.

    Raises:
        MissingExtraError: uvicorn or httptools is not installed.
    """
    require("httptools", extra="serving", purpose="serving over HTTP")
    library = require("uvicorn.protocols.http.httptools_impl", extra="serving", purpose="serving over HTTP")
    base: Any = library.HttpToolsProtocol

    class Connection(_Limits, base):  # type: ignore[misc]
        """A connection that reads headers of a limited size in a limited time."""

    Connection.settings = settings
    return Connection


_NEXT: Any = object  # uvicorn's protocol comes behind this class, and is imported when a server starts


class _Limits(_NEXT):  # type: ignore[misc]
    """Methods of uvicorn's protocol with limits around them; stands before it in the order of bases."""

    settings: ServerSettings
    transport: Any
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    cycle: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None
        self._head_bytes, self._in_body, self._refusal = 0, False, 400

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(503, b"too many connections")
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._in_body:
            self._watch()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unwatch()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._unwatch()
        if self._refusal == 400:
            self._refuse(400, b"not a valid HTTP request")
        else:
            self._refuse(self._refusal, b"the headers are too large")

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.settings.max_header_bytes:
            self._refusal = 431
            raise ValueError("the headers are too large")  # ends the parser, which asks for send_400_response

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.settings.header_timeout_s, self._too_late)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(408, b"the headers did not arrive in time")

    def _refuse(self, status: int, text: bytes) -> None:
        if self.transport.is_closing():
            return
        body = b'{"error": "' + text + b'"}'
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _PHRASES[status], len(body)) + body)
        self.transport.close()
