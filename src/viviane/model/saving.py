"""A model on disk: its graph as JSON, and the folder that holds all it needs to predict.

model/
    model.json      graph, solver, optimizers, metrics
    schema.json     the columns
    etl.zip         the fitted ETL that made the data, where it is known
    weights/        a checkpoint without optimizer state
    published.json  which deltas it contains, where it was saved by a publisher
    files.json      size and check sum of the above
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from torch import nn

from viviane.config import OptimizerSettings, Solver
from viviane.config.base import Settings, load_json
from viviane.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DataError, VivianeError
from viviane.core.exchange import recover, tidy
from viviane.core.file_names import file_inside, refuse_links
from viviane.core.files import file_sha256, replace_folder, write_json_atomic
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.machine_errors import as_own_error
from viviane.core.remote.cache import local_copy
from viviane.core.remote.published import published_location
from viviane.model.nodes import Name, Node
from viviane.parallel import Group
from viviane.schema import SCHEMA_FILE, Schema
from viviane.training import load_checkpoint, write_checkpoint
from viviane.training.checkpoint.group_results import on_first_rank
from viviane.training.checkpoint.increments import verify_checkpoint
from viviane.training.checkpoint.manifest import MANIFEST_FILE, FileEntry

T = TypeVar("T")

MODEL_FILE: Final = "model.json"
FILES_FILE: Final = "files.json"
ETL_FILE: Final = "etl.zip"
WEIGHTS: Final = "weights"
PUBLISHED_FILE: Final = "published.json"
_WEIGHTS_MANIFEST: Final = f"{WEIGHTS}/{MANIFEST_FILE}"


class ModelFile(Settings):
    """The content of model.json; a graph alone has only name and nodes.

    Args:
        nodes: the graph; empty for a torch module that is not a graph.
        module: name of that torch module's class.
    """

    format: Literal["viviane-model"] = "viviane-model"
    version: Literal[1] = 1
    name: Name = "model"
    nodes: tuple[Node, ...] = ()
    module: str | None = None
    solver: Solver | None = None
    optimizer: OptimizerSettings | None = None
    embedding_optimizer: OptimizerSettings | None = None
    metrics: tuple[str, ...] | None = None

    def text(self) -> str:
        """Return the JSON; what is not set is left out."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=2, ensure_ascii=False) + "\n"


def read_model_file(source: str | AnyPath | dict[str, Any]) -> ModelFile:
    """Read a graph from a JSON file, a saved model's folder, or plain data.

    Raises:
        ConfigError: naming the file, the key and the nearest known name.
    """
    if isinstance(source, dict):
        return ModelFile.from_dict(source)
    path = published_location(source)
    return ModelFile.from_json_file(path / MODEL_FILE if path.is_dir() else path)


def write_model(
    folder: str | AnyPath,
    content: ModelFile,
    schema: Schema,
    module: nn.Module,
    etl: AnyPath | None,
    group: Group | None = None,
    *,
    published: Mapping[str, Any] | None = None,
) -> AnyPath:
    """Write a model's folder, whole or not at all; an older one is replaced when the new one is complete.

    Args:
        folder: a folder or a URL.
        content, schema, module, etl: the model.
        group: the processes that call it together; rank 0 writes all but the tables that others have. None: this one.
        published: which deltas the weights contain.

    Raises:
        ConfigError: the folder holds something other than a model.
        DataError: the ETL that belongs to the model has been removed.
        CheckpointError: the disk is full or not writable. Where one process fails, all of them raise its message.
    """
    group, path = group or Group(), location(folder)

    def begin() -> str:
        _check_place(path, published_location(folder), etl)
        work = stack.enter_context(replace_folder(path))
        (work / MODEL_FILE).write_text(content.text(), encoding="utf-8")
        schema.save(work)
        if etl is not None:
            (work / ETL_FILE).write_bytes(etl.read_bytes())
        if published is not None:
            write_json_atomic(work / PUBLISHED_FILE, dict(published))
        return str(work)

    def finish() -> None:
        files = sorted(file for file in work.rglob("*") if file.is_file())
        entries = {file.relative_to(work).as_posix(): _entry(file).to_dict() for file in files}
        write_json_atomic(work / FILES_FILE, {"format": "viviane-model-files", "version": 1, "files": entries})
        stack.close()

    with ExitStack() as stack:
        work = Path(on_first_rank(group, lambda: _guarded(path, begin)))
        write_checkpoint(work / WEIGHTS, module, optimizer_state=False, group=group)
        on_first_rank(group, lambda: _guarded(path, finish))
    return path


