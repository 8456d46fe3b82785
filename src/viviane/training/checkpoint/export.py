"""Export of a checkpoint's tables, by key, and dense weights to files that other programs read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.core.files import replace_folder
from viviane.training.checkpoint.increments import open_table, verify_checkpoint
from viviane.training.checkpoint.manifest import DENSE_FILE, Manifest
from viviane.training.checkpoint.saved_table import SavedTable
from viviane.training.checkpoint.table_files import table_file
from viviane.training.checkpoint.tensor_files import write_tensors
from viviane.training.checkpoint.tools import new_folder, pieces

FORMATS = ("npy", "safetensors", "parquet")


def export_checkpoint(source: str | Path, target: str | Path, kind: str = "npy") -> list[Path]:
    """Write the rows of each table by key, and the dense weights as safetensors, for other programs.

    Args:
        source: the checkpoint; it is verified first.
        target: the new folder: dense.safetensors and one file per table.
        kind: "npy": (num_rows, dim), and <table>.keys.npy for a dynamic table; "safetensors": "weight", and "keys" for
            a dynamic table; "parquet": columns key and vector. bfloat16 becomes float32 in npy and Parquet.
    """
    if kind not in FORMATS:
        raise ConfigError("unknown format", value=kind, allowed=", ".join(FORMATS))
    folder = new_folder(target)
    manifest = verify_checkpoint(source)
    stems = _stems(manifest, kind)
    with replace_folder(folder, overwrite=False) as work:
        shutil.copyfile(Path(source) / DENSE_FILE, work / DENSE_FILE)
        for full, entry in manifest.tables.items():
            saved, stem = open_table(source, manifest, full), stems[full]
            keys = saved.content()["keys"] if entry.is_dynamic else None
            if kind == "safetensors":
                whole = {"weight": saved.read("weight", range(saved.num_rows))}
                write_tensors(work / f"{stem}.safetensors", whole if keys is None else {**whole, "keys": keys})
            elif kind == "npy":
                _write_npy(work / stem, saved, keys)
            else:
                _write_parquet(work / f"{stem}.parquet", saved, keys)
    return sorted(folder.iterdir())


def _stems(manifest: Manifest, kind: str) -> dict[str, str]:
    """Return the name of each table's file without its suffix.

    Raises:
        ConfigError: two tables would be written to the same file.
    """
    stems = {full: Path(table_file(full)).name.removesuffix(".safetensors") for full in manifest.tables}
    owner = {DENSE_FILE: "the dense weights"}
    for full, stem in stems.items():
        beside = [f"{stem}.keys.npy"] if kind == "npy" and manifest.tables[full].is_dynamic else []
        for name in (f"{stem}.{kind}", *beside):
            if name in owner:
                raise ConfigError(
                    "two parts of the checkpoint would have the same file name", where=f"{owner[name]} and {full!r}",
                    value=name, fix="choose another format",
                )  # fmt: skip
            owner[name] = repr(full)
    return stems


def _rows(saved: SavedTable, keys: range) -> np.ndarray[Any, Any]:
    rows = saved.read("weight", keys)
    found: np.ndarray[Any, Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    return found


def _write_npy(stem: Path, saved: SavedTable, keys: Tensor | None) -> None:
    shape = (saved.num_rows, saved.dim)
    kind = _rows(saved, range(0)).dtype
    if keys is not None:
        np.save(stem.with_name(f"{stem.name}.keys.npy"), keys.numpy())
    file = stem.with_name(f"{stem.name}.npy")
    if saved.num_rows == 0:
        np.save(file, np.empty(shape, kind))
        return
    out = np.lib.format.open_memmap(file, mode="w+", dtype=kind, shape=shape)
    for piece in pieces(saved):
        out[piece.start : piece.stop] = _rows(saved, piece)
    out.flush()


def _write_parquet(file: Path, saved: SavedTable, keys: Tensor | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    kind = pa.from_numpy_dtype(_rows(saved, range(0)).dtype)
    schema = pa.schema([("key", pa.int64()), ("vector", pa.list_(kind, saved.dim))])
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for piece in pieces(saved):
            own = torch.arange(piece.start, piece.stop) if keys is None else keys[piece.start : piece.stop]
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(_rows(saved, piece).reshape(-1)), saved.dim)
            writer.write_table(pa.table([pa.array(own.numpy()), vectors], schema=schema))
