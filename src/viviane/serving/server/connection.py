"""HTTP connections that cannot be held open or filled without end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from math import inf
from typing import Any, Final, Protocol

from viviane.core.digits import number_in
from viviane.core.optional import require
from viviane.serving.server.settings import ServerSettings

_PHRASES: Final = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
                   503: b"Service Unavailable"}  # fmt: skip

_SHORT_BODY_BYTES: Final = 64 << 10
"""A refused request's body up to here is read and thrown away, so that the connection lives on."""
_LAST_REQUEST_S: Final = 0.25
"""How long an idle connection stays open when the server ends: a request may be on its way to it."""
_FIRST: Final = re.compile(rb"POST /[!-~]* HTTP/1\.1\r\n")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: ?([0-9]{1,5})\r\n", re.IGNORECASE)
_LENGTH_NAME: Final = re.compile(rb"(?<!inference-header-)content-length", re.IGNORECASE)
"""The protocol's binary requests also have the length of their JSON part, in a header of another name."""
_UNUSUAL: Final = re.compile(rb"\n(?:connection|transfer-encoding|expect|upgrade|[ \t])", re.IGNORECASE)
"""Headers by which a request may end elsewhere than its length says, or its connection with it: left to the parser."""
_TEXT: Final = b'{"error": "too many requests wait; try again later"}'
_OVERLOADED: Final = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"content-length: " + str(len(_TEXT)).encode() + b"\r\nconnection: %s\r\n\r\n" + _TEXT
)


class Admits(Protocol):
    """Decides by the path of a POST whether it is refused because of too many others."""

    def refuses(self, path: bytes) -> bool:
        """Return whether the next request is refused."""
        ...

    def enter(self, path: bytes) -> Callable[[], None]:
        """Count a request whose body has arrived; returns what to call at its end."""
        ...

    def admit(self, path: bytes) -> Callable[[], None] | None:
        """Decide about a request that arrives whole and count it; returns what to call at its end, None if refused."""
        ...


