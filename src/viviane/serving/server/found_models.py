"""Which models a folder holds: one model, versions of one, or several models."""

from __future__ import annotations

import re

from viviane.core.errors import CheckpointError, ConfigError
from viviane.core.locations import AnyPath
from viviane.core.remote.published import published_location
from viviane.model.saving import find_model, read_model_file
from viviane.serving.settings import MODEL_NAME, ModelEntry, SessionSettings
from viviane.serving.versions import find_versions


def find_entries(
    path: str | AnyPath, *, name: str | None = None, session: SessionSettings | None = None
) -> tuple[ModelEntry, ...]:
    """Return the models of a folder as a server's settings name them.

    Args:
        path: a model folder or run folder; a folder of versions `1/`, `2/`, ..., all of which are served; or a folder
            whose subfolders are such.
        name: of the one model; None takes the name that it was saved under, or its folder's.
        session: how sessions compute.

    Raises:
        CheckpointError: there is no model.
        ConfigError: a name for several models, or one that requests cannot name.
    """
    folder = published_location(path)
    settings = session or SessionSettings()
    try:
        versions = find_versions(path)
    except CheckpointError:
        inner = _several(folder)
        if not inner:
            raise
        if name is not None:
            raise ConfigError("one name for several models", where=str(path), value=name,
                              allowed=f"none, for {', '.join(inner)}") from None  # fmt: skip
        return tuple(
            ModelEntry(name=_checked(one, where), path=where, versions="all", session=settings)
            for one, where in inner.items()
        )
    is_one = versions.get(1) == folder
    found = name or (read_model_file(find_model(path)).name if is_one else folder.name)
    return (ModelEntry(name=_checked(found, str(path)), path=str(path), versions="all", session=settings),)


def _several(folder: AnyPath) -> dict[str, str]:
    found = {}
    if not folder.is_dir():
        return {}
    inner_folders: list[AnyPath] = list(folder.iterdir())
    for inner in sorted(inner_folders, key=_name):
        try:
            if inner.is_dir() and find_versions(inner):
                found[inner.name] = str(inner)
        except CheckpointError:
            continue
    return found


def _name(folder: AnyPath) -> str:
    return folder.name


def _checked(name: str, where: str) -> str:
    if not re.fullmatch(MODEL_NAME, name):
        allowed = "letters, digits, dots, dashes and underscores"
        raise ConfigError("requests cannot name this model", where=where, value=name, allowed=allowed,
                          fix="give it a name with --name")  # fmt: skip
    return name
