"""A server as a Python object: models from one clause, answered here and over the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from viviane.core.locations import AnyPath
from viviane.serving.repository import ModelStatus
from viviane.serving.server.running import InferenceServer
from viviane.serving.server.settings import ServerSettings
from viviane.serving.session import Scores


class Server:
    """Serves the models of a JSON file, or of the same settings in Python, over HTTP and gRPC.

    Args:
        config: a file as `viviane serve --config` takes it, plain data, or `ServerSettings`.

    Raises:
        ConfigError: a setting is unknown or out of range, or a port is taken.
        CheckpointError: a model is missing or damaged.

    Example:
        >>> with Server({"http_port": 0, "grpc_port": None}) as server:
        ...     server.index()
        []
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | ServerSettings) -> None:
        if isinstance(config, str | Path):
            config = ServerSettings.from_json(config)
        elif isinstance(config, Mapping):
            config = ServerSettings.from_dict(dict(config))
        self._server = InferenceServer(config)

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        return self._server.http_url

    def start(self) -> Self:
        """Serve on a thread of its own, and return when requests are taken."""
        self._server.start()
        return self

    def stop(self) -> None:
        """Take no more requests, answer those that were accepted, and free the models."""
        self._server.stop()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._server.run()

    def predict(self, name: str, rows: Any, *, version: int | None = None) -> Scores:
        """Predict with a model; see `InferenceSession.predict`."""
        return self._server.repository.predict(name, rows, version=version)

    def load(self, name: str, path: str | AnyPath | None = None, *, version: int | None = None) -> int:
        """Load a version beside those that answer, with a warm cache, and switch to it; returns its number."""
        return self._server.repository.load(name, path, version=version)

    def unload(self, name: str, version: int | None = None) -> bool:
        """Take a version away when its requests are answered; without the newest one, the one before answers again."""
        return self._server.repository.unload(name, version)

    def rollback(self, name: str, version: int | None = None) -> int:
        """Let an earlier version respond again, by default the one before; see `ModelRepository.rollback`."""
        return self._server.repository.rollback(name, version)

    def index(self) -> list[ModelStatus]:
        """Return all versions and their state."""
        return self._server.repository.index()

    def statistics(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what tables in tiers have done, by model and version."""
        return self._server.repository.tables()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
