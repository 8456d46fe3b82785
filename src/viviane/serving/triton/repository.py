"""Model repositories for Triton.

NAME/
    config.pbtxt          tensors, batching, instances, versions
    1/model.py            loads the session; Triton's Python backend runs it
    1/session.json        how the session computes, and where the model is
    1/model/              the saved model, where it is copied
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.core.files import replace_folder, write_json_atomic
from viviane.model.saving import find_model
from viviane.serving.columns import ColumnSpec
from viviane.serving.server.tensors import TensorSpec, input_specs, output_specs
from viviane.serving.session import InferenceSession
from viviane.serving.settings import MODEL_NAME, ModelEntry, SessionSettings
from viviane.serving.triton.config_text import Word, map_of, text_of
from viviane.serving.triton.settings import TritonSettings
from viviane.serving.versions import find_versions

CONFIG_FILE: Final = "config.pbtxt"
SESSION_FILE: Final = "session.json"
Role = Literal["whole", "clean", "score"]
_PREFERRED_ROWS: Final = 256
_MARK: Final = "viviane-triton.json"
_LOADER: Final = '''"""Triton's Python backend runs what is saved beside this file; it imports the package viviane."""

import os
import sys

# Where the package is, if it is not installed in the environment of the backend, which ignores PYTHONPATH.
packages = os.environ.get("VIVIANE_PACKAGES")
if packages and packages not in sys.path:
    sys.path.insert(0, packages)

from MODULE import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''
_SESSIONS: Final = "viviane.serving.triton.python_model"


class ModelPart(Settings):
    """The content of session.json.

    Args:
        role: "whole" predicts the rows that it is sent; "clean" turns raw rows into encoded ones; "score" predicts
            those.
        path: of the saved model; relative to the file.
        max_queued: see `TritonSettings`.
    """

    role: Role = "whole"
    path: str
    session: SessionSettings = SessionSettings()
    max_queued: int = 0


@dataclass(frozen=True)
class PythonModel:
    """A model of the Python backend that is no session, such as a recommender.

    Args:
        name: by which requests ask for it.
        source: the folder that it loads.
        module: has the class TritonPythonModel.
        inputs, outputs: its tensors.
        device: it computes on.
    """

    name: str
    source: Path
    module: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    device: str = "auto"


class FolderPart(Settings):
    """The content of session.json of a `PythonModel`.

    Args:
        path: of what it loads; relative to the file.
        max_queued: see `TritonSettings`.
    """

    path: str
    max_queued: int = 0


@dataclass(frozen=True)
class _Tensors:
    """What a version of a model takes, in between, and gives."""

    inputs: tuple[ColumnSpec, ...]
    encoded: tuple[ColumnSpec, ...]
    outputs: tuple[ColumnSpec, ...]
    raw: bool


def write_repository(
    folder: str | Path,
    models: Sequence[ModelEntry],
    settings: TritonSettings | None = None,
    *,
    others: Sequence[PythonModel] = (),
    copy: bool = True,
) -> list[str]:
    """Write a repository for Triton; returns the names of its models, those that requests ask for first.

    An earlier repository that this function wrote is replaced; any other folder is not.

    Args:
        folder: the repository.
        models: as a server's settings name them.
        settings: batching and instances.
        others: models that are no sessions.
        copy: put the saved models into the repository, so that it can be moved; False leaves them where they are.

    Raises:
        ConfigError: the folder holds something else, or an ensemble of a model without an ETL.
        CheckpointError: a model is missing or damaged.
    """
    chosen, place = settings or TritonSettings(), Path(folder)
    if place.exists() and any(place.iterdir()) and not (place / _MARK).exists():
        raise ConfigError("the folder is not empty, so it is not replaced", where=str(place),
                          fix="choose another folder")  # fmt: skip
    _check_names([one.name for one in models], [one.name for one in others], ensemble=chosen.ensemble)
    served, helpers = [], []
    with replace_folder(place) as work:
        for entry in models:
            versions = _chosen(entry)
            tensors = _described(entry, versions)
            if chosen.ensemble:
                helpers += _write_ensemble(work, entry, versions, tensors, chosen, copy)
            else:
                _write_model(work, entry.name, entry, versions, tensors, chosen, "whole", copy)
            served.append(entry.name)
        for one in others:
            _write_other(work, one, chosen, copy)
            served.append(one.name)
        write_json_atomic(work / _MARK, {"format": "viviane-triton-repository", "version": 1, "models": served})
    return served + helpers


