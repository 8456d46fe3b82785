"""One connection to a Redis or Valkey server for rows of one length; everything else goes through redis-py."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from viviane.core.errors import StoreError
from viviane.core.optional import require
from viviane.ops.resp import (
    CHECKSUM_BYTES,
    KEY_ELEMENT_BYTES,
    MORE,
    PARSED,
    RowReplies,
    key_elements,
    pair_elements,
)
from viviane.store.row_layout import Keys, Rows

USER_VARIABLE: Final = "VIVIANE_REDIS_USERNAME"
PASSWORD_VARIABLE: Final = "VIVIANE_REDIS_PASSWORD"
_LONGEST_LINE: Final = 4096
_RECEIVE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class TlsOptions:
    """How the server's certificate is checked, and the client's own.

    Args:
        ca_file: of authorities; None: the system's.
        cert_file, key_file: the client's certificate and its key.
        server_name: in the server's certificate; None: the host.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return what sockets are wrapped by.

        Raises:
            StoreError: a file is missing or no certificate.
        """
        for name in ("ca_file", "cert_file", "key_file"):
            path = getattr(self, name)
            try:
                if path is not None:
                    Path(path).read_bytes()
            except OSError as error:  # ssl's own message does not say which file
                raise StoreError("a certificate cannot be read", where=f"redis.tls.{name}: {path}",
                                 value=error.strerror or str(error), fix="name a PEM file that this user may read",
                                 ) from error  # fmt: skip
        name = "ca_file"
        try:
            made = ssl.create_default_context(cafile=self.ca_file)
            name = "cert_file"
            if self.cert_file is not None:
                made.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:
            raise StoreError("a certificate cannot be used", where=f"redis.tls.{name}: {getattr(self, name)}",
                             value=str(error), allowed="PEM; a certificate and the key that belongs to it",
                             fix="correct the file, or name another one") from error  # fmt: skip
        return made

    def wrap(self, plain: socket.socket, host: str) -> ssl.SSLSocket:
        """Return a connected socket with encryption; it is closed where the server's certificate is refused."""
        try:
            return self.context().wrap_socket(plain, server_hostname=self.server_name or host)
        except BaseException:
            plain.close()
            raise


def credentials() -> tuple[str | None, str | None]:
    """Return user and password, from the environment alone."""
    return os.environ.get(USER_VARIABLE), os.environ.get(PASSWORD_VARIABLE)


class MovedError(Exception):
    """The cluster has moved the slot of a key to another node."""


