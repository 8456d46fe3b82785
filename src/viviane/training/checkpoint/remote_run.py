"""Checkpoints and run folders at URLs: written to a local disk first, uploaded when they are whole."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from viviane.core.errors import ConfigError
from viviane.core.files import write_bytes_atomic
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.logging import get_logger
from viviane.core.remote.cache import cache_folder, copy_folder
from viviane.core.remote.published import Published, upload_folder
from viviane.parallel import Group

_STEP: Final = re.compile(r"step-\d{8,}")
_log = get_logger("training.remote")


@contextmanager
def staged(folder: str | AnyPath, group: Group) -> Iterator[Path]:
    """Yield where a folder is written: in its place, or for a URL in a temporary folder that is uploaded at the end.

    Processes of a group share that temporary folder: they stand on one machine, or TMPDIR is on a disk all see.

    Raises:
        RemoteError: the store does not answer or refuses; what stood at the URL stands there still.
    """
    place = location(folder)
    if not isinstance(place, RemotePath):
        yield place
        return
    work = Path(group.from_first(lambda: tempfile.mkdtemp(prefix="viviane-checkpoint-")))

    def upload() -> None:
        upload_folder(work / "whole", place)

    try:
        yield work / "whole"
        group.from_first(upload)
    finally:
        if group.rank == 0:
            shutil.rmtree(work, ignore_errors=True)


class RunMirror:
    """A run folder at a URL: the run works in a local folder, and each whole checkpoint is published.

    Args:
        url: of the run folder; its files stand there by their names, each checkpoint as a published folder.

    Example:
        >>> RunMirror(location("s3://models/runs/mine")).local.name
        'mine'
    """

    def __init__(self, url: RemotePath) -> None:
        self.url = url
        key = hashlib.blake2b(str(url).encode(), digest_size=8).hexdigest()
        self.local = cache_folder() / "runs" / key / (url.name or "run")

    def steps(self) -> list[str]:
        """Return the names of the checkpoints that are whole at the URL, rising."""
        folders = [one for one in (self.url / "checkpoints").iterdir() if _STEP.fullmatch(one.name)]
        return [one.name for one in folders if Published.load(one) is not None]

    @property
    def holds_a_run(self) -> bool:
        """True where a run left a checkpoint at the URL."""
        return bool(self.steps())

    def pull(self, *, resume: bool) -> None:
        """Make the local folder what the URL holds: empty for a new run, with its checkpoints for a resumed one.

        Checkpoints that stand in the local folder already are not fetched again.

        Raises:
            ConfigError: the URL holds a run and this is not a resume.
            RemoteError: a checkpoint came altered, or the store does not answer.
        """
        if not resume:
            if self.holds_a_run:
                raise ConfigError(
                    "the run folder already holds a run", where=str(self.url),
                    fix="continue it with resume=True, or choose another folder",
                )  # fmt: skip
            shutil.rmtree(self.local, ignore_errors=True)
            return
        for name in self.steps():
            target = self.local / "checkpoints" / name
            if not target.exists():
                _log.info("fetching %s", self.url / "checkpoints" / name)
                copy_folder(self.url / "checkpoints" / name, target)

    def push(self) -> None:
        """Publish the checkpoints that the URL lacks, copy the other files, remove checkpoints that are too old."""
        folders = sorted(one for one in (self.local / "checkpoints").glob("step-*") if _STEP.fullmatch(one.name))
        there = self.steps()
        for folder in folders:
            if folder.name not in there:
                upload_folder(folder, self.url / "checkpoints" / folder.name)
        kept = {folder.name for folder in folders}
        for name in there:
            if name not in kept:
                (self.url / "checkpoints" / name).remove_folder()
        self.push_files()

    def push_files(self) -> None:
        """Copy the run's own files: settings, metrics, report, index of checkpoints."""
        for file in [*self.local.iterdir(), *(self.local / "checkpoints").glob("*.json")]:
            if file.is_file():
                inside = file.relative_to(self.local).as_posix()
                write_bytes_atomic(self.url / inside, file.read_bytes())
