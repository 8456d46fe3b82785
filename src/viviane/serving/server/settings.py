"""Settings of a server, as keyword arguments and as the JSON of `viviane serve --config`."""

from __future__ import annotations

from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from viviane.config.base import Settings, load_json
from viviane.core.addresses import check_host
from viviane.core.locations import AnyPath
from viviane.serving.server.batcher import BatchSettings
from viviane.serving.server.recommend_queue import RecommendSettings
from viviane.serving.settings import RepositorySettings

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class ServerSettings(Settings):
    """Where a server listens, what it accepts, and how it batches.

    Args:
        host: address to listen on; an address of the network makes the server reachable by others, without
            authentication or encryption.
        http_port: of HTTP; 0 takes a free one.
        grpc_port: of gRPC; 0 takes a free one, None serves no gRPC.
        max_body_bytes: a longer request is refused with 413 or RESOURCE_EXHAUSTED.
        max_rows: rows of one request; more are refused in the same way.
        max_concurrent: requests in progress at once; more are refused with 429 or UNAVAILABLE.
        max_lag_ms: requests are refused in the same way while the event loop is so far behind: they wait outside of any
            queue then.
        max_connections: open HTTP connections; more are closed at once.
        max_header_bytes: of an HTTP request, its first line included; more are refused with 431.
        header_timeout_s: in which the headers of a request have to arrive.
        body_timeout_s: in which its body has to arrive, else 408.
        keep_alive_s: an idle connection is closed after so long.
        shutdown_timeout_s: after SIGTERM, how long accepted requests may take before they are cut off.
        allow_load: models can be loaded and unloaded over the network.
        batching: of requests that wait at the same time.
        recommend: threads and queue of each recommender.
        inference: the models.

    Example:
        >>> ServerSettings(http_port=8080).max_rows
        65536
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    http_port: int = Field(default=8000, ge=0, le=65535)
    grpc_port: int | None = Field(default=8001, ge=0, le=65535)
    max_body_bytes: int = Field(default=64 << 20, ge=1024, lt=2**31)
    max_rows: int = Field(default=65_536, ge=1)
    max_concurrent: int = Field(default=1024, ge=1)
    max_lag_ms: float = Field(default=500, gt=0)
    max_connections: int = Field(default=4096, ge=1)
    max_header_bytes: int = Field(default=32 << 10, ge=1024)
    header_timeout_s: float = Field(default=10, gt=0)
    body_timeout_s: float = Field(default=60, gt=0)
    keep_alive_s: int = Field(default=75, ge=1)
    shutdown_timeout_s: float = Field(default=30, ge=0)
    allow_load: bool = False
    batching: BatchSettings = BatchSettings()
    recommend: RecommendSettings = RecommendSettings()
    inference: RepositorySettings = RepositorySettings()

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return check_host(value, where="host")

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError(f"HTTP and gRPC cannot share port {self.http_port}")
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @classmethod
    def from_json(cls, path: str | AnyPath) -> ServerSettings:
        """Read a file with these settings; the models of a relative path are relative to the current folder."""
        return cls.from_dict(load_json(path), where=str(path))

    def changed(self, **changes: Any) -> ServerSettings:
        """Return settings with some of them changed, validated again."""
        return ServerSettings.from_dict({**self.to_dict(), **changes})
