"""The manifest of an artifact: its forms, their inputs, what they need, and the size and check sum of every file.

exported/
    manifest.json       this, with a check sum of itself
    parity.json         how each form was compared with the model, and how far apart they were
    schema.json         the data's columns
    etl.zip             the fitted ETL, where the model has one
    torch-export.pt2, aoti.pt2, model.onnx, torchscript.pt      the forms
    tables.safetensors  tables that are not inside the forms
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

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


class KeyLimit(Settings):
    """What the keys of a column must obey, checked before a program runs.

    Args:
        column: of the data.
        table: that it looks up.
        num_rows: keys must be below it and not negative; None: any key.
        max_length: longest bag; None: any.
    """

    column: str
    table: str
    num_rows: int | None = None
    max_length: int | None = None


class OutsideTable(Settings):
    """An input that a loader fills from a model's folder.

    Args:
        input: its name.
        collection: the embedding.
        tables: name, first row and number of rows of each table in it; two rows of zeros follow the last.
    """

    input: str
    collection: str
    tables: tuple[tuple[str, int, int], ...]


class Form(Settings):
    """One form of the model.

    Args:
        files: inside the folder; the first is the one that is opened.
        requires: what it runs with.
    """

    files: tuple[str, ...] = Field(min_length=1)
    requires: Requirements


class ExportManifest(Settings):
    """What an artifact's folder holds.

    Args:
        model: the model's name.
        weights_sha256: of its weights, tables included.
        weights: inside the forms, by name.
        labels: a column of the output each.
        inputs: of every form, in order.
        tables: where the tables are: inside the forms, beside them in the folder, or in the model's folder.
        outside: inputs that come from the model's folder.
        limits: of keys.
        forms: by name.
        files: every other file of the folder.
    """

    format: Literal["viviane-export"] = FORMAT
    version: Literal[1] = VERSION
    viviane: str
    torch: str
    model: str
    weights_sha256: str
    weights: dict[str, TensorEntry]
    labels: tuple[str, ...]
    precision: PrecisionName
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
    """Write the manifest, sealed with a check sum of itself, after all other files."""
    files = {
        file.relative_to(folder).as_posix(): FileEntry(bytes=file.stat().st_size, sha256=file_sha256(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    body = manifest.model_copy(update={"files": files}).to_dict()
    write_json_atomic(folder / MANIFEST_FILE, {**body, "sha256": _seal(body)})


def read_manifest(folder: Path) -> tuple[ExportManifest, str]:
    """Read and check an artifact's manifest; returns it and its check sum.

    Raises:
        ExportError: there is none, it was altered, or it is of another version.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ExportError(
            "there is no exported model here", where=str(folder), fix="name a folder that `viviane export` wrote"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise ExportError("the manifest is too long", where=str(path), allowed=f"{_MOST_BYTES} bytes")
    try:
        body = load_json(path)
    except (VivianeError, RecursionError) as error:
        raise ExportError("the manifest was truncated or altered", where=str(path), value=str(error)) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ExportError("not an exported model", where=str(path), allowed=f"format {FORMAT!r}")
    if body.get("version") != VERSION:
        raise ExportError(
            "the artifact has another format version",
            where=str(path),
            value=body.get("version"),
            allowed=f"version {VERSION}",
            fix="export the model with this version of viviane",
        )
    sealed = body.pop("sha256", None)
    if sealed != _seal(body):
        raise ExportError("the manifest was altered: its check sum differs", where=str(path), fix="use another copy")
    try:
        return ExportManifest.from_dict(body, where=str(path)), str(sealed)
    except VivianeError as error:
        raise ExportError("the manifest is not one of an exported model", where=str(path), value=str(error)) from error


def verify_files(folder: Path, manifest: ExportManifest, names: set[str]) -> None:
    """Compare size and check sum of some files with the manifest, and refuse links and files that it does not name.

    Raises:
        ExportError: names the file.
    """
    for name in sorted(names):
        entry = manifest.files.get(name)
        file = file_inside(folder, name, where=str(folder / MANIFEST_FILE), error=ExportError)
        if entry is None:
            raise ExportError("the manifest does not name a file", where=str(file))
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
        raise ExportError("a file that does not belong to the artifact", where=str(folder / min(found - known)))


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
