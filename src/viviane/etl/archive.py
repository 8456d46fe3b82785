"""A fitted ETL as one file: a zip of stored members, each with its check sum in manifest.json. No pickle."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import ConfigError, DataError, DataNotFoundError
from viviane.core.files import write_bytes_atomic
from viviane.core.json_files import expected_form, json_object, parse_json
from viviane.core.locations import AnyPath
from viviane.core.remote.published import published_location
from viviane.etl.completeness import check_complete
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import Join
from viviane.etl.external import JoinTable
from viviane.etl.groups import Groups
from viviane.etl.learned import Learned, Vocabulary
from viviane.etl.values import combined
from viviane.schema import Schema

FORMAT: Final = "viviane-fitted-etl"
VERSION: Final = 1
_MANIFEST: Final = "manifest.json"
_NEEDED: Final = frozenset({"config.json", "schema.json", "learned.json"})
_READ_ROWS: Final = 4096
_MOST_EXPANSION: Final = 1000  # of Parquet: runs of one value take next to nothing


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
    if fitted.external:
        learned["external"] = list(fitted.external)
    members["learned.json"] = _json(learned)
    for number, vocabulary in enumerate(fitted.vocabularies.values()):
        members[_vocabulary(number)] = _parquet(pa.table({"value": vocabulary.values, "count": vocabulary.counts}))
    for number, groups in enumerate(fitted.groups.values()):
        members[_groups(number)] = _parquet(groups.to_table(folds=False))
    for number, external in enumerate(fitted.external.values()):
        members[_external(number)] = _parquet(external.rows)
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
    """Read and verify a file, or the etl.zip of a folder.

    Raises:
        DataError: naming the file and the member that is missing, truncated or altered.
    """
    if isinstance(path, Path) and path.is_dir():
        path = path / "etl.zip"
    members = _verified(path)
    learned = parse_json(members["learned.json"], where=f"{path}, learned.json", error=DataError)
    try:
        with expected_form(str(path), DataError):
            config = EtlConfig.from_dict(_json_of(path, members, "config.json"), where=str(path))
            fitted = Learned(
                config,
                {name: _states(by) for name, by in learned["states"].items()},
                {name: tuple(map(float, found)) for name, found in learned["borders"].items()},
                {name: _vocabulary_of(members, number) for number, name in enumerate(learned["vocabularies"])},
                {name: _groups_of(members, number) for number, name in enumerate(learned.get("groups", ()))},
                _external_of(config, members, learned.get("external", ())),
            )
            check_complete(fitted, str(path))
            schema = Schema.from_dict(_json_of(path, members, "schema.json"), where=f"{path}, schema.json")
            if schema != fitted.schema:
                raise DataError("the schema of the fitted ETL is not that of its config", where=str(path))
    except ConfigError as error:
        raise DataError("the fitted ETL has a config that this version does not know", value=str(error)) from error
    except pa.ArrowException as error:
        raise DataError("a table of the fitted ETL cannot be read", where=str(path), value=str(error)[:300]) from error
    return fitted


def _json_of(path: AnyPath, members: dict[str, bytes], name: str) -> Any:
    return parse_json(members[name], where=f"{path}, {name}", error=DataError)


def _states(by: Any) -> dict[int, dict[str, float]]:
    return {int(at): {str(name): float(value) for name, value in state.items()} for at, state in by.items()}


def _vocabulary_of(members: dict[str, bytes], number: int) -> Vocabulary:
    table = _table(members[_vocabulary(number)])
    return Vocabulary(*(combined(table.column(name)) for name in ("value", "count")))


def _groups_of(members: dict[str, bytes], number: int) -> Groups:
    return Groups.of_table(_table(members[_groups(number)]))


def _table(data: bytes) -> pa.Table:
    """Read a Parquet member whose size in memory is in proportion to its bytes: what it declares, and what comes."""
    file = pq.ParquetFile(io.BytesIO(data))
    described = file.metadata
    groups = [described.row_group(number) for number in range(described.num_row_groups)]
    if any(group.column(i).has_dictionary_page for group in groups for i in range(group.num_columns)):
        raise DataError("a table of the fitted ETL has a dictionary, by which a value repeats without limit")
    _check_expansion(data, _num_bytes(described))
    size, batches = 0, []
    for batch in file.iter_batches(_READ_ROWS):
        size += batch.nbytes
        _check_expansion(data, size)
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow).combine_chunks()


def _num_bytes(described: pq.FileMetaData) -> int:
    return sum(described.row_group(number).total_byte_size for number in range(described.num_row_groups))


def _expands_too_far(data: bytes, size: int) -> bool:
    return size > _MOST_EXPANSION * len(data) + (1 << 20)


def _check_expansion(data: bytes, size: int) -> None:
    if _expands_too_far(data, size):
        raise DataError("a table of the fitted ETL expands too far", value=f"{len(data):,} to {size:,} bytes",
                        allowed=f"{_MOST_EXPANSION} times its size")  # fmt: skip


def _external_of(config: EtlConfig, members: Mapping[str, bytes], names: Sequence[str]) -> dict[str, JoinTable]:
    num_keys = {one.name: len(one.keys) for one in config.derived if isinstance(one, Join)}
    return {name: JoinTable(_table(members[_external(i)]), num_keys[name]) for i, name in enumerate(names)}


def _verified(path: AnyPath) -> dict[str, bytes]:
    try:
        with published_location(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            most = file.seek(0, io.SEEK_END)
            entries = {entry.filename: entry for entry in archive.infolist()}
            _check_sizes(path, archive.infolist(), most)
            manifest = _manifest(path, archive.read(_MANIFEST))
            names = [name for name in entries if name != _MANIFEST]
            members = {name: archive.read(name) for name in names}
    except FileNotFoundError:
        raise DataNotFoundError("no such fitted ETL", where=str(path), fix="write it with `viviane etl`") from None
    except DataError:
        raise
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, RuntimeError, struct.error) as error:
        raise DataError(
            "the fitted ETL is truncated, altered or another kind of file", where=str(path), value=str(error)
        ) from error
    for name in sorted(members.keys() | manifest.keys() | _NEEDED):
        known = manifest.get(name)
        data = members.get(name)
        if data is None or known is None or hashlib.sha256(data).hexdigest() != known:
            what = "missing" if data is None else "altered" if known else "unknown"
            raise DataError(f"a member of the fitted ETL is {what}", where=f"{path}, {name}", fix="fetch it again")
    return members


def _check_sizes(path: AnyPath, entries: list[zipfile.ZipInfo], most: int) -> None:
    """Refuse members that would take more memory than the file takes on disk, before any is read."""
    names = [entry.filename for entry in entries]
    if len(names) != len(set(names)):
        raise DataError("two members of the fitted ETL have one name", where=str(path))
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise DataError(
                "a member of the fitted ETL is compressed; it holds stored members alone",
                where=f"{path}, {entry.filename}", value=f"{entry.compress_size:,} to {entry.file_size:,} bytes",
                fix="use the file that `viviane etl` wrote",
            )  # fmt: skip
    size = sum(entry.file_size for entry in entries)
    if size > most:
        raise DataError("the members of the fitted ETL are larger than the file", where=str(path),
                        value=f"{size:,} bytes", allowed=f"{most:,} bytes")  # fmt: skip


def _manifest(path: AnyPath, data: bytes) -> dict[str, str]:
    """Return the check sum of each member.

    Raises:
        DataError: the manifest is malformed, or of another format or version.
    """
    where = f"{path}, {_MANIFEST}"
    manifest = json_object(parse_json(data, where=where, error=DataError), where=where, error=DataError)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        found = f"{manifest.get('format')} version {manifest.get('version')}"
        raise DataError(
            "not a fitted ETL that this version reads",
            where=str(path),
            value=found,
            allowed=f"{FORMAT} version {VERSION}",
            fix="install the version of viviane that wrote it" if manifest.get("format") == FORMAT else None,
        )
    with expected_form(where, DataError):
        return {name: str(entry["sha256"]) for name, entry in manifest["members"].items()}


def _vocabulary(number: int) -> str:
    return f"vocabularies/{number:05}.parquet"


def _groups(number: int) -> str:
    return f"groups/{number:05}.parquet"


def _external(number: int) -> str:
    return f"external/{number:05}.parquet"


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    data = sink.getvalue()
    if _expands_too_far(data, max(table.nbytes, _num_bytes(pq.ParquetFile(io.BytesIO(data)).metadata))):
        sink = io.BytesIO()  # values that repeat themselves: the reader would take them for a bomb
        pq.write_table(table, sink, compression="none", use_dictionary=False)
        data = sink.getvalue()
    return data


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