def _check_place(path: AnyPath, there: AnyPath, etl: AnyPath | None) -> None:
    if isinstance(there, Path):
        tidy(there)
    taken = there.exists() and (not there.is_dir() or any(True for _ in there.iterdir()))
    if taken and not (there / FILES_FILE).exists():
        raise ConfigError(
            "this is not a saved model, so it is not replaced", where=str(path), fix="choose another folder"
        )
    if etl is not None and not etl.exists():
        raise DataError("the ETL of the model's data is gone", where=str(etl), fix="restore it, or train again")


def _guarded(path: AnyPath, make: Callable[[], T]) -> T:
    """Call a function; an error of the operating system becomes one of ours."""
    try:
        return make()
    except OSError as error:
        own = as_own_error(error)
        said = "the model could not be written" if own is None else f"the model could not be written: {own.what}"
        raise CheckpointError(
            said,
            where=str(path),
            value=str(error),
            fix="free disk space or correct the permissions; an older model is whole",
        ) from error


def find_model(path: str | AnyPath) -> Path:
    """Return the folder of a saved model: the folder itself, or `model` inside a run folder; of a URL, a local copy.

    Raises:
        CheckpointError: there is no saved model.
    """
    given = location(path)
    inner = isinstance(given, RemotePath) and (given / "model").exists()  # of a run, the model alone is copied
    folder = local_copy(given / "model" if inner else given)
    for place in (folder, folder / "model"):
        recover(place)
        if (place / FILES_FILE).exists() or (place / MODEL_FILE).exists():
            return place
    raise CheckpointNotFoundError(
        "there is no saved model here",
        where=str(path),
        allowed=f"a folder with {MODEL_FILE}, or a run folder with model/",
        fix="finish the run with `viviane train ... --resume`" if (folder / "checkpoints").exists() else None,
    )


def read_model(folder: Path, *, whole: bool = False) -> tuple[ModelFile, Schema]:
    """Verify the files of a saved model but its weights, and read graph and schema.

    Args:
        folder: of the model.
        whole: verify the weights, too.

    Raises:
        CheckpointError: naming the file that is missing, truncated or altered.
    """
    refuse_links(folder, [WEIGHTS], CheckpointError)
    file_inside(folder, FILES_FILE, where=str(folder), error=CheckpointError)
    try:
        entries = load_json(folder / FILES_FILE)["files"]
        files = {name: FileEntry.from_dict(entry) for name, entry in entries.items()}
    except (VivianeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "a file of the model is missing, truncated or altered", where=str(folder / FILES_FILE), value=str(error)
        ) from error
    optional = [name for name in (ETL_FILE, PUBLISHED_FILE) if (folder / name).exists()]
    needed = [MODEL_FILE, SCHEMA_FILE, _WEIGHTS_MANIFEST, *optional]
    for name in needed:
        if name not in files:
            raise CheckpointError(f"the list of files lacks {name}", where=str(folder / FILES_FILE))
    for name, entry in files.items():
        file = file_inside(folder, name, where=str(folder / FILES_FILE), error=CheckpointError)
        if whole or name == _WEIGHTS_MANIFEST or not name.startswith(f"{WEIGHTS}/"):  # weights have their own manifest
            _verify(file, entry)
    return ModelFile.from_json_file(folder / MODEL_FILE), Schema.load(folder)


def verify_model(path: str | AnyPath) -> list[Path]:
    """Compare every file of a saved model with its size and check sum; returns the files.

    Raises:
        CheckpointError: naming the file that is missing, truncated or altered.
    """
    folder = find_model(path)
    read_model(folder, whole=True)
    verify_checkpoint(folder / WEIGHTS)
    return sorted(file for file in folder.rglob("*") if file.is_file())


def load_weights(folder: Path, module: nn.Module) -> None:
    """Verify a saved model's weights and copy them into a module."""
    load_checkpoint(folder / WEIGHTS, module, weights_only=True)


def _entry(file: Path) -> FileEntry:
    return FileEntry(bytes=file.stat().st_size, sha256=file_sha256(file))


def _verify(file: Path, entry: FileEntry) -> None:
    what = None
    if not file.is_file():
        what = "a file of the model is missing"
    elif file.stat().st_size < entry.bytes:
        what = "a file of the model was truncated"
    elif _entry(file) != entry:
        what = "a file of the model was altered: its check sum differs"
    if what is not None:
        raise CheckpointError(
            what,
            where=str(file),
            fix="load another copy; to change a graph, write it with to_json and build it with from_json",
        )
