"""A server's life: bind, announce, answer, and end without losing what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.core.threads import short_switch_interval
from viviane.serving.repository import ModelRepository
from viviane.serving.server.connection import protocol_class
from viviane.serving.server.grpc_service import make_grpc_server
from viviane.serving.server.http_app import make_app
from viviane.serving.server.recommending import RowRecommender
from viviane.serving.server.service import Service
from viviane.serving.server.settings import ServerSettings

_log = get_logger("serving.server")


class InferenceServer:
    """Serves models over HTTP and gRPC until it is stopped.

    Ports are bound when the object is made, so that two servers never share one; models load then, too.

    Args:
        settings: where to listen, and which models.
        version: of this software, for the metadata.
        recommenders: that answer requests for recommendations over HTTP, by name.

    Raises:
        ConfigError: a port is taken, or the address is not this machine's.
        CheckpointError: a model is missing or damaged.
        MissingExtraError: a library of the extra "serving" is not installed.
    """

    def __init__(
        self, settings: ServerSettings, version: str = "", recommenders: Mapping[str, RowRecommender] | None = None
    ) -> None:
        for library in ("starlette", "uvicorn", "httptools", "grpc", "google.protobuf", "prometheus_client"):
            require(library, extra="serving", purpose="serving models")
        self.settings = settings
        self._socket = _bound(settings.host, settings.http_port)
        self._grpc_socket = None
        try:
            if settings.grpc_port is not None:  # holds the port while models load
                self._grpc_socket = _bound(settings.host, settings.grpc_port)
            self.repository = ModelRepository(settings.inference)
        except BaseException:
            self._close_sockets()
            raise
        self.http_port: int = self._socket.getsockname()[1]
        self.grpc_port: int | None = None if self._grpc_socket is None else self._grpc_socket.getsockname()[1]
        self.service = Service(self.repository, settings, version, recommenders)
        for name in self.repository.names():
            self.service.warm_up(name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def http_url(self) -> str:
        """Where HTTP is served."""
        return f"http://{_shown_host(self.settings.host)}:{self.http_port}"

    @property
    def grpc_target(self) -> str | None:
        """Where gRPC is served, as clients take it."""
        return None if self.grpc_port is None else f"{_shown_host(self.settings.host)}:{self.grpc_port}"

    # Running ----------------------------------------------------------------------------------------------

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then answer what was accepted; a second signal ends at once.

        Args:
            started: called when requests are taken.
        """
        with _tuned_interpreter(), self._signals():
            asyncio.run(self._serve(started))

    def start(self) -> Self:
        """Serve on a thread of its own, and return when requests are taken."""
        ready = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._serve(ready.set))
            except BaseException as error:
                self._failure = error
            finally:
                ready.set()

        self._thread = threading.Thread(target=work, name="viviane-server", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        """Take no more requests, answer those that were accepted, and free the models."""
        self._ask_to_stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask_to_stop(self) -> None:
        self._stop_asked.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(stop.set)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT, also where a shell has made background jobs ignore SIGINT."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._stop_asked.is_set():
                raise KeyboardInterrupt
            _log.info("signal %s: answering what was accepted", signal.Signals(number).name)
            self._ask_to_stop()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _serve(self, started: Callable[[], None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._stop_asked.is_set():
            self._stop.set()
        try:
            http = _http_server(self.service, self.settings)
            grpc = await self._start_grpc()
            task = asyncio.create_task(http.serve(sockets=[self._socket]))
            stopping = asyncio.create_task(self._stop.wait())
            watching = asyncio.create_task(self.service.admission.watch_lag())
            while not http.started and not task.done():
                await asyncio.sleep(0.005)
            if not task.done():
                started()
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            watching.cancel()
            await self._end(http, task, grpc)
        finally:
            self._close_sockets()
            await asyncio.get_running_loop().run_in_executor(None, self.repository.close)
            self.service.close()

    async def _start_grpc(self) -> Any:
        if self.grpc_port is None:
            return None
        server = make_grpc_server(self.service, self.settings)
        assert self._grpc_socket is not None
        self._grpc_socket.close()
        target = f"{_shown_host(self.settings.host)}:{self.grpc_port}"
        try:
            bound = server.add_insecure_port(target)
        except RuntimeError:
            bound = 0
        if bound != self.grpc_port:
            raise _taken(self.settings.host, self.grpc_port, "the port of gRPC was taken meanwhile")
        await server.start()
        return server

    async def _end(self, http: Any, task: asyncio.Task[None], grpc: Any) -> None:
        """Take no new connections, and wait for requests in progress, at most the time in the settings."""
        self.service.admission.draining = True
        http.should_exit = True
        stops: list[Any] = [task]
        if grpc is not None:
            stops.append(grpc.stop(self.settings.shutdown_timeout_s))
        results = await asyncio.gather(*stops, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    def _close_sockets(self) -> None:
        for one in (self._socket, self._grpc_socket):
            if one is not None:
                one.close()


@contextlib.contextmanager
def _tuned_interpreter() -> Iterator[None]:
    """Set the collector and the switch interval for a server, and set them back at its end."""
    # What models and libraries made lives on: looking through it for garbage takes a quarter of a second.
    gc.collect()
    gc.freeze()
    try:
        with short_switch_interval():  # the event loop waits for threads that compute
            yield
    finally:
        gc.unfreeze()  # or libraries report at exit what they could not free


def _http_server(service: Service, settings: ServerSettings) -> Any:
    uvicorn = require("uvicorn", extra="serving", purpose="serving over HTTP")
    connection: Any = protocol_class(settings, service)

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        """uvicorn's server; signals are handled for HTTP and gRPC together."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            connection.is_ending = True  # not before: a client that connects again would find a port that closes
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        make_app(service),
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a warning for each malformed request would let clients fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout_s)),
    )
    return Server(config)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("the address cannot be used", where="host", value=host, fix=str(error)) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)  # another server on this port is noticed here, and clients wait while models load
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise _taken(host, port, error.strerror or str(error)) from error
    return found


def _taken(host: str, port: int, why: str) -> ConfigError:
    fix = "end the other server, or choose another port (0 takes a free one)"
    return ConfigError("cannot listen", where=f"{host}, port {port}", value=why, fix=fix)


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