class RowConnection:
    """A connection that fetches and writes rows of hashes.

    Args:
        host, port: of the server.
        timeout_s: for connecting, and between two pieces of a reply.
        tls: None: without encryption.

    Raises:
        OSError: the server does not answer.
        StoreError: it refuses user or password.
    """

    def __init__(self, host: str, port: int, timeout_s: float, tls: TlsOptions | None = None) -> None:
        self.where = f"redis {host}:{port}"
        plain = socket.create_connection((host, port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = plain
        self._buffer = np.empty(_RECEIVE_BYTES, np.uint8)
        self._address: int = self._buffer.ctypes.data
        self._start = self._end = 0
        try:
            if tls is not None:
                self._socket = tls.wrap(plain, host)
            user, password = credentials()
            if password is not None:
                parts = [b"AUTH", *([user.encode()] if user else []), password.encode()]
                self._socket.sendall(_command(parts))
                if self._line() != b"+OK":
                    fix = f"set {USER_VARIABLE} and {PASSWORD_VARIABLE}"
                    raise StoreError("the server refuses user or password", where=self.where, fix=fix)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # Rows -------------------------------------------------------------------------------------------------------

    def ask(self, hashes: Sequence[tuple[bytes, int, int]], elements: memoryview) -> None:
        """Send HMGETs of many keys, one a hash; `answers` reads the replies.

        Args:
            hashes: name, first and last key of each.
            elements: `key_elements` of all keys.
        """
        parts: list[bytes | memoryview] = []
        for name, start, stop in hashes:
            parts += [b"*%d\r\n$5\r\nHMGET\r\n" % (stop - start + 2), _element(name)]
            parts.append(elements[KEY_ELEMENT_BYTES * start : KEY_ELEMENT_BYTES * stop])
        self._socket.sendall(b"".join(parts))

    def answers(self, hashes: Sequence[tuple[bytes, int, int]], replies: RowReplies) -> None:
        """Read replies to `ask`, one hash's after another's.

        Raises:
            StoreError: a row has another length, or the server reports an error.
            MovedError: the cluster has changed.
        """
        for _, start, stop in hashes:
            self._expect_array(stop - start)
            self._rows(replies, start, stop - start)

    def write(self, hashes: Sequence[tuple[bytes, Keys, Rows]]) -> None:
        """Send HSETs, one a hash; `written` reads the replies."""
        parts = []
        for name, keys, rows in hashes:
            parts += [b"*%d\r\n$4\r\nHSET\r\n" % (2 * len(keys) + 2), _element(name), pair_elements(keys, rows)]
        self._socket.sendall(b"".join(parts))

    def written(self, count: int) -> None:
        """Read replies to `write`."""
        for _ in range(count):
            self._number()

    def erase(self, hashes: Sequence[tuple[bytes, Keys]]) -> int:
        """Remove keys of hashes, and return how many were there."""
        parts = []
        for name, keys in hashes:
            parts += [b"*%d\r\n$4\r\nHDEL\r\n" % (len(keys) + 2), _element(name), key_elements(keys)]
        self._socket.sendall(b"".join(parts))
        return sum(self._number() for _ in hashes)

    # Replies ----------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        line = self._line()
        if line[:1] != b":":
            raise self._error(line)
        return int(line[1:])

    def _expect_array(self, count: int) -> None:
        line = self._line()
        if line != b"*%d" % count:
            raise self._error(line)

    def _error(self, line: bytes) -> Exception:
        text = line[:200].decode("utf-8", "replace")
        if line[:7] == b"-MOVED " or line[:5] == b"-ASK " or line[:12] == b"-CLUSTERDOWN":
            return MovedError(text)
        return StoreError("the server does not answer with rows", where=self.where, value=text)

    def _rows(self, replies: RowReplies, first: int, count: int) -> None:
        item = 0
        while True:
            state, self._start, item = replies.parse(self._address, self._start, self._end, first, item, count)
            if state == PARSED:
                return
            if state != MORE:
                shown = bytes(self._buffer[self._start : self._start + 16])
                raise StoreError("a stored row has another length", where=self.where, value=shown,
                                 allowed=f"{replies.row_bytes + CHECKSUM_BYTES} bytes",
                                 fix="use another name for other rows")  # fmt: skip
            self._receive()

    def _line(self) -> bytes:
        while True:
            held = self._buffer[self._start : min(self._end, self._start + _LONGEST_LINE)].tobytes()
            end = held.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return held[:end]
            if len(held) >= _LONGEST_LINE:
                raise StoreError("the server does not speak Redis' protocol", where=self.where)
            self._receive()

    def _receive(self) -> None:
        """Read more bytes behind those that were not parsed."""
        held = self._end - self._start
        if self._start >= held:  # mostly less than a row: the front of the buffer stays in the processor's cache
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        if self._end == len(self._buffer):
            bigger = np.empty(2 * len(self._buffer), np.uint8)
            bigger[: self._end] = self._buffer
            self._buffer, self._address = bigger, bigger.ctypes.data
        count = self._socket.recv_into(self._buffer[self._end :].data)
        if not count:
            raise ConnectionError(f"{self.where}: the server has closed the connection")
        self._end += count


def _element(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _command(parts: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(map(_element, parts))


def make_client(places: Sequence[tuple[str, int]], timeout_s: float, tls: TlsOptions | None, cluster: bool) -> Any:
    """Return redis-py's client of the server, or of the cluster that the servers belong to; it may not be connected.

    redis-py compares a certificate with the host alone, so that connections are wrapped here, where tls.server_name is
    known.
    """
    redis = require("redis", extra="redis", purpose="rows in Redis")
    retry = require("redis.retry", extra="redis", purpose="rows in Redis")
    backoff = require("redis.backoff", extra="redis", purpose="rows in Redis")
    user, password = credentials()
    once = retry.Retry(backoff.NoBackoff(), 0)  # the hierarchy of tiers asks again
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": once}
    if password is not None:
        options |= {"username": user, "password": password}
    if tls is not None:
        options["connection_class"] = _encrypted(redis.Connection, tls)
    (host, port), *others = places
    if cluster:
        starts = [redis.cluster.ClusterNode(*one) for one in others]
        # With a URL, whose scheme says nothing of encryption, redis-py makes connections of the given class.
        return redis.RedisCluster(url=f"redis://{_bracketed(host)}:{port}", startup_nodes=starts, **options)
    return redis.Redis.from_pool(redis.ConnectionPool(host=host, port=port, **options))


def _encrypted(plain: Any, tls: TlsOptions) -> Any:
    """Return redis-py's class of connections with encryption, as `RowConnection` has it."""

    class Encrypted(plain):  # type: ignore[misc]
        def _connect(self) -> ssl.SSLSocket:  # what subclasses of redis-py's connections define
            return tls.wrap(super()._connect(), self.host)

    return Encrypted


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
