"""The manifest of an artifact: its forms, inputs and requirements, and the size and checksum of every file.

exported/
    manifest.json       this manifest, with its own checksum
    parity.json         how each form was compared with the model, and the measured differences
    schema.json         the data's columns
    etl.zip             the fitted ETL, if the model has one
    torch-export.pt2, aoti.pt2, model.onnx, torchscript.pt      the forms
    tables.safetensors  tables outside the forms
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from viviane.config.base import Settings, load_json
from viviane.core.errors import ExportError, VivianeError
from viviane.core.file_names import file_inside
from viviane.core.files import file_sha256, write_json_atomic
from viviane.export.machine import Requirements
from viviane.export.program import PrecisionName, ProgramInput
from viviane.training.checkpoint.manifest import FileEntry, TensorEntry

FORMAT: Final = "viviane-export"
VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
PARITY_FILE: Final = "parity.json"
TABLES_FILE: Final = "tables.safetensors"
_MOST_BYTES: Final = 64 << 20

FormName: TypeAlias = Literal["torch-export", "aoti", "onnx", "torchscript"]
FORMS: Final[tuple[FormName, ...]] = ("torch-export", "aoti", "onnx", "torchscript")
TablesPlace: TypeAlias = Literal["inside", "beside", "model"]
TableKind: TypeAlias = Literal["model", "int8"]


class KeyLimit(Settings):
    """Limits for the keys of a column, checked before a program runs.

    Args:
        column: a column of the data.
        table: the table that it looks up.
        num_rows: keys must be non-negative and below it; None: any key.
        max_length: maximum length of a bag; None: any.
    """

    column: str
    table: str
    num_rows: int | None = None
    max_length: int | None = None


class OutsideTable(Settings):
    """An input that a loader fills from a model's folder.

    Args:
        input: name of the input.
        collection: the embedding collection.
        tables: name, first row and number of rows of each of its tables; two rows of zeros follow the last.
    """

    input: str
    collection: str
    tables: tuple[tuple[str, NonNegativeInt, NonNegativeInt], ...] = Field(min_length=1)


class Form(Settings):
    """One form of the model.

    Args:
        files: files inside the folder; the first one is opened.
        requires: requirements for running it.
    """

    files: tuple[str, ...] = Field(min_length=1)
    requires: Requirements


class ExportManifest(Settings):
    """The content of an artifact's folder.

    Args:
        model: the model's name.
        weights_sha256: hash of its weights, including tables.
        weights: weights inside the forms, by name.
        labels: the label of each output column.
        table_dtype: "int8": tables have 8-bit rows; "model": rows of the type that was trained.
        inputs: inputs of every form, in order.
        tables: where the tables are: inside the forms, in a file next to them, or in the model's folder.
        outside: inputs that are read from the model's folder.
        limits: limits of keys.
        forms: forms by name.
        files: every other file of the folder.
    """

    format: Literal["viviane-export"] = FORMAT
    version: Literal[1] = VERSION
    viviane: str
    torch: str
    model: str
    weights_sha256: str
    weights: dict[str, TensorEntry]
    labels: tuple[str, ...] = Field(min_length=1)
    precision: PrecisionName
    table_dtype: TableKind = "model"
    dense_only: bool = False
    tables: TablesPlace = "inside"
    inputs: tuple[ProgramInput, ...] = Field(min_length=1)
    outside: tuple[OutsideTable, ...] = ()
    limits: tuple[KeyLimit, ...] = ()
    forms: dict[FormName, Form] = Field(min_length=1)
    files: dict[str, FileEntry] = Field(default_factory=dict)

    @field_validator("files", "forms")
    @classmethod
    def _inside(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        names = value if info.field_name == "files" else [name for form in value.values() for name in form.files]
        for name in names:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts or "\0" in name:
                raise ValueError(f"a file outside the folder: {name!r}")
        return value


def write_manifest(folder: Path, manifest: ExportManifest) -> None:
    """Write the manifest, with its own checksum, after all other files."""
    files = {
        file.relative_to(folder).as_posix(): FileEntry(bytes=file.stat().st_size, sha256=file_sha256(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    body = manifest.model_copy(update={"files": files}).to_dict()
    write_json_atomic(folder / MANIFEST_FILE, {**body, "sha256": _seal(body)})


def read_manifest(folder: Path) -> tuple[ExportManifest, str]:
    """Read and verify an artifact's manifest; return it and its checksum.

    Raises:
        ExportError: it does not exist, was altered, or has another version.
    """
    path = folder / MANIFEST_FILE
    file_inside(folder, MANIFEST_FILE, where=str(folder), error=ExportError)
    if not path.is_file():
        raise ExportError("no exported model found", where=str(folder), fix="pass a folder that `viviane export` wrote")
    if path.stat().st_size > _MOST_BYTES:
        raise ExportError("the manifest is too large", where=str(path), allowed=f"{_MOST_BYTES} bytes")
    try:
        body = load_json(path)
    except (VivianeError, RecursionError) as error:
        raise ExportError("the manifest was truncated or altered", where=str(path), value=str(error)) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ExportError("not an exported model", where=str(path), allowed=f"format {FORMAT!r}")
    if body.get("version") != VERSION:
        raise ExportError(
            "the artifact has an unsupported format version",
            where=str(path),
            value=body.get("version"),
            allowed=f"version {VERSION}",
            fix="export the model with this version of viviane",
        )
    sealed = body.pop("sha256", None)
    if sealed != _seal(body):
        raise ExportError("the manifest was altered: its checksum differs", where=str(path), fix="use another copy")
    try:
        return ExportManifest.from_dict(body, where=str(path)), str(sealed)
    except VivianeError as error:
        raise ExportError("not a manifest of an exported model", where=str(path), value=str(error)) from error


def verify_files(folder: Path, manifest: ExportManifest, names: set[str]) -> None:
    """Compare size and checksum of some files with the manifest, and refuse links and unlisted files.

    Raises:
        ExportError: a file is missing, altered or unlisted; names the file.
    """
    for name in sorted(names):
        entry = manifest.files.get(name)
        file = file_inside(folder, name, where=str(folder / MANIFEST_FILE), error=ExportError)
        if entry is None:
            raise ExportError("a file is not in the manifest", where=str(file))
        if not file.is_file():
            raise ExportError("a file of the artifact is missing", where=str(file), fix="use another copy")
        size = file.stat().st_size
        if size != entry.bytes or file_sha256(file) != entry.sha256:
            kind = "truncated" if size < entry.bytes else "altered"
            raise ExportError(
                f"a file of the artifact was {kind}",
                where=str(file),
                value=f"{size} bytes",
                allowed=f"{entry.bytes} bytes, SHA-256 {entry.sha256}",
                fix="use another copy",
            )
    known = {*manifest.files, MANIFEST_FILE}
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    if found - known:
        raise ExportError("a file does not belong to the artifact", where=str(folder / min(found - known)))


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
