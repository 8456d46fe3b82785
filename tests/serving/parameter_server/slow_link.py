"""A TCP relay whose speed a test sets: it stands for a slow or a silent network in front of a store."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self


class SlowLink:
    """Forwards connections to a server; `delay_s` is added to every piece of up to 16 KiB that is forwarded."""

    def __init__(self, port: int) -> None:
        self._target, self.delay_s = port, 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target), 1.0)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._copy, args=(one, other), daemon=True))
                    self._threads[-1].start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.settimeout(None)
            while data := one.recv(16 << 10):
                time.sleep(self.delay_s)
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delay_s = 0.0
        for one in (self._server, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for one in (self._server, *self._open):
            one.close()
