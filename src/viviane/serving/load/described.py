"""What a server states about a model's inputs, checked before requests are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from viviane.config.base import first_problem
from viviane.core.errors import RemoteError
from viviane.serving.columns import ColumnSpec
from viviane.serving.server.tensors import BYTES, DATATYPES

_MOST_INPUTS: Final = 100_000
_MOST_WIDTH: Final = 1 << 20  # values of one row
_Size = Annotated[int, Field(ge=-1, le=_MOST_WIDTH)]
_Name = Annotated[str, Field(min_length=1, max_length=10_000)]


class _Input(BaseModel):
    name: _Name
    datatype: str
    shape: Annotated[list[_Size], Field(max_length=8)]

    @field_validator("datatype")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != BYTES and value not in DATATYPES:
            raise ValueError(f"a datatype is one of {', '.join([*DATATYPES, BYTES])}")
        return value


class _Column(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: _Name
    dtype: Literal["float32", "float64", "int32", "int64", "string"]
    shape: Annotated[list[_Size], Field(min_length=1, max_length=8)]
    raw: bool
    format: Literal["", "text", "hex", "timestamp", "list"] = ""
    separator: str | None = None
    num_ids: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    nullable: bool = False


class _Described(BaseModel):
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=_MOST_INPUTS)]


class _Columns(BaseModel):
    inputs: Annotated[list[_Column], Field(max_length=_MOST_INPUTS)]


def checked_inputs(described: Any, where: str) -> list[dict[str, Any]]:
    """Return name, datatype and shape of each input in a model's metadata.

    Raises:
        RemoteError: the metadata have another form; names the first value that differs.

    Example:
        >>> checked_inputs({"inputs": [{"name": "city", "datatype": "INT64", "shape": [-1, 1]}]}, "http://a")
        [{'name': 'city', 'datatype': 'INT64', 'shape': [-1, 1]}]
    """
    try:
        found = _Described.model_validate(described)
    except ValidationError as error:
        place, problem = first_problem(error)
        raise RemoteError(
            "the server sends no description of the model's inputs", where=f"{where}, {place}", value=problem,
            allowed="a server of the Open Inference Protocol",
        ) from None  # fmt: skip
    return [one.model_dump() for one in found.inputs]


def checked_columns(described: Any, inputs: Sequence[dict[str, Any]]) -> list[ColumnSpec] | None:
    """Return the columns that a server of ours describes; None where it describes none for an input.

    Example:
        >>> column = {"name": "city", "dtype": "int64", "shape": [-1], "raw": False, "num_ids": 9}
        >>> checked_columns({"inputs": [column]}, [{"name": "city"}])[0].num_ids
        9
        >>> checked_columns({"error": "no such path"}, [{"name": "city"}])
    """
    try:
        found = _Columns.model_validate(described).inputs
    except ValidationError:
        return None
    if not {one["name"] for one in inputs} <= {one.name for one in found}:
        return None
    return [ColumnSpec(**{**one.model_dump(), "shape": tuple(one.shape)}) for one in found]
