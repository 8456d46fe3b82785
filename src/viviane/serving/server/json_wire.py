"""Requests and answers of the HTTP protocol: JSON, with tensors in binary behind it (the binary extension)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import suggest
from viviane.serving.server.service import Answer, chosen_outputs
from viviane.serving.server.status import invalid
from viviane.serving.server.tensors import (
    BYTES,
    Tensor,
    check_shape,
    from_binary,
    number_tensor,
    numpy_type,
    text_tensor,
)

HEADER_LENGTH: Final = "inference-header-content-length"
_REQUEST_KEYS: Final = ("id", "inputs", "outputs", "parameters")
_TENSOR_KEYS: Final = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT_KEYS: Final = ("name", "parameters")
_KNOWN_BYTES: Final = 16 << 10
_KNOWN_HEADS: Final = 256
"""JSON parts up to this size are cached in their parsed form, this many of them: some 20 MB at most."""
_KINDS: Final[dict[str, frozenset[type]]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float, type(None)}),
}


@dataclass(frozen=True)
class InferRequest:
    """A parsed request.

    Args:
        binary: outputs to answer in binary; None for all.
    """

    id: str | None
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...] | None
    binary: frozenset[str] | None


def load_strict(data: bytes | memoryview, where: str = "the body of the request") -> Any:
    """Parse JSON: no duplicate keys, no NaN or Infinity.

    Raises:
        RequestError: it is not valid JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise invalid("a key occurs twice in one JSON object", where=where, value=twice[:200])
        return found

    def constant(name: str) -> Any:
        raise invalid("JSON has no such number", where=where, value=name, fix="send null for a missing value")

    try:
        return json.loads(bytes(data), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise invalid("JSON is nested too deeply", where=where) from None
    except (ValueError, UnicodeDecodeError) as error:
        place = (
            f"{where}, line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else where
        )
        raise invalid("not valid JSON", where=place, value=str(error)[:200]) from None


def parse_request(body: bytes, header_length: str | None) -> InferRequest:
    """Parse the body of an inference request.

    Args:
        header_length: the header with the length of the JSON part.

    Raises:
        RequestError: saying what is wrong and where.
    """
    end = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdecimal() or not 0 < int(header_length[:19]) <= end:
            allowed = f"1 to {end}, the length of the body"
            raise invalid(f"{HEADER_LENGTH} is out of range", value=header_length[:100], allowed=allowed)
        end = int(header_length)
    if header_length is not None and end <= _KNOWN_BYTES:
        head = _known_head(body[:end])
    else:
        head = _parsed_head(memoryview(body)[:end])
    tensors, at, data = [], end, memoryview(body)
    for one in head.inputs:
        if isinstance(one, Tensor):
            tensors.append(one)
            continue
        if one.size > len(body) - at:
            allowed = f"0 to {len(body) - at}, the bytes that are left of the body"
            raise invalid("binary_data_size is out of range", where=one.where, value=one.size, allowed=allowed)
        tensors.append(from_binary(one.name, one.datatype, one.shape, data[at : at + one.size]))
        at += one.size
    if at != len(body):
        what = "the body is longer than its JSON and the binary_data_size of its inputs"
        raise invalid(what, value=len(body), allowed=str(at))
    return InferRequest(head.id, tuple(tensors), head.outputs, head.binary)


@dataclass(frozen=True)
class _BinaryInput:
    """An input whose numbers or texts follow behind the JSON."""

    where: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class _Head:
    """The JSON part of a request."""

    id: str | None
    inputs: tuple[_BinaryInput | Tensor, ...]
    outputs: tuple[str, ...] | None
    binary: frozenset[str] | None


def _parsed_head(data: bytes | memoryview) -> _Head:
    content = _object(load_strict(data), "the request", _REQUEST_KEYS)
    given = content.get("inputs")
    if not isinstance(given, list) or not given:
        raise invalid("a request has a list of inputs", where="inputs", value=repr(given)[:200])
    inputs = tuple(_input(one, f"inputs[{place}]") for place, one in enumerate(given))
    outputs, binary = _outputs(content)
    identity = content.get("id")
    if identity is not None and not isinstance(identity, str):
        raise invalid("an id is text", where="id", value=repr(identity)[:200])
    return _Head(identity, inputs, outputs, binary)


@lru_cache(_KNOWN_HEADS)
def _known_head(data: bytes) -> _Head:
    """Parse the JSON part once for all requests that share it: those of one client differ in their binary part."""
    head = _parsed_head(data)
    for one in head.inputs:
        if isinstance(one, Tensor) and isinstance(one.values, np.ndarray):
            one.values.flags.writeable = False  # several requests have it
    return head


def _input(one: Any, where: str) -> _BinaryInput | Tensor:
    content = _object(one, where, _TENSOR_KEYS)
    name = content.get("name")
    if not isinstance(name, str) or not name:
        raise invalid("an input has a name", where=where, value=repr(name)[:200])
    shape = check_shape(name, content.get("shape"))
    datatype = content.get("datatype")
    if datatype != BYTES:
        numpy_type(name, datatype)
    parameters = _parameters(content, where)
    if "shared_memory_region" in parameters:
        raise invalid("this server takes no shared memory", where=where, fix="send the tensor in binary")
    size = parameters.get("binary_data_size")
    if size is None:
        return _from_data(name, str(datatype), shape, content.get("data"))
    if "data" in content:
        raise invalid("an input has data or binary_data_size, not both", where=where)
    if type(size) is not int or size < 0:
        allowed = "0 to the bytes that are left of the body"
        raise invalid("binary_data_size is out of range", where=where, value=repr(size)[:100], allowed=allowed)
    return _BinaryInput(where, name, str(datatype), shape, size)


def _from_data(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    if not isinstance(data, list):
        raise invalid("an input has data, a list", where=f"input {name!r}", value=repr(data)[:200])
    for _ in shape[1:]:
        if not data or not all(type(part) is list for part in data):
            break
        data = list(chain.from_iterable(data))
    if datatype == BYTES:
        _check_kinds(name, datatype, data, frozenset({str}))
        return text_tensor(name, shape, data)
    kind = np.dtype(numpy_type(name, datatype))
    _check_kinds(name, datatype, data, _KINDS[kind.kind])
    try:
        if kind.kind in "iu":
            _check_range(name, kind, data)
        values: NDArray[Any] = np.array([np.nan if one is None else one for one in data], kind)
    except OverflowError:
        raise invalid("a number is out of range", where=f"input {name!r}", allowed=datatype) from None
    return number_tensor(name, datatype, shape, values)


def _check_kinds(name: str, datatype: str, data: Sequence[Any], allowed: frozenset[type]) -> None:
    if set(map(type, data)) <= allowed:
        return
    place, value = next((place, one) for place, one in enumerate(data) if type(one) not in allowed)
    what = "an element is of another type than its tensor"
    raise invalid(what, where=f"input {name!r}, element {place}", value=repr(value)[:200], allowed=datatype)


def _check_range(name: str, kind: np.dtype[Any], data: Sequence[int]) -> None:
    info = np.iinfo(kind)
    if data and (min(data) < info.min or max(data) > info.max):
        place = next(place for place, one in enumerate(data) if not info.min <= one <= info.max)
        allowed = f"{info.min} to {info.max}"
        where = f"input {name!r}, element {place}"
        raise invalid("a number is out of range", where=where, value=str(data[place])[:100], allowed=allowed)


def _outputs(content: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, frozenset[str] | None]:
    """Return the outputs that are requested, and those of them in binary."""
    every = _flag(_parameters(content, "the request"), "binary_data_output", "the request")
    wanted = content.get("outputs")
    if wanted is None or wanted == []:
        return None, None if every else frozenset()
    if not isinstance(wanted, list):
        raise invalid("outputs are a list", where="outputs", value=repr(wanted)[:200])
    names, binary = [], set()
    for place, one in enumerate(wanted):
        where = f"outputs[{place}]"
        entry = _object(one, where, _OUTPUT_KEYS)
        name = entry.get("name")
        if not isinstance(name, str):
            raise invalid("an output has a name", where=where, value=repr(name)[:200])
        parameters = _parameters(entry, where)
        if parameters.get("classification"):
            raise invalid("this server has no classification extension", where=where)
        if "shared_memory_region" in parameters:
            raise invalid("this server takes no shared memory", where=where, fix="ask for the output in binary")
        names.append(name)
        if _flag(parameters, "binary_data", where, default=every):
            binary.add(name)
    return tuple(names), frozenset(binary)


def _flag(parameters: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise invalid(f"{name} is true or false", where=where, value=repr(value)[:100])
    return value


def _parameters(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    found = content.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise invalid("parameters are an object", where=where, value=repr(found)[:200])
    return found


def _object(value: Any, where: str, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("not a JSON object", where=where, value=repr(value)[:200])
    for key in value:
        if key not in keys:
            raise invalid("unknown key", where=where, value=key[:200], fix=suggest(key, keys))
    return value


def render_answer(request: InferRequest, answer: Answer) -> tuple[bytes, int | None]:
    """Return the body of an answer and, if tensors in binary follow, the length of its JSON."""
    outputs, parts = [], []
    for name, values in chosen_outputs(answer, request.outputs).items():
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [len(values), 1]}
        if request.binary is None or name in request.binary:
            parts.append(values.astype("<f4", copy=False).tobytes())
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = numbers(values)
        outputs.append(entry)
    content: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version), "outputs": outputs}
    if request.id is not None:
        content["id"] = request.id
    head = json.dumps(content, allow_nan=False).encode()
    return (head + b"".join(parts), len(head)) if parts else (head, None)


def numbers(values: NDArray[np.float32]) -> list[float | None]:
    """Return numbers for JSON, which reads back to the same bits; None for what JSON cannot write."""
    finite = np.isfinite(values)
    listed: list[float | None] = values.astype(np.float64).tolist()
    return listed if finite.all() else [one if good else None for one, good in zip(listed, finite, strict=True)]
