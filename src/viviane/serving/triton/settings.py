"""Settings of a Triton server and of the repositories that are written for it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from viviane.config.base import Settings
from viviane.core.addresses import check_host


class TritonSettings(Settings):
    """How Triton serves models.

    Args:
        host: address to listen on, for HTTP, gRPC and metrics.
        http_port, grpc_port, metrics_port: must be free.
        max_batch_size: rows of one request, and of requests that are predicted together.
        max_delay_ms: how long a request may wait for others; 0 takes those that wait already.
        preferred_batch_size: rows of a batch; Triton passes it to the model then, even if more requests wait. Larger
            batches gain little, and Triton loses HTTP answers when hundreds of requests are answered at once. None:
            256; with `max_queued`, as many as wait.
        max_queued: 0: the model answers every request that it is given. Else it answers this many of a batch, and
            refuses the later ones with UNAVAILABLE. A refusal costs as much as an answer of a small model, so this pays
            where answers take milliseconds.
        instances: processes of each model; each of them has a copy of the weights.
        ensemble: cleaning (the model's ETL) and prediction as two models behind an ensemble, instead of one model.
        allow_load: models can be loaded and unloaded over the network.
        start_timeout_s: in which the server has to be ready.
        stop_timeout_s: in which accepted requests are answered after SIGTERM.
        log: file of the server's log; None writes it to standard error.

    Example:
        >>> TritonSettings(max_batch_size=4096).instances
        1
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=8001, ge=1, le=65535)
    metrics_port: int = Field(default=8002, ge=1, le=65535)
    max_batch_size: int = Field(default=16_384, ge=1, le=1 << 20)
    max_delay_ms: float = Field(default=0, ge=0, le=10_000)
    preferred_batch_size: int | None = Field(default=None, ge=1, le=1 << 20)
    max_queued: int = Field(default=0, ge=0)
    instances: int = Field(default=1, ge=1, le=256)
    ensemble: bool = False
    allow_load: bool = False
    start_timeout_s: float = Field(default=180, gt=0)
    stop_timeout_s: int = Field(default=30, ge=1)
    log: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.preferred_batch_size is not None and self.preferred_batch_size > self.max_batch_size:
            raise ValueError(f"preferred_batch_size is larger than max_batch_size, {self.max_batch_size}")
        return self

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return check_host(value, where="host")
