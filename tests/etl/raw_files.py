"""Raw files and small configs for the tests of this room."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.etl import EtlConfig


def config(columns: list[dict[str, Any]], *, input: dict[str, Any] | None = None, **rest: Any) -> EtlConfig:
    return EtlConfig.from_dict({"input": {"columns": columns, **(input or {})}, **rest})


def clicks(**encoding: Any) -> EtlConfig:
    """A label and one column of strings."""
    return config(
        [{"name": "click", "type": "int"}, {"name": "item"}],
        labels=[{"name": "click"}],
        categorical=[{"name": "item", "encoding": {"type": "categorify", **encoding}}],
    )


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def zipped(path: Path, content: str) -> Path:
    path.write_bytes(gzip.compress(content.encode()))
    return path


def read(folder: Path) -> dict[str, list[Any]]:
    """All rows of a part, in order."""
    files = sorted(folder.glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files]).to_pydict()


def data_bytes(folder: Path) -> dict[str, bytes]:
    """The files that hold data, by relative path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".parquet", ".zip")
    }
