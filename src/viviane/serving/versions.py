"""Where the versions of a model are."""

from __future__ import annotations

import re
from typing import Final

from viviane.core.errors import CheckpointError, CheckpointNotFoundError
from viviane.core.locations import AnyPath
from viviane.core.remote.published import published_location
from viviane.model.saving import FILES_FILE, MODEL_FILE

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,17}")


def find_versions(path: str | AnyPath) -> dict[int, AnyPath]:
    """Return the versions of a model by number: subfolders `1/`, `2/`, ...; a plain model folder is version 1.

    A run folder with `model/` inside is a plain model folder, too.

    Raises:
        CheckpointError: there is no model.
    """
    folder = published_location(path)
    if not folder.is_dir():
        raise CheckpointError("there is no such folder of a model", where=str(path))
    if _has_model(folder):
        return {1: folder}
    numbered = [inner for inner in folder.iterdir() if _NUMBER.fullmatch(inner.name)]
    found = {int(inner.name): inner for inner in numbered if _has_model(published_location(inner))}
    if not found:
        allowed = f"a folder with {MODEL_FILE}, a run folder with model/, or a folder of versions 1/, 2/, ..."
        raise CheckpointError("there is no saved model here", where=str(path), allowed=allowed)
    return dict(sorted(found.items()))


def find_version(path: str | AnyPath, version: int | None) -> tuple[int, AnyPath]:
    """Return one version and its folder; None takes the latest.

    Raises:
        CheckpointNotFoundError: there is no such version.
    """
    found = find_versions(path)
    number = max(found) if version is None else version
    if number not in found:
        known = ", ".join(map(str, found))
        what = "there is no such version of the model"
        raise CheckpointNotFoundError(what, where=str(path), value=version, allowed=known)
    return number, found[number]


def _has_model(folder: AnyPath) -> bool:
    """Whether a model can be loaded from here; not of a folder that is still being copied, whose list comes last."""
    places = (folder, folder / "model")
    return any((place / name).exists() for place in places for name in (FILES_FILE, MODEL_FILE))