def protocol_class(settings: ServerSettings, admits: Admits) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on headers, on the time that they take, and on connections.

    Args:
        admits: decides about requests before they are parsed.

    Raises:
        MissingExtraError: uvicorn or httptools is not installed.
    """
    require("httptools", extra="serving", purpose="serving over HTTP")
    library = require("uvicorn.protocols.http.httptools_impl", extra="serving", purpose="serving over HTTP")
    base: Any = library.HttpToolsProtocol

    class Connection(_Limits, base):  # type: ignore[misc]
        """A connection that reads headers of a limited size in a limited time."""

    Connection.settings, Connection.admits = settings, admits
    return Connection


_NEXT: Any = object  # uvicorn's protocol comes behind this class, and is imported when a server starts


class _Limits(_NEXT):  # type: ignore[misc]
    """Methods of uvicorn's protocol with limits around them; stands before it in the order of bases."""

    settings: ServerSettings
    admits: Admits
    parser: Any
    transport: Any
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    cycle: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    timeout_keep_alive: float
    timeout_keep_alive_task: Any
    is_ending = False
    """Whether the server ends: set for the class, after which each connection is closed behind its next answer."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None
        self._head_bytes, self._in_body, self._refusal = 0, False, 400
        self._skips = False
        """Whether the body that arrives is one of a refused request."""
        self._between, self._looked = True, False
        """Whether the next bytes begin a request; whether that request was complete, and was not refused."""
        self._last_refusal = -inf
        self._leave: Callable[[], None] | None = None
        """Counts the end of the request that entered last."""
        self._known_head, self._known_path, self._known_bytes = b"", b"", -1
        """Head and path of the last complete request, and the size of all of it."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(503, b"too many connections")
            return
        self._watch()
        if self.is_ending:  # accepted just before the server ceased to listen
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._between and self._is_idle():
            known = len(data) == self._known_bytes and data.startswith(self._known_head)
            self._looked = known or self._is_whole(data)
            if self._looked:
                self._leave = self.admits.admit(self._known_path)
                if self._leave is None:
                    self._refuse_unparsed()
                    return
        if not self._in_body:
            self._watch()
        self._between = False
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._left()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close the connection behind the answer under way; an idle one waits for a request that was sent already."""
        if self._is_idle():
            self.loop.call_later(_LAST_REQUEST_S, self._close_if_idle)
        else:
            super().shutdown()

    def _close_if_idle(self) -> None:
        if self._between and self._is_idle() and not self.transport.is_closing():
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _left(self) -> None:
        """Count the end of the request that entered, if one did."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _is_whole(self, data: bytes) -> bool:
        """Return whether these bytes are one complete POST; a client's next one is mostly like the last one."""
        head = whole_request(data, self.settings.max_header_bytes)
        if head is not None:
            self._known_head, self._known_bytes = head, len(data)
            self._known_path = head[5 : head.index(b" ", 5)]
        return head is not None

    def _refuse_unparsed(self) -> None:
        self._unwatch()
        if self.is_ending:
            self._answer_overloaded(keep=False)
            return
        self.transport.write(_OVERLOADED % b"keep-alive")
        self._last_refusal = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request was refused since the timer was set."""
        left = self._last_refusal + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._between = 0, False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unwatch()
        self._in_body = True
        asks = self._is_idle() and not self._looked and self.parser.get_method() == b"POST"
        self._skips = asks and self.admits.refuses(self.url)
        if not self._skips:
            super().on_headers_complete()
            if self.is_ending and self.cycle is not None:
                self.cycle.keep_alive = False
        elif self._body_is_short():
            self._watch()
        else:
            self._answer_overloaded(keep=False)

    def on_body(self, body: bytes) -> None:
        if not self._skips:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._between, self._looked = False, True, False
        if not self._skips:
            waits = self.cycle is not None and not self.cycle.response_complete
            # Not before its body is there: a client that sends slowly would take the place of others.
            if waits and self._leave is None and self.parser.get_method() == b"POST":
                self._leave = self.admits.enter(self.url)
            super().on_message_complete()
            return
        self._skips = False
        self._unwatch()
        self._answer_overloaded(keep=self.parser.should_keep_alive() and not self.is_ending)

    def _body_is_short(self) -> bool:
        lengths = [value for name, value in self.headers if name == b"content-length"]
        length = number_in(lengths[0]) if len(lengths) == 1 else None
        return length is not None and length <= _SHORT_BODY_BYTES

    def _answer_overloaded(self, *, keep: bool) -> None:
        """Refuse a request without the cycle that uvicorn makes of one."""
        if self.transport.is_closing():
            return
        self.transport.write(_OVERLOADED % (b"keep-alive" if keep else b"close"))
        if keep:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self.transport.close()

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
        if self._is_idle():
            self._refuse(408, b"the headers did not arrive in time")

    def _refuse(self, status: int, text: bytes) -> None:
        if self.transport.is_closing():
            return
        body = b'{"error": "' + text + b'"}'
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _PHRASES[status], len(body)) + body)
        self.transport.close()


def whole_request(data: bytes, max_header_bytes: int) -> bytes | None:
    """Return the head of a request if these bytes are one complete POST of the usual form; others are the parser's.

    Such a request can be refused at the cost of neither the parser nor a timer.

    Example:
        >>> whole_request(b"POST /x HTTP/1.1\\r\\nContent-Length: 2\\r\\n\\r\\n{}", 1000)
        b'POST /x HTTP/1.1\\r\\nContent-Length: 2\\r\\n\\r\\n'
    """
    if _FIRST.match(data) is None:
        return None
    end = data.find(b"\r\n\r\n", 0, max_header_bytes) + 4
    head = data[:end]
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or len(_LENGTH_NAME.findall(head)) != 1 or _UNUSUAL.search(head):
        return None
    return head if len(data) == end + int(lengths[0]) else None
