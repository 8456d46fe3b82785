"""TensorBoard events of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viviane.core.optional import require

_NOT_CURVES = {"step", "epoch", "split"}


class EventWriter:
    """Writes rows of metrics as TensorBoard scalars.

    Args:
        folder: folder of the event files.
        after: events after this step, written by an earlier process that was killed, are discarded.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        require("tensorboard", extra="tracking", purpose="writing TensorBoard events")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row of metrics; "auc" of a "valid" row becomes the scalar "valid/auc"."""
        for name, value in row.items():
            if name not in _NOT_CURVES and isinstance(value, int | float):
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def open_events(folder: Path, wanted: bool | None, after: int) -> EventWriter | None:
    """Return a writer, or None if events are disabled, or not requested and tensorboard is missing.

    Raises:
        MissingExtraError: `wanted` is True and tensorboard cannot be imported.
    """
    if wanted is False or (wanted is None and importlib.util.find_spec("tensorboard") is None):
        return None
    return EventWriter(folder, after)
