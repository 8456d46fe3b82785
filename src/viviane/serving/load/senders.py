"""Who sends the requests of a load test: this process, or several of them where one is slower than the server."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Literal, Self

from viviane.core.errors import RemoteError, VivianeError
from viviane.serving.load.clients import Client, make_client
from viviane.serving.load.loops import closed_loop, open_loop
from viviane.serving.load.phase import Tally
from viviane.serving.load.requests import PreparedRequest
from viviane.serving.load.settings import LoadSettings

_LEAD_S: Final = 0.05
"""Processes begin a phase this long after it is announced to them, all at one moment."""
_END_S: Final = 5.0
"""How long processes may take to close their connections."""

Kind = Literal["closed", "open"]


class _Sender:
    """Sends the requests of one process; its connections live from phase to phase."""

    def __init__(self, settings: LoadSettings, model: str, made: Sequence[PreparedRequest]) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self._client: Client = self._runner.run(self._connect())
        self._requests: list[Any] = [self._client.prepare(model, settings.version, one) for one in made]

    async def _connect(self) -> Client:
        return make_client(self._settings)

    def run(self, kind: Kind, load: float) -> Tally:
        if kind == "closed":
            return self._runner.run(closed_loop(self._client, self._requests, int(load), self._settings))
        return self._runner.run(open_loop(self._client, self._requests, load, self._settings))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class Senders:
    """The processes of a load test; each sends its share of every phase.

    Args:
        settings: of the load test; `processes` of them share its clients, rates and `max_outstanding`.
        model: its name.
        made: the requests.

    Raises:
        RemoteError: a process ended.
    """

    def __init__(self, settings: LoadSettings, model: str, made: Sequence[PreparedRequest]) -> None:
        self._settings, self._model, self._made = settings, model, made
        self._local: _Sender | None = None
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        if self._settings.processes == 1:
            self._local = _Sender(self._settings, self._model, self._made)
            return self
        context = multiprocessing.get_context("spawn")  # a forked child would share gRPC's threads and locks
        try:
            for number in range(self._settings.processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_send, args=(theirs, share_of(self._settings, number)), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
            for process, connection in self._workers:
                # Not among the arguments: there, a process that ends as it starts would be waited for without end.
                with contextlib.suppress(BrokenPipeError):
                    connection.send((self._model, self._made))
                _received(process, connection)  # it is ready
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    def run(self, kind: Kind, load: float) -> Tally:
        """Send a phase of `load` clients, or of `load` requests a second, and count its answers."""
        if self._local is not None:
            return self._local.run(kind, load)
        start, count = time.perf_counter() + _LEAD_S, len(self._workers)
        for number, (_, connection) in enumerate(self._workers):
            share = load / count if kind == "open" else int(load) * (number + 1) // count - int(load) * number // count
            with contextlib.suppress(BrokenPipeError):  # reading from it names the process that ended
                connection.send((kind, share, start))
        total = Tally()
        for process, connection in self._workers:
            total.merge(_received(process, connection))
        return total

    def _end(self) -> None:
        if self._local is not None:
            self._local.close()
        for _, connection in self._workers:
            connection.close()  # the process then closes its own connections and ends
        until = time.monotonic() + _END_S
        for process, _ in self._workers:
            process.join(max(0.0, until - time.monotonic()))
            process.terminate()
            process.join()


def share_of(settings: LoadSettings, number: int) -> LoadSettings:
    """Return the settings of one process of several: a seed of its own, and its share of the requests that wait.

    Example:
        >>> settings = LoadSettings(url="http://127.0.0.1:8000", processes=4, seed=7)
        >>> share_of(settings, 2).max_outstanding, share_of(settings, 2).seed
        (1024, 9)
    """
    outstanding = max(1, settings.max_outstanding // settings.processes)
    return settings.model_copy(update={"max_outstanding": outstanding, "seed": settings.seed + number})


def _received(process: Any, connection: Connection) -> Any:
    try:
        found = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RemoteError("a process of the load test ended", where=f"process {process.pid}", value=process.exitcode,
                          fix="use fewer processes, or look for its error above") from None  # fmt: skip
    if isinstance(found, VivianeError):
        raise found
    return found


def _send(connection: Connection, settings: LoadSettings) -> None:
    """Run phases as they are announced, in a process of its own, until the connection closes."""
    try:
        model, made = connection.recv()
        with contextlib.closing(_Sender(settings, model, made)) as sender:
            connection.send(None)
            while True:
                kind, load, start = connection.recv()
                time.sleep(max(0.0, start - time.perf_counter()))  # one clock for all processes of a machine
                connection.send(sender.run(kind, load))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the load test has ended
    except VivianeError as error:
        connection.send(error)
