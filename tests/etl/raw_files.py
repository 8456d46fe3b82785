"""Raw files and small configs for the tests of this folder."""

from __future__ import annotations

import gzip
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.etl import EtlConfig, Summary, run


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


def same_on_spark(what: Any, sources: Any, folder: Path, **options: Any) -> tuple[Summary, Summary]:
    """Run DuckDB into folder/duckdb and Spark into folder/spark, and compare every file that must be equal."""
    found = [run(what, sources, folder / engine, engine=engine, **options) for engine in ("duckdb", "spark")]
    # Without a split, the part is called like the folder.
    counts = [{**asdict(one), "output": "", "seconds": {}, "rows": list(one.rows.values())} for one in found]
    assert counts[0] == counts[1]
    truth, ours = ({**data_bytes(folder / name), **_beside(folder / name)} for name in ("duckdb", "spark"))
    assert truth.keys() == ours.keys()
    assert [name for name in truth if truth[name] != ours[name]] == []
    return found[0], found[1]


def _beside(folder: Path) -> dict[str, bytes]:
    """Rejects and statistics."""
    files = [*folder.rglob("rejects.jsonl"), *folder.rglob("info.json"), *folder.rglob("schema.json")]
    part = f'"part": "{folder.name}"'.encode()
    return {str(one.relative_to(folder)): one.read_bytes().replace(part, b"") for one in files}
