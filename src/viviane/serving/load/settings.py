"""Settings of a load test."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from viviane.config.base import Settings
from viviane.core.addresses import server_address


class LoadSettings(Settings):
    """What load a server is put under.

    Args:
        url: of the server; gRPC takes its host and port, with or without a scheme.
        protocol: "http" or "grpc"; binary tensors in both.
        model, version: None takes the server's only model, and its newest version.
        rows: of each request.
        concurrency: phases with this many clients, each of which sends its next request when it has the answer.
        rates: phases with requests at random times (a Poisson process), this many a second on average, whether or not
            the server keeps up. Negative numbers are factors of the best throughput of the phases with clients:
            -0.5 is half of it, -2 twice.
        seconds: of each phase.
        warm_up: requests before the first phase, which are not counted.
        timeout_s: a request without an answer for so long has failed.
        max_outstanding: requests at a rate that wait for an answer; beyond it the generator itself is the limit, and
            further ones count as "not sent".
        processes: that send requests, and share the clients or the rate. One sends some thousand requests a second; a
            faster server needs several, on processor cores that the server does not use. Programs that use more than
            one start their work under `if __name__ == "__main__":`.
        seed: of times and of rows.
        shared_memory: requests and replies lie in memory that the client shares with Triton on the same host;
            perf_analyzer alone does it.

    Example:
        >>> LoadSettings(url="http://127.0.0.1:8000").concurrency
        (1, 16, 64)
    """

    url: str = Field(min_length=1)
    protocol: Literal["http", "grpc"] = "http"
    model: str | None = None
    version: str | None = None
    rows: int = Field(default=1, ge=1, le=1 << 20)
    concurrency: tuple[int, ...] = (1, 16, 64)
    rates: tuple[float, ...] = (-0.25, -0.5, -0.75, -1.0, -1.5, -2.0)
    seconds: float = Field(default=5, gt=0)
    warm_up: int = Field(default=20, ge=0)
    timeout_s: float = Field(default=30, gt=0)
    max_outstanding: int = Field(default=4096, ge=1)
    processes: int = Field(default=1, ge=1, le=256)
    seed: int = 0
    shared_memory: bool = False

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        server_address(value, where="url", schemes=("http", "https", "grpc"), default_scheme="http")
        return value

    @field_validator("concurrency")
    @classmethod
    def _clients(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 1 for count in value):
            raise ValueError("numbers of clients are at least 1")
        return value

    @field_validator("rates")
    @classmethod
    def _rates(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(rate == 0 for rate in value):
            raise ValueError("a rate is not 0")
        return value
