"""Saving and loading a recommender; see `viviane.retrieval.recommender`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field

from viviane.config.base import Settings, load_json
from viviane.core.errors import CheckpointError, ConfigError, VivianeError
from viviane.core.file_names import file_inside, refuse_links
from viviane.core.files import file_sha256, read_array, replace_folder, write_json_atomic
from viviane.core.locations import AnyPath, location
from viviane.core.remote.cache import local_copy
from viviane.model import Model
from viviane.retrieval.candidates import CandidateSource
from viviane.retrieval.index import ItemIndex
from viviane.retrieval.item_knn import ItemKNN, ItemKNNSettings
from viviane.retrieval.popularity import Popularity
from viviane.retrieval.vector_source import VectorSource, model_version

RECOMMENDER_FILE: Final = "recommender.json"
_ARRAYS: Final[Mapping[str, Mapping[str, type[np.generic]]]] = {
    "item_knn": {"start": np.int64, "item": np.int64, "weight": np.float32},
    "popularity": {"counts": np.float32},
}
"""The arrays of each kind of source, and their types."""


class SourceEntry(Settings):
    """A source in recommender.json."""

    kind: Literal["vectors", "item_knn", "popularity"]
    name: str = Field(pattern=r"^[A-Za-z0-9_\-]+$")
    settings: ItemKNNSettings | None = None


class RecommenderFile(Settings):
    """The content of recommender.json.

    Args:
        sha256: checksums of all files except those of models and indexes, which have their own lists.
    """

    format: Literal["viviane-recommender"] = "viviane-recommender"
    version: Literal[1] = 1
    sources: tuple[SourceEntry, ...] = Field(min_length=1)
    num_candidates: int = Field(ge=1)
    ranking: bool
    label: str | None = None
    fallback: bool
    sha256: dict[str, str]


def save_recommender(
    folder: str | AnyPath,
    sources: Sequence[CandidateSource],
    *,
    ranking: Model | None,
    fallback: Popularity | None,
    num_candidates: int,
    label: str | None,
) -> AnyPath:
    """Write the parts of a recommender to a folder, atomically; arguments as for `Recommender`.

    Raises:
        ConfigError: a source is of a custom type, or the folder contains something else.
    """
    path = location(folder)
    taken = path.exists() and (not path.is_dir() or any(True for _ in path.iterdir()))
    if taken and not (path / RECOMMENDER_FILE).exists():
        what = "this is not a recommender, so it is not replaced"
        raise ConfigError(what, where=str(path), fix="choose another folder")
    with replace_folder(path) as work:
        entries: list[SourceEntry] = []
        sums: dict[str, str] = {}
        for source in sources:
            place = f"retrieval-{source.name}"
            entries.append(_save_source(source, work, place, sums))
        if ranking is not None:
            ranking.save(work / "ranking")
        if fallback is not None:
            _save_arrays(fallback, "popularity", work, "fallback", sums)
        content = RecommenderFile(
            sources=tuple(entries), num_candidates=num_candidates, label=label,
            ranking=ranking is not None, fallback=fallback is not None, sha256=sums,
        )  # fmt: skip
        write_json_atomic(work / RECOMMENDER_FILE, content.to_dict())
    return path


def _save_source(source: CandidateSource, work: Path, place: str, sums: dict[str, str]) -> SourceEntry:
    if isinstance(source, VectorSource):
        source.model.save(work / place)
        source.index.model = model_version(work / place)
        source.index.save(work / place / "index")
        return SourceEntry(kind="vectors", name=source.name)
    if isinstance(source, ItemKNN):
        _save_arrays(source, "item_knn", work, place, sums)
        return SourceEntry(kind="item_knn", name=source.name, settings=source.settings)
    if isinstance(source, Popularity):
        _save_arrays(source, "popularity", work, place, sums)
        return SourceEntry(kind="popularity", name=source.name)
    allowed = "VectorSource, ItemKNN, Popularity"
    raise ConfigError("a custom source cannot be saved", value=type(source).__name__, allowed=allowed)


def _save_arrays(source: Any, kind: str, work: Path, place: str, sums: dict[str, str]) -> None:
    (work / place).mkdir()
    for name in _ARRAYS[kind]:
        file = work / place / f"{name}.npy"
        np.save(file, getattr(source, name))
        sums[f"{place}/{name}.npy"] = file_sha256(file)


def load_parts(folder: str | AnyPath, device: str) -> dict[str, Any]:
    """Load and verify the parts of a recommender, as arguments of its constructor."""
    path = local_copy(folder)
    refuse_links(path, error=CheckpointError)
    if not (path / RECOMMENDER_FILE).is_file():
        allowed = f"a folder with {RECOMMENDER_FILE}"
        raise CheckpointError("no recommender found", where=str(folder), allowed=allowed)
    try:
        content = RecommenderFile.from_dict(load_json(path / RECOMMENDER_FILE))
    except VivianeError as error:
        raise CheckpointError("recommender.json cannot be read", where=str(folder), value=error.what) from error
    sources = [_load_source(entry, path, content, device) for entry in content.sources]
    ranking = Model.load(path / "ranking", device=device) if content.ranking else None
    fallback = Popularity(**_load_arrays("popularity", path, "fallback", content)) if content.fallback else None
    return {
        "retrieval": sources, "ranking": ranking, "num_candidates": content.num_candidates, "fallback": fallback,
        "label": content.label,
    }  # fmt: skip


def _load_source(entry: SourceEntry, path: Path, content: RecommenderFile, device: str) -> CandidateSource:
    place = f"retrieval-{entry.name}"
    if entry.kind == "vectors":
        refuse_links(path / place, ["index"], CheckpointError)
        index = ItemIndex.load(path / place / "index", model=model_version(path / place))
        return VectorSource(Model.load(path / place, device=device), index, name=entry.name)
    arrays = _load_arrays(entry.kind, path, place, content)
    if entry.kind == "popularity":
        return Popularity(**arrays)
    start, item, weight = (arrays[name] for name in _ARRAYS["item_knn"])
    fits = len(start) > 1 and start[0] == 0 and (start[1:] >= start[:-1]).all()
    if not fits or start[-1] != len(item) or item.shape != weight.shape:
        raise CheckpointError("the arrays of item neighbours are inconsistent", where=str(path / place))
    if len(item) and not 0 <= item.min() <= item.max() < len(start) - 1:
        raise CheckpointError("a neighbour is not in the catalogue", where=str(path / place))
    return ItemKNN(start, item, weight, entry.settings)


def _load_arrays(kind: str, path: Path, place: str, content: RecommenderFile) -> dict[str, Any]:
    found = {}
    for name, dtype in _ARRAYS[kind].items():
        inside = f"{place}/{name}.npy"
        file = file_inside(path, inside, where=RECOMMENDER_FILE, error=CheckpointError)
        expected = content.sha256.get(inside)
        if expected is None or not file.is_file() or file_sha256(file) != expected:
            what = "a file of the recommender is missing or was altered: its checksum differs"
            raise CheckpointError(what, where=str(file), fix="load another copy")
        found[name] = read_array(file, dtype, 1, CheckpointError)
        if not np.isfinite(found[name]).all():
            raise CheckpointError("an array of the recommender has values that are not finite", where=str(file))
    return found
