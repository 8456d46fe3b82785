"""Where a run keeps its unfinished work: a hidden folder beside the output, tied to one job by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError
from viviane.core.files import sync_folder, write_json_atomic
from viviane.core.locations import AnyPath, RemotePath, published_location
from viviane.core.logging import get_logger
from viviane.core.remote.cache import cache_folder

SUMMARY_FILE: Final = "etl.json"
_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS_2: Final = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_logger = get_logger("etl")


def parse_bytes(text: str | int) -> int:
    """Read a size in bytes.

    Raises:
        ConfigError: it is none.

    Example:
        >>> parse_bytes("4GB"), parse_bytes("1.5 GiB")
        (4000000000, 1610612736)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = (_UNITS | _UNITS_2).get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError("not a size", value=str(text), allowed="a number of bytes, or with kB, MB, GB, MiB, GiB")
    return int(float(match[1]) * unit)


def fingerprint(*parts: Any) -> str:
    """A hash of plain data."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def working_place(output: AnyPath) -> Path:
    """Return the local folder that a run writes: the output, or for a URL one in the cache, uploaded at the end."""
    if not isinstance(output, RemotePath):
        return output
    place = hashlib.blake2b(str(output).encode(), digest_size=8).hexdigest()
    return cache_folder() / "etl" / place / (output.name or "output")


def finished(output: AnyPath, job: str) -> dict[str, Any] | None:
    """Return the summary of an earlier run of this very job, if it wrote `output`."""
    file = published_location(output) / SUMMARY_FILE
    if not file.exists():
        return None
    summary: dict[str, Any] = json.loads(file.read_text())
    return summary if summary.get("job") == job else None


def refuse_existing(output: AnyPath, *, overwrite: bool) -> None:
    """Refuse an output that holds something already.

    Raises:
        ConfigError: it does, and is not to be replaced.
    """
    if output.exists() and not overwrite and not (output.is_dir() and not any(True for _ in output.iterdir())):
        raise ConfigError(
            "the output exists", where=str(output), fix="choose another, or pass overwrite=True (--overwrite)"
        )


@contextmanager
def workplace(output: Path, job: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Yield the work folder; its `out` takes the place of `output` when the block succeeds.

    A failed or killed run leaves the folder behind, for the next run of the same job to go on with.

    Raises:
        ConfigError: the output exists, or another process is at this output.
    """
    refuse_existing(output, overwrite=overwrite)
    work = output.parent / f".{output.name}.etl"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        _lock(lock, output)
        note = work / "job.json"
        known = json.loads(note.read_text())["job"] if note.exists() else None
        if known != job or not resume:
            if known is not None:
                _logger.info("the unfinished work of another job is discarded: %s", work)
            for item in work.iterdir():
                if item.name != "lock":
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            write_json_atomic(note, {"job": job})
        yield work
        _publish(work / "out", output)
    shutil.rmtree(work)


def _lock(file: Any, output: Path) -> None:
    if sys.platform == "win32":  # advisory locks of this kind are POSIX
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError("another run is writing this output", where=str(output), fix="wait for it") from None


def _publish(finished_folder: Path, output: Path) -> None:
    for file in finished_folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        else:
            sync_folder(file)
    sync_folder(finished_folder)
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    if output.exists():
        output.rename(old)
    finished_folder.rename(output)
    sync_folder(output.parent)
    if old.exists():
        shutil.rmtree(old)
