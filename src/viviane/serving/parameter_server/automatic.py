"""Tiers of a served model whose tables do not fit into memory, where no settings name any."""

from __future__ import annotations

import torch

from viviane.core.locations import AnyPath
from viviane.core.logging import get_logger
from viviane.model.saving import WEIGHTS, find_model
from viviane.model.table_memory import FITS, memory_for_tables
from viviane.serving.parameter_server.settings import CacheSettings, TableSettings
from viviane.training.checkpoint.manifest import read_manifest

_log = get_logger("serving")
_SHARE = 0.5


def tiers_if_too_large(folder: AnyPath, device: torch.device) -> TableSettings | None:
    """Return a cache of half of the free memory over the saved model; None if its tables fit.

    The cache is filled as rows are asked for, so that a model answers at once however large it is.

    Args:
        folder: a model folder, or a run folder with `model/` inside.
        device: where the model computes, and its tables would be.

    Raises:
        CheckpointError: there is no such model.
    """
    manifest = read_manifest(find_model(folder) / WEIGHTS)
    needed = sum(manifest.files[file].bytes for table in manifest.tables.values() for file in table.files)
    free = memory_for_tables(device)
    if free is None or needed <= FITS * free:
        return None
    share = _SHARE * free / needed
    _log.info(
        "the tables of %s take %.1f GiB, and %.1f GiB are free: %.0f%% of their rows are cached, the others are read "
        "from the saved model (`tables` sets other tiers)",
        folder, needed / 2**30, free / 2**30, 100 * share,
    )  # fmt: skip
    place = "device" if device.type == "cuda" else "host"
    return TableSettings(cache=CacheSettings(share=share, place=place, warm_up=False))