def _check_names(models: list[str], others: list[str], *, ensemble: bool) -> None:
    """Refuse names that lead out of the repository, and two of one name; each has a folder there."""
    helpers = [f"{name}.{part}" for name in models for part in ("clean", "score")] if ensemble else []
    names = [_MARK, *models, *others, *helpers]
    for name in names:
        if not re.fullmatch(MODEL_NAME, name):
            raise ConfigError("not a name of a model", value=name, allowed=MODEL_NAME, fix="name it: NAME=PATH")
        if names.count(name) > 1:
            raise ConfigError("two models of one name", value=name, fix="name one: NAME=PATH")


def _chosen(entry: ModelEntry) -> dict[int, Path]:
    found = find_versions(entry.path)
    if entry.versions == "latest":
        found = {max(found): found[max(found)]}
    elif entry.versions != "all":
        missing = [number for number in entry.versions if number not in found]
        if missing:
            raise ConfigError("there is no such version of the model", where=entry.path, value=missing[0],
                              allowed=", ".join(map(str, found)))  # fmt: skip
        found = {number: found[number] for number in entry.versions}
    return {number: find_model(where) for number, where in found.items()}


def _described(entry: ModelEntry, versions: dict[int, Path]) -> _Tensors:
    """Return the tensors of all versions, which Triton wants to be the same."""
    found: dict[int, _Tensors] = {}
    for number, path in versions.items():
        session = InferenceSession.from_settings(path, entry.session.model_copy(update={"device": "cpu"}))
        with session:
            found[number] = _Tensors(
                session.inputs, session.encoded_inputs, session.outputs, raw=session.takes_raw_rows
            )
    first = next(iter(found.values()))
    for number, tensors in found.items():
        if tensors != first:
            raise ConfigError("versions of a Triton model have the same inputs and outputs", where=entry.path,
                              value=f"version {number}", fix="serve them under several names")  # fmt: skip
    return first


def _write_model(
    work: Path,
    name: str,
    entry: ModelEntry,
    versions: dict[int, Path],
    tensors: _Tensors,
    settings: TritonSettings,
    role: Role,
    copy: bool,
) -> None:
    folder = work / name
    for number, source in versions.items():
        inner = folder / str(number)
        inner.mkdir(parents=True)
        (inner / "model.py").write_text(_LOADER.replace("MODULE", _SESSIONS), encoding="utf-8")
        if copy:
            shutil.copytree(source, inner / "model")
        session = entry.session
        if role == "score":
            session = session.model_copy(update={"rows": "encoded"})
        path = "model" if copy else str(source.absolute())
        write_json_atomic(
            inner / SESSION_FILE,
            ModelPart(role=role, path=path, session=session, max_queued=settings.max_queued).to_dict(),
        )
    inputs = tensors.encoded if role == "score" else tensors.inputs
    outputs = _cleaned_specs(tensors) if role == "clean" else output_specs(tensors.outputs)
    config = _config_of(name, input_specs(inputs), outputs, list(versions), entry.session.device, settings)
    if role == "score" or not tensors.raw:
        config["model_warmup"] = [_warm_up(inputs)]
    (folder / CONFIG_FILE).write_text(text_of(config), encoding="utf-8")


def _write_other(work: Path, model: PythonModel, settings: TritonSettings, copy: bool) -> None:
    inner = work / model.name / "1"
    inner.mkdir(parents=True)
    (inner / "model.py").write_text(_LOADER.replace("MODULE", model.module), encoding="utf-8")
    if copy:
        shutil.copytree(model.source, inner / "model")
    path = "model" if copy else str(model.source.absolute())
    write_json_atomic(inner / SESSION_FILE, FolderPart(path=path, max_queued=settings.max_queued).to_dict())
    config = _config_of(model.name, model.inputs, model.outputs, [1], model.device, settings)
    (work / model.name / CONFIG_FILE).write_text(text_of(config), encoding="utf-8")


