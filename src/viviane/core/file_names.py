"""Names of files that come from a file: manifests, file lists and archives must not lead out of their folder."""

from __future__ import annotations

import sys
from pathlib import Path, PureWindowsPath
from typing import Final, TypeVar

from viviane.core.errors import DataError, VivianeError

AnyFolder = TypeVar("AnyFolder")
_LONGEST_BYTES: Final = 255  # of a part of a path, on every common file system
_LONGEST_PATH_BYTES: Final = 2048
_SEPARATORS = "\\:"  # of Windows: folders, drives, streams


def check_file_name(name: object, *, where: str, error: type[VivianeError] = DataError) -> str:
    """Return a name that a file gave, a relative path with slashes, if it stays inside its folder on every system.

    Args:
        name: what the file says.
        where: the file that says it.
        error: the class of the error.

    Raises:
        VivianeError: of class `error`: the name is absolute, holds "." or "..", a separator of Windows, or a control
            character.

    Example:
        >>> check_file_name("tables/user.safetensors", where="manifest.json")
        'tables/user.safetensors'
        >>> check_file_name("../.bashrc", where="manifest.json")
        Traceback (most recent call last):
        ...
        viviane.core.errors.DataError: a file name leads out of its folder
          where:   manifest.json
          value:   '../.bashrc'
          allowed: a relative path inside the folder, with slashes, without . and ..
          do:      do not use this file: it is damaged, or was made to read or write other files
    """
    text = name if isinstance(name, str) else ""
    parts = text.split("/")
    good = all(part not in ("", ".", "..") for part in parts) and not any(sign in text for sign in _SEPARATORS)
    good = good and text.isprintable() and not any(part.endswith((" ", ".")) for part in parts)
    if good and sys.platform == "win32":
        good = not any(PureWindowsPath(part).is_reserved() for part in parts)
    # Whether text can be encoded at all is settled by isprintable: halves of surrogate pairs are not printable.
    sizes = [len(part.encode()) for part in parts] if good else [0]
    if max(sizes) > _LONGEST_BYTES or sum(sizes) > _LONGEST_PATH_BYTES:
        raise error("a file name is too long", where=where, value=f"{text[:80]}...",
                    allowed=f"{_LONGEST_BYTES} bytes in each part, {_LONGEST_PATH_BYTES} together")  # fmt: skip
    if not good:
        raise error(
            "a file name leads out of its folder" if isinstance(name, str) else "a file name is not text",
            where=where,
            value=name,
            allowed="a relative path inside the folder, with slashes, without . and ..",
            fix="do not use this file: it is damaged, or was made to read or write other files",
        )
    return text


def file_inside(folder: Path, name: object, *, where: str, error: type[VivianeError] = DataError) -> Path:
    """Return the path of a file that a manifest names; the file may be missing.

    Args:
        folder: that the manifest stands in.
        name, where, error: see `check_file_name`.

    Raises:
        VivianeError: of class `error`: the name leads out of the folder, by itself or through a symbolic link, or is
            that of a device, a pipe or a folder.
    """
    path = folder / check_file_name(name, where=where, error=error)
    if path.is_symlink() or path.parent != folder:
        refuse_link_outside(path, folder, error)
    if path.exists() and not path.is_file():
        raise error("not a regular file", where=str(path), fix="do not use this folder: it was tampered with")
    return path


def refuse_link_outside(path: Path, folder: Path, error: type[VivianeError] = DataError) -> None:
    """Refuse a path whose symbolic links lead out of a folder.

    The folder may itself be a link, since the user names it. The cache of Hugging Face is allowed: what stands under
    `<cache>/snapshots/<revision>` may link to a file directly in `<cache>/blobs`.

    Raises:
        VivianeError: of class `error`.
    """
    target, inside = path.resolve(), folder.resolve()
    if not target.is_relative_to(inside) and target.parent not in _blob_folders(inside):
        raise error(
            "a file leads out of its folder through a symbolic link",
            where=str(path),
            value=str(target),
            fix="copy the file itself into the folder, if you trust it",
        )


def _blob_folders(folder: Path) -> list[Path]:
    """Return where a snapshot in a cache of Hugging Face keeps its files; `folder` is the snapshot or inside it."""
    below = [folder, *folder.parents]
    return [one.parent.parent / "blobs" for one in below if one.parent.name == "snapshots" and one != one.parent]
