"""Mutations of files: any bytes, one value of JSON, arrays of NumPy and headers of safetensors."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

BOMBS = [
    "[" * 5000, '{"a":' * 3000, "9" * 6000, "1e999",
    "-1e999", "NaN", "null", "true", "[]", "{}", '""', "-1", "0", "1.5",
    "18446744073709551615", "9223372036854775808", '"\\u0000"', '"\\ud800"', '"../../x"', '"/etc/passwd"', "[[]]",
    '[null]', '{"": null}', '"x"', '"' + "a" * 5000 + '"', "1e308", "-9223372036854775808", "2147483648", "", "}", ",",
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change bytes anywhere, or one value of JSON."""
    kind = rng.randrange(6)
    if kind <= 2:
        with contextlib.suppress(ValueError, UnicodeDecodeError):
            return mutate_json(json.loads(data), rng).encode("utf-8", "surrogatepass")
    at = rng.randrange(len(data) + 1)
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + rng.randrange(9) :]
    return data[:at] + rng.choice(BOMBS).encode("utf-8", "surrogatepass") + data[at + rng.randrange(40) :]


def mutate_json(value: Any, rng: random.Random) -> str:
    """Put a hostile value into one place of a tree, rename or remove a key."""
    marker = "@@@hostile@@@"
    places = list(_places(value))
    if not places:
        return rng.choice(BOMBS)
    inside, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[rng.choice(["", "x", "learning_rate", str(key) + "s"])] = inside.pop(key)
    else:
        inside[key] = marker
    return json.dumps(value).replace(json.dumps(marker), rng.choice(BOMBS))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def mutate_array(data: bytes, rng: random.Random) -> bytes:
    """Give a .npy file another type, shape or value, or a size that it does not have."""
    array = np.load(io.BytesIO(data), allow_pickle=False)
    kind, content = rng.randrange(9), io.BytesIO()
    with np.errstate(all="ignore"):
        if kind == 0:
            array = array.astype(rng.choice(["f4", "f8", "i4", "u8", "u1", "c8", "U5", "M8[s]", ">i8", ">f4", "?"]))
        elif kind == 1:
            array = array.reshape(-1)[: rng.randrange(array.size)]
        elif kind == 2:
            array = array.reshape(-1, 1)
        elif kind == 3:
            array = array.copy()
            array.flat[rng.randrange(array.size)] = rng.choice([-1, 2**31 - 1, 100])
        elif kind == 4:
            array = np.array(3)
        elif kind == 5:
            array = np.zeros(3, dtype=[("x", "i4"), ("y", "f4")])
        elif kind == 6 and array.dtype.kind == "f":
            array = array.copy()
            array.flat[0] = rng.choice([np.nan, np.inf])
        else:
            array = array[::-1].copy()
    (np.savez if kind == 7 else np.save)(content, array)
    whole = content.getvalue()
    return whole.replace(b"(", b"(9999999999999, ", 1) if rng.random() < 0.1 else whole


def mutate_tensors(data: bytes, rng: random.Random) -> bytes:
    """Change the type, shape, place or name of a tensor of a safetensors file, or its numbers."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    name = rng.choice(list(header))
    entry, kind = header[name], rng.randrange(7)
    if kind == 0:
        entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "C64", "XX"])
    elif kind == 1:
        entry["shape"] = [rng.choice([0, -1, 1, 2**40, 2**63, 3]) for _ in entry["shape"]]
    elif kind == 2:
        entry["data_offsets"] = [rng.choice([0, -1, 8, 2**40]), rng.choice([0, 8, 2**40, len(body)])]
    elif kind == 3:
        header[f"{name}x"] = header.pop(name)
    elif kind == 4:
        entry["shape"] = entry["shape"][::-1]
    elif kind == 5:
        body += bytes(8)
    else:
        for _ in range(8):
            body[rng.randrange(len(body))] = rng.choice([0, 255, 127])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)