def _config_of(
    name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], versions: list[int], device: str,
    settings: TritonSettings,
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": settings.max_batch_size,
        "input": [_tensor(one) for one in inputs],
        "output": [_tensor(one, given=False) for one in outputs],
        "version_policy": {"specific": {"versions": versions}},
        "instance_group": [{"count": settings.instances, "kind": Word(_kind(device))}],
        "dynamic_batching": _batching(settings),
    }


def _batching(settings: TritonSettings) -> dict[str, Any]:
    # No default_queue_policy: with one, Triton's batcher misses wake-ups, and requests wait for half a second.
    found: dict[str, Any] = {"max_queue_delay_microseconds": int(settings.max_delay_ms * 1000)}
    preferred = settings.preferred_batch_size
    if preferred is None and not settings.max_queued:  # a model that refuses has to see all requests that wait
        preferred = min(_PREFERRED_ROWS, settings.max_batch_size)
    if preferred is not None:
        found["preferred_batch_size"] = [preferred]
    return found


def _write_ensemble(
    work: Path, entry: ModelEntry, versions: dict[int, Path], tensors: _Tensors, settings: TritonSettings, copy: bool
) -> list[str]:
    if not tensors.raw:
        raise ConfigError("the model takes encoded rows, so there is no cleaning to put before it", where=entry.path,
                          fix="leave ensemble out, or serve raw rows")  # fmt: skip
    if len(versions) > 1:
        raise ConfigError("an ensemble has one version", where=entry.path, value=", ".join(map(str, versions)),
                          fix='choose one: "versions": "latest"')  # fmt: skip
    clean, score = f"{entry.name}.clean", f"{entry.name}.score"
    _write_model(work, clean, entry, versions, tensors, settings, "clean", copy)
    _write_model(work, score, entry, versions, tensors, settings, "score", copy)
    (number,) = versions
    between = [one.name for one in _cleaned_specs(tensors)]
    raw, outputs = input_specs(tensors.inputs), output_specs(tensors.outputs)
    (work / entry.name / str(number)).mkdir(parents=True)
    config = {
        "name": entry.name,
        "platform": "ensemble",
        "max_batch_size": settings.max_batch_size,
        "input": [_tensor(one, given=False) for one in raw if not one.optional],
        "output": [_tensor(one, given=False) for one in outputs],
        "ensemble_scheduling": {
            "step": [
                _step(clean, [one.name for one in raw if not one.optional], between, encoded_outputs=True),
                _step(score, between, [one.name for one in outputs], encoded_outputs=False),
            ]
        },
    }
    (work / entry.name / CONFIG_FILE).write_text(text_of(config), encoding="utf-8")
    return [clean, score]


def _step(model: str, inputs: list[str], outputs: list[str], *, encoded_outputs: bool) -> dict[str, Any]:
    """One step of an ensemble; encoded columns have names of their own there, since raw ones may be called the same."""

    def inner(name: str, encoded: bool) -> str:
        return f"encoded {name}" if encoded else name

    return {
        "model_name": model,
        "model_version": -1,
        "input_map": map_of({name: inner(name, not encoded_outputs) for name in inputs}),
        "output_map": map_of({name: inner(name, encoded_outputs) for name in outputs}),
    }


def _cleaned_specs(tensors: _Tensors) -> list[TensorSpec]:
    return input_specs(tensors.encoded)


def _tensor(spec: TensorSpec, *, given: bool = True) -> dict[str, Any]:
    """Return a tensor of a config; `given`: clients give it, so that it may be ragged or left out."""
    kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    found: dict[str, Any] = {"name": spec.name, "data_type": Word(kind), "dims": list(spec.shape[1:])}
    if spec.shape[1] < 0 and given:
        found["allow_ragged_batch"] = True
    if spec.optional and given:
        found["optional"] = True
    return found


def _warm_up(columns: Sequence[ColumnSpec]) -> dict[str, Any]:
    values = {
        one.name: {"data_type": Word(f"TYPE_{one.datatype}"), "dims": [max(size, 1) for size in one.shape[1:]],
                   "zero_data": True}
        for one in input_specs(columns)
        if not one.optional
    }  # fmt: skip
    return {"name": "zeros", "batch_size": 1, "inputs": map_of(values)}


def _kind(device: str) -> str:
    return {"auto": "KIND_AUTO", "cpu": "KIND_CPU"}.get(device, "KIND_GPU")
