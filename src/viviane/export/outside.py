"""Tables that an artifact reads from the folder of the saved model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from viviane.core.errors import ConfigError, ExportError
from viviane.core.locations import AnyPath
from viviane.export.manifest import ExportManifest, OutsideTable
from viviane.model.saving import WEIGHTS, find_model, read_model
from viviane.training.checkpoint.increments import verify_checkpoint
from viviane.training.checkpoint.manifest import Manifest
from viviane.training.checkpoint.saved_table import SavedTable

_ZERO_ROWS = 2  # see viviane.ops.key_rows


def read_model_tables(manifest: ExportManifest, model: str | AnyPath | None, artifact: Path) -> dict[str, Tensor]:
    """Return the inputs that are read from a saved model's tables; every file of its weights is verified.

    Raises:
        ConfigError: no folder is given.
        ExportError: a table is missing in the model, or has another size.
        CheckpointError: a file is missing, truncated or altered.
    """
    if model is None:
        raise ConfigError(
            "the artifact reads its tables from the saved model",
            where=str(artifact),
            fix="load(folder, model='model/')",
        )
    folder = find_model(model)
    read_model(folder)
    saved = verify_checkpoint(folder / WEIGHTS)
    return {one.input: _read(one, saved, folder / WEIGHTS) for one in manifest.outside}


def _read(outside: OutsideTable, saved: Manifest, folder: Path) -> Tensor:
    whole: Tensor | None = None
    total = 0
    for name, base, rows in outside.tables:
        if base != total:
            raise ExportError("the tables of an input do not follow each other", where=f"{outside.input}, {name}",
                              value=base, allowed=str(total), fix="use another copy")  # fmt: skip
        total += rows
    for name, base, rows in outside.tables:
        full = f"{outside.collection}.{name}" if outside.collection else name
        entry = saved.tables.get(full)
        if entry is None or entry.is_dynamic or entry.weight.shape[0] != rows:
            given = "missing" if entry is None else str(entry.weight)
            raise ExportError(
                "the model's table differs from the artifact",
                where=f"{folder}, table {full!r}",
                value=given,
                allowed=f"{rows} rows",
            )
        table = SavedTable(folder, entry)
        if whole is None:
            whole = torch.zeros(total + _ZERO_ROWS, table.dim, dtype=table.meta("weight")[1])
        elif whole.shape[1] != table.dim or whole.dtype != table.meta("weight")[1]:
            raise ExportError(
                "the model's table differs from the artifact",
                where=f"{folder}, table {full!r}",
                value=str(entry.weight),
            )
        table.copy_to("weight", whole[base : base + rows], range(rows), 0, table.dim)
    assert whole is not None
    return whole
