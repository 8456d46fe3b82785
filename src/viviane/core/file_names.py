"""Validation of file names that are read from manifests, file lists and archives: they must stay in their folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Final, TypeVar

from viviane.core.errors import DataError, VivianeError

AnyFolder = TypeVar("AnyFolder")
_LONGEST_BYTES: Final = 255  # maximum length of a path component on every common file system
_LONGEST_PATH_BYTES: Final = 2048
_SEPARATORS = "\\:"  # special characters of Windows: folders, drives, streams


def check_file_name(name: object, *, where: str, error: type[VivianeError] = DataError) -> str:
    """Return a file name read from a file if it is a relative path with slashes that stays inside its folder.

    Args:
        name: the name read from a file.
        where: the file that contains it.
        error: class of the error.

    Raises:
        VivianeError: of class `error`: the name is absolute, contains "." or "..", a separator of Windows, or a control
            character.

    Example:
        >>> check_file_name("tables/user.safetensors", where="manifest.json")
        'tables/user.safetensors'
        >>> check_file_name("../.bashrc", where="manifest.json")
        Traceback (most recent call last):
        ...
        viviane.core.errors.DataError: a file name points outside its folder
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
    # isprintable also ensures that the text can be encoded: surrogates are not printable.
    sizes = [len(part.encode()) for part in parts] if good else [0]
    if max(sizes) > _LONGEST_BYTES or sum(sizes) > _LONGEST_PATH_BYTES:
        raise error("a file name is too long", where=where, value=f"{text[:80]}...",
                    allowed=f"{_LONGEST_BYTES} bytes per component, {_LONGEST_PATH_BYTES} in total")  # fmt: skip
    if not good:
        raise error(
            "a file name points outside its folder" if isinstance(name, str) else "a file name is not text",
            where=where,
            value=name,
            allowed="a relative path inside the folder, with slashes, without . and ..",
            fix="do not use this file: it is damaged, or was made to read or write other files",
        )
    return text


def file_inside(folder: Path, name: object, *, where: str, error: type[VivianeError] = DataError) -> Path:
    """Return the path of a file that a manifest names; the file may be missing.

    Args:
        folder: the folder of the manifest.
        name, where, error: see `check_file_name`.

    Raises:
        VivianeError: of class `error`: the name points outside the folder, directly or through a symbolic link, or
            names a device, a pipe or a folder.
    """
    path = folder / check_file_name(name, where=where, error=error)
    if path.is_symlink() or path.parent != folder:
        refuse_link_outside(path, folder, error)
    if path.exists() and not path.is_file():
        raise error("not a regular file", where=str(path), fix="do not use this folder: it was tampered with")
    return path


def refuse_links(folder: Path, names: Iterable[str] | None = None, error: type[VivianeError] = DataError) -> None:
    """Refuse a folder with symbolic links to what is outside of it, which would be read or overwritten, or with pipes.

    Args:
        folder: it may be missing.
        names: look only at these; None: at every entry, not at those of subfolders.
        error: class of the error.

    Raises:
        VivianeError: of class `error`.
    """
    paths = (folder.iterdir() if folder.is_dir() else ()) if names is None else (folder / name for name in names)
    for path in paths:
        if path.is_symlink():
            refuse_link_outside(path, folder, error)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error("not a regular file", where=str(path), fix="do not use this folder: it was tampered with")


def refuse_link_outside(path: Path, folder: Path, error: type[VivianeError] = DataError) -> None:
    """Refuse a path whose symbolic links point outside a folder.

    The folder may itself be a link, since the user names it. The cache of Hugging Face is allowed: files under
    `<cache>/snapshots/<revision>` may link to a file directly in `<cache>/blobs`.

    Raises:
        VivianeError: of class `error`.
    """
    target, inside = path.resolve(), folder.resolve()
    if not target.is_relative_to(inside) and target.parent not in _blob_folders(inside):
        raise error(
            "a symbolic link points outside its folder",
            where=str(path),
            value=str(target),
            fix="copy the file itself into the folder, if you trust it",
        )


def _blob_folders(folder: Path) -> list[Path]:
    """Return the blob folders of a snapshot in a Hugging Face cache; `folder` is the snapshot or inside it."""
    below = [folder, *folder.parents]
    return [one.parent.parent / "blobs" for one in below if one.parent.name == "snapshots" and one != one.parent]
