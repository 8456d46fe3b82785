"""A fitted ETL as one file: a zip of stored members, each with its check sum in manifest.json. No pickle."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from importlib.metadata import version
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import ConfigError, DataError
from viviane.core.files import write_bytes_atomic
from viviane.core.locations import AnyPath, published_location
from viviane.etl.config import EtlConfig
from viviane.etl.groups import Groups
from viviane.etl.learned import Learned, Vocabulary

FORMAT: Final = "viviane-fitted-etl"
VERSION: Final = 1
_MANIFEST: Final = "manifest.json"


def save_learned(fitted: Learned, path: AnyPath) -> AnyPath:
    """Write a fitted ETL, atomically; equal ETLs give equal bytes."""
    members = {"config.json": _json(fitted.config.to_dict()), "schema.json": _json(fitted.schema.to_dict())}
    learned: dict[str, Any] = {
        "states": {name: {str(at): state for at, state in by.items()} for name, by in fitted.states.items()},
        "borders": {name: list(borders) for name, borders in fitted.borders.items()},
        "vocabularies": list(fitted.vocabularies),
    }
    if fitted.groups:  # otherwise the file is as it was before there were any
        learned["groups"] = list(fitted.groups)
    members["learned.json"] = _json(learned)
    for number, vocabulary in enumerate(fitted.vocabularies.values()):
        members[_vocabulary(number)] = _parquet(pa.table({"value": vocabulary.values, "count": vocabulary.counts}))
    for number, groups in enumerate(fitted.groups.values()):
        members[_groups(number)] = _parquet(groups.to_table(folds=False))
    sums = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "viviane": version("viviane"),
        "members": sums,
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {_MANIFEST: _json(manifest), **members}.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # a ZipInfo has a fixed date: the bytes repeat
    write_bytes_atomic(path, packed.getvalue())
    return path


def load_learned(path: AnyPath) -> Learned:
    """Read and verify a file.

    Raises:
        DataError: naming the file and the member that is missing, truncated or altered.
    """
    members = _verified(path)
    try:
        config = EtlConfig.from_dict(json.loads(members["config.json"]), where=str(path))
    except ConfigError as error:
        raise DataError("the fitted ETL has a config that this version does not know", value=str(error)) from error
    learned = json.loads(members["learned.json"])
    vocabularies = {}
    for number, name in enumerate(learned["vocabularies"]):
        table = pq.read_table(io.BytesIO(members[_vocabulary(number)])).combine_chunks()
        values, counts = (_one(table.column(column)) for column in ("value", "count"))
        vocabularies[name] = Vocabulary(values, counts)
    states = {name: {int(at): state for at, state in by.items()} for name, by in learned["states"].items()}
    borders = {name: tuple(found) for name, found in learned["borders"].items()}
    groups = {
        name: Groups.of_table(pq.read_table(io.BytesIO(members[_groups(number)])))
        for number, name in enumerate(learned.get("groups", ()))
    }
    return Learned(config, states, borders, vocabularies, groups)


def _verified(path: AnyPath) -> dict[str, bytes]:
    try:
        with published_location(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
            manifest = json.loads(members.pop(_MANIFEST))
    except FileNotFoundError:
        raise DataError("no such fitted ETL", where=str(path), fix="write it with `viviane etl`") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, NotImplementedError) as error:
        raise DataError(
            "the fitted ETL is truncated, altered or another kind of file", where=str(path), value=str(error)
        ) from error
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        found = f"{manifest.get('format')} version {manifest.get('version')}"
        raise DataError(
            "not a fitted ETL that this version reads",
            where=str(path),
            value=found,
            allowed=f"{FORMAT} version {VERSION}",
            fix="install the version of viviane that wrote it" if manifest.get("format") == FORMAT else None,
        )
    for name in sorted(members.keys() | manifest["members"].keys()):
        known = manifest["members"].get(name)
        data = members.get(name)
        if data is None or known is None or hashlib.sha256(data).hexdigest() != known["sha256"]:
            what = "missing" if data is None else "altered" if known else "unknown"
            raise DataError(f"a member of the fitted ETL is {what}", where=f"{path}, {name}", fix="fetch it again")
    return members


def _vocabulary(number: int) -> str:
    return f"vocabularies/{number:05}.parquet"


def _groups(number: int) -> str:
    return f"groups/{number:05}.parquet"


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _one(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)
