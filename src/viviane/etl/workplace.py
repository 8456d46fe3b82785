"""Where a run keeps its unfinished work: a hidden folder next to the output, tied to one job by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, DataError
from viviane.core.exchange import put_in_place, reserved, sync_tree, tidy
from viviane.core.files import write_json_atomic
from viviane.core.json_files import read_json_object
from viviane.core.locations import AnyPath, RemotePath
from viviane.core.locks import hidden_name
from viviane.core.logging import get_logger
from viviane.core.remote.cache import cache_folder
from viviane.core.remote.published import published_location

SUMMARY_FILE: Final = "etl.json"
_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST_DIGITS: Final = 20
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
    if match is None or unit is None or len(match[1]) > _MOST_DIGITS:
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
    summary = read_json_object(file, error=DataError)
    if summary.get("job") != job:
        return None
    if not isinstance(output, RemotePath):
        discard_work(output)
    return summary


def discard_work(output: Path) -> None:
    """Remove what a run left that was killed after its output was complete."""
    work = work_folder(output)
    if any(one.exists() for one in (work, hidden_name(output, "lock"))):
        with suppress(ConfigError, OSError), reserved(output) as spare:  # another run may be at it
            if work.exists():
                work.rename(spare / work.name)


def work_folder(output: Path) -> Path:
    """Return where a run keeps its unfinished work, hidden next to the output."""
    return output.parent / f".{output.name}.etl"


def refuse_existing(output: AnyPath, *, overwrite: bool) -> None:
    """Refuse an output that holds something already.

    Raises:
        ConfigError: it does, and is not to be replaced.
    """
    if isinstance(output, Path):
        tidy(output)
    if output.exists() and not overwrite and not (output.is_dir() and not any(True for _ in output.iterdir())):
        raise ConfigError(
            "the output exists", where=str(output), fix="choose another, or pass overwrite=True (--overwrite)"
        )


def _job_of(note: Path) -> Any:
    """The job that unfinished work is of; "" where the note cannot be read, which is that of no job."""
    try:
        return read_json_object(note, error=DataError).get("job", "")
    except DataError:
        return ""


@contextmanager
def workplace(output: Path, job: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Yield the work folder; its `out` takes the place of `output` when the block succeeds.

    A failed or killed run leaves the folder behind, for the next run of the same job to continue with.

    Raises:
        ConfigError: the output exists, or another process is at this output.
    """
    refuse_existing(output, overwrite=overwrite)
    with reserved(output) as spare:
        refuse_existing(output, overwrite=overwrite)  # now that no other process can create it
        work = work_folder(output)
        work.mkdir(exist_ok=True)
        note = work / "job.json"
        known = _job_of(note) if note.exists() else None
        if known != job or not resume:
            if known is not None:
                _logger.info("the unfinished work of another job is discarded: %s", work)
            work.rename(spare / "discarded")  # not removed piece by piece: a kill would leave a part of it
            work.mkdir()
            write_json_atomic(note, {"job": job})
        yield work
        # Finished work leaves the work folder first, which so never holds an older output that was exchanged.
        new = spare / "out"
        (work / "out").rename(new)
        sync_tree(new)
        put_in_place(new, output)
        work.rename(spare / "work")
