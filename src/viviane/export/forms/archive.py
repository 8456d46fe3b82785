"""Archives of torch (.pt2): entries that torch would unpickle, and names that lead out of the archive, are refused."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Final

from viviane.core.errors import ExportError
from viviane.core.file_names import check_file_name
from viviane.core.json_files import expected_form, parse_json

_CONFIG: Final = re.compile(r"data/(?:weights|constants)/model_(?:weights|constants)_config\.json")
_SAMPLES: Final = "data/sample_inputs/model.pt"
_PLAIN: Final = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(?:version|serialization_id)|models/model\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+|extra/[^/]+"
)
_DAMAGED: Final = (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError, NotImplementedError)
_FIX: Final = "do not use this file: it was altered, or was not written by `viviane export`"


def check_archive(file: Path) -> None:
    """Refuse an archive with names that lead out of it, names that occur twice, or packed entries.

    Raises:
        ExportError: names the entry.
    """
    with _opened(file) as archive:
        _check_entries(archive, file)


def check_program_archive(file: Path) -> None:
    """Refuse an archive of torch.export that has more than a graph and plain tensors: torch unpickles other entries.

    Raises:
        ExportError: names the entry.
    """
    with _opened(file) as archive:
        for info in _check_entries(archive, file):
            name = info.filename.partition("/")[2]
            if _CONFIG.fullmatch(name):
                _check_config(_content(archive, info, file), f"{file}, {info.filename}")
            elif not _PLAIN.fullmatch(name) and (name != _SAMPLES or info.file_size):
                raise ExportError("an entry of the archive could run code", where=str(file), value=info.filename,
                                  allowed="a graph and tensors", fix=_FIX)  # fmt: skip


def _opened(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except _DAMAGED as error:
        raise ExportError("not a readable archive", where=str(file), value=str(error)[:200], fix=_FIX) from error


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Path) -> bytes:
    try:
        return archive.read(info)
    except _DAMAGED as error:
        raise ExportError("not a readable archive", where=str(file), value=str(error)[:200], fix=_FIX) from error


def _check_entries(archive: zipfile.ZipFile, file: Path) -> list[zipfile.ZipInfo]:
    found = archive.infolist()
    names: set[str] = set()
    for info in found:
        check_file_name(info.filename, where=str(file), error=ExportError)
        if info.filename in names:
            raise ExportError("an entry of the archive occurs twice", where=str(file), value=info.filename, fix=_FIX)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ExportError("an entry of the archive is packed", where=str(file), value=info.filename, fix=_FIX)
        names.add(info.filename)
    return found


def _check_config(data: bytes, where: str) -> None:
    content = parse_json(data, where=where, error=ExportError)
    with expected_form(where, ExportError):
        entries = dict(content["config"])
        pickled = [name for name, one in entries.items() if one["use_pickle"] is not False]
        names = [one["path_name"] for one in entries.values()]
    if pickled:
        raise ExportError("a tensor of the archive is a pickle, which could run code", where=where, value=pickled[0],
                          fix=_FIX)  # fmt: skip
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"(?:weight|tensor)_\d+", name):
            raise ExportError("an entry of the archive could run code", where=where, value=name, fix=_FIX)
