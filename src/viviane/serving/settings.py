"""Settings of sessions, as keyword arguments and as the JSON of a server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from viviane.config.base import Settings
from viviane.serving.parameter_server.settings import TableSettings

MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class SessionSettings(Settings):
    """How a session computes.

    Example:
        >>> SessionSettings(device="cpu", num_threads=2).precision
        'model'
    """

    device: str = "auto"
    """"auto" (first GPU, else CPU), "cpu", "cuda", "cuda:1"."""
    precision: Literal["model", "fp32", "tf32", "bf16", "fp16"] = "model"
    """Of dense layers; "model" is the precision that the model was trained in, as `Model.predict` takes it."""
    table_dtype: Literal["model", "int8"] = "model"
    """Of tables: "model" as they were trained; "int8" as 8 bits a number with a scale and an offset of each row, which
    takes a quarter of float32's memory and moves predictions a little. Not for dynamic tables, tables in tiers, and
    models made from a torch module."""
    layer_dtype: Literal["model", "int8"] = "model"
    """Of fully connected and cross layers on the CPU: "int8" computes them in 8 bits, each row and each output with a
    range of its own, three to four times as fast as float32; predictions move by some thousandths. Layers with fewer
    than 16 inputs or outputs stay as they are. For models that run as a program, on processors with AVX-512 VNNI."""
    max_batch_size: int | None = Field(default=None, ge=1, le=1 << 20)
    """Most rows computed at once; a request with more rows is computed in parts. None: 8192, on a GPU 65,536."""
    num_threads: int = Field(default=1, ge=1, le=4096)
    """CPU threads that compute one request."""
    instances: int | None = Field(default=None, ge=1, le=4096)
    """Requests that are computed at the same time; they share the weights, others wait. None: 1, on a GPU 2."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Capture the forward pass in CUDA graphs for a ladder of batch sizes: "auto" does on a GPU where nothing prevents
    it; True refuses what prevents it; False runs operation by operation."""
    rows: Literal["auto", "raw", "encoded", "matrices"] = "auto"
    """The form of rows unless a request sets it: "raw", as logged, which the model's own ETL turns into ids;
    "encoded", ids and numbers as the ETL writes them; "matrices", the same with all dense numbers in one matrix,
    `dense`, and all one-hot ids in another, `one_hot`, in the order of the schema, so that a request has few tensors;
    "auto" takes raw rows where the model has an ETL."""
    warm_up: tuple[int, ...] = (1,)
    """Batch sizes that are computed once when the model is loaded."""

    def batch_limit(self, device: str) -> int:
        """Return `max_batch_size` on a kind of device, "cpu" or "cuda"."""
        return self.max_batch_size or (65_536 if device == "cuda" else 8192)

    @field_validator("warm_up")
    @classmethod
    def _sizes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in value):
            raise ValueError("batch sizes to warm up with are at least 1")
        return value


class ModelEntry(Settings):
    """One model of a repository.

    Args:
        name: by which requests ask for it.
        path: a model folder, a run folder, or a folder of versions `1/`, `2/`, ...
        versions: "latest", "all", or version numbers.
        session: how it computes.
        tables: the tiers that hold its tables; None: this process's memory.
    """

    name: str = Field(pattern=MODEL_NAME, max_length=255)
    path: str = Field(min_length=1)
    versions: Literal["latest", "all"] | tuple[int, ...] = "latest"
    session: SessionSettings = SessionSettings()
    tables: TableSettings | None = None


class RepositorySettings(Settings):
    """The "inference" clause of a JSON file: which models a process serves.

    Example:
        >>> clause = {"models": [{"name": "ctr", "path": "models/ctr", "session": {"device": "cpu"}}]}
        >>> RepositorySettings.from_dict(clause).models[0].versions
        'latest'
    """

    models: tuple[ModelEntry, ...] = ()

    @field_validator("models")
    @classmethod
    def _names(cls, value: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
        names = [entry.name for entry in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model name(s) used twice: {', '.join(twice)}")
        return value

    @classmethod
    def of_clause(cls, data: Any, where: str | None = None) -> RepositorySettings:
        """Read a file's content: the clause itself, or an object with the clause under "inference"."""
        inner = data["inference"] if isinstance(data, dict) and set(data) == {"inference"} else data
        return cls.from_dict(inner, where=where)
