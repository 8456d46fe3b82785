"""Checkpoints and run folders at URLs: written to a local disk first, uploaded when complete."""

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
    """Yield the local path to write a folder to; for a URL a temporary folder, which is uploaded at the end.

    The processes of a group share the temporary folder, so they run on one machine or TMPDIR is on a shared disk.

    Raises:
        RemoteError: the store is unreachable or refuses; the previous content of the URL is unchanged.
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
    """A run folder at a URL: the run writes to a local folder, and each complete checkpoint is published.

    Args:
        url: URL of the run folder; it holds the run's files, and each checkpoint as a published folder.

    Example:
        >>> RunMirror(location("s3://models/runs/mine")).local.name
        'mine'
    """

    def __init__(self, url: RemotePath) -> None:
        self.url = url
        key = hashlib.blake2b(str(url).encode(), digest_size=8).hexdigest()
        self.local = cache_folder() / "runs" / key / (url.name or "run")

    def steps(self) -> list[str]:
        """Return the names of the checkpoints that are complete at the URL, in ascending order."""
        folders = [one for one in (self.url / "checkpoints").iterdir() if _STEP.fullmatch(one.name)]
        return [one.name for one in folders if Published.load(one) is not None]

    @property
    def holds_a_run(self) -> bool:
        """Whether the URL contains a checkpoint of a run."""
        return bool(self.steps())

    def pull(self, *, resume: bool) -> None:
        """Prepare the local folder: empty for a new run, with the checkpoints of the URL for a resumed run.

        Checkpoints that are already in the local folder are not downloaded again.

        Raises:
            ConfigError: the URL holds a run and `resume` is False.
            RemoteError: a downloaded checkpoint is damaged, or the store is unreachable.
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
                _log.info("downloading %s", self.url / "checkpoints" / name)
                copy_folder(self.url / "checkpoints" / name, target)

    def push(self) -> None:
        """Publish the checkpoints that are missing at the URL, copy the other files, and remove expired checkpoints."""
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
