"""Writing of manifest.json in a data set folder; `viviane.data.formats` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from viviane.core.files import file_sha256, write_json_atomic

MANIFEST_FILE: Final = "manifest.json"


def write_data_manifest(
    folder: Path, kind: Mapping[str, Any], stored: Mapping[str, Any], files: Iterable[Mapping[str, Any]]
) -> None:
    """Write the manifest of finished files, with their current sizes and checksums.

    Args:
        folder: the data set folder.
        kind: the format with its options, as plain data.
        stored: the schema of the files, as plain data.
        files: "name" and "rows" of each, in the order of their rows, and further entries of its format; "sha256" where
            it is known.
    """
    entries = []
    for one in files:
        path = folder / one["name"]
        entries.append({**one, "bytes": path.stat().st_size, "sha256": one.get("sha256") or file_sha256(path)})
    content = {"version": 1, "format": dict(kind), "stored": dict(stored), "files": entries}
    write_json_atomic(folder / MANIFEST_FILE, content)
