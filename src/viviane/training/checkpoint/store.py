"""The checkpoints of one run: step-00001000/, ... and index.json with the latest and the best."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final, Literal

from torch import nn

from viviane.core.errors import CheckpointError, VivianeError
from viviane.core.files import write_json_atomic
from viviane.core.logging import get_logger
from viviane.embedding.module_parts import collections_of
from viviane.optim import DenseOptimizer
from viviane.parallel import Group
from viviane.training.checkpoint.background import BackgroundWriter
from viviane.training.checkpoint.group_results import on_all_ranks, on_first_rank
from viviane.training.checkpoint.increments import base_of, chain_of, verify_checkpoint
from viviane.training.checkpoint.manifest import BaseEntry, read_manifest
from viviane.training.checkpoint.remote_run import RunMirror
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.checkpoint.write import Content, collect, write_content

SMALL_BYTES: Final = 16 << 20
"""Below this number of bytes of rows, a thread and a snapshot take longer than writing."""
INDEX_FILE: Final = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,}|index\.json)\..+\.(tmp|old|lock)")
_log = get_logger("training.checkpoint")


class CheckpointStore:
    """Keeps the newest checkpoints of a run and the best one.

    The best checkpoint is determined from the checkpoints themselves (`progress["score"]`), so that nothing is lost
    if a process is killed between a save and the update of the index.

    Args:
        folder: folder of the checkpoints.
        keep: how many of the newest are kept; the best is kept in addition.
        higher_is_better: how scores compare.
        group: the processes that save together; only rank 0 manages the folder.
        most_increments: how many checkpoints after a whole one hold only the rows that changed since the one before.

    Example:
        >>> CheckpointStore("runs/none", keep=2).steps()
        []
    """

    def __init__(
        self, folder: str | Path, keep: int, *, higher_is_better: bool = True, group: Group | None = None,
        most_increments: int = 0,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        self.keep = keep
        self.higher_is_better = higher_is_better
        self.group = group or Group()
        self._writer = BackgroundWriter()
        self._thread_group: Group | None = None
        self.most_increments = most_increments
        self._base: int | None = None
        """Step of the checkpoint since which storages follow changes; None: the next one is whole."""
        self.mirror: RunMirror | None = None
        """URL to which each complete checkpoint is also published."""

    def clean(self) -> None:
        """Remove leftovers of interrupted saves; only names that a save creates."""
        if self.group.rank > 0:
            return
        for leftover in self.folder.glob(".*"):
            if _LEFTOVER.fullmatch(leftover.name):
                _log.info("removing %s, left by an interrupted save", leftover)
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        if not self.folder.exists():
            return []
        found = [_STEP.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        module: nn.Module,
        optimizer: DenseOptimizer | None,
        progress: Progress,
        *,
        beside: bool | Literal["auto"] = False,
    ) -> Path:
        """Write a checkpoint, then the index, then remove expired ones.

        `progress.values["score"]` is the first metric of an evaluation at this step, or None.

        Args:
            module, optimizer, progress: the state to write, as of this call.
            beside: write in a thread while training continues; "auto" does so if a process has more than
                `SMALL_BYTES` to write. At most one save is active: the next one waits for it, and raises its error.

        Raises:
            CheckpointError: this save or the one before it failed.
        """
        self.finish()
        path, hold = self.path(progress.step), beside if isinstance(beside, bool) else self._is_large(module)
        base, self._base = self._usable_base(progress.step), None
        content = on_all_ranks(
            self.group, lambda: collect(module, optimizer, progress, self.group, hold=hold, base=base)
        )
        self.begin_increments(module, progress.step)  # if the write fails, `finish` makes the next one whole
        if hold:
            group = self._group_of_thread()
            self._writer.start(str(path), lambda: self._write(path, content, progress.step, group))
        else:
            try:
                self._write(path, content, progress.step, self.group)
            except BaseException:
                self._base = None
                raise
        return path

    def begin_increments(self, module: nn.Module, step: int) -> None:
        """Take the checkpoint of a step, which a module has just been saved in or loaded from, as the next one's base.

        It does nothing where `most_increments` is 0.
        """
        if not self.most_increments:
            return
        for collection in collections_of(module).values():
            for part in collection.parts():
                for storage in part.all_storages():
                    storage.follow_changes()
        self._base = step

    def _usable_base(self, step: int) -> BaseEntry | None:
        """Return the base of a step's checkpoint; None if it is to be whole."""
        before = self._base

        def find() -> dict[str, str] | None:
            if before is None or before >= step:
                return None
            folder = self.path(before)
            try:
                chain = list(chain_of(folder, read_manifest(folder)))
            except CheckpointError:
                return None  # it was removed or damaged: a whole checkpoint does not need it
            return base_of(folder).to_dict() if len(chain) <= self.most_increments else None

        found = self.group.from_first(find)
        return None if found is None else BaseEntry.from_dict(found)

    def _write(self, path: Path, content: Content, step: int, group: Group) -> None:
        try:
            write_content(path, content, group)
        finally:
            content.close()
        on_first_rank(group, lambda: self._tidy(path, step))

    def _is_large(self, module: nn.Module) -> bool:
        """Return whether any process has more than `SMALL_BYTES` to write."""
        storages = [one for collection in collections_of(module).values() for one in collection.all_storages()]
        own = sum(one.weight.numel() * one.weight.element_size() for one in storages)
        in_tiers = any(one.in_tiers for one in storages)
        told = self.group.gather_numbers([own, int(in_tiers)])
        if any(one[1] for one in told):
            return False  # rows in tiers can be read only while no step updates them
        return max(one[0] for one in told) > SMALL_BYTES

    def _group_of_thread(self) -> Group:
        """Return a separate group of the same processes: the thread's collectives are not ordered with training's."""
        if self._thread_group is None:
            self._thread_group = self.group.for_thread()
        return self._thread_group

    @property
    def has_failed(self) -> bool:
        """Whether a save in a thread has failed; `finish` raises its error."""
        return self._writer.has_failed

    def finish(self) -> None:
        """Wait for an active save.

        Raises:
            CheckpointError: the save failed; the message names the folder.
        """
        try:
            self._writer.finish()
        except VivianeError as error:
            self._base = None
            if not isinstance(error, CheckpointError):
                raise
            raise self.group.mark_reported(error) from error.__cause__

    def close(self) -> None:
        """Wait for an active save after training has failed; an error of the save is logged, not raised."""
        try:
            self._writer.finish()
        except VivianeError as error:
            _log.warning("%s", error)

    def _tidy(self, path: Path, step: int) -> None:
        have = self.steps()
        best = self._best(have)
        index = {
            "latest": path.name,
            "best": None if best is None else {"folder": self.path(best[0]).name, "score": best[1]},
        }
        write_json_atomic(self.folder / INDEX_FILE, index)
        kept = {*have[-self.keep :], step, *([] if best is None else [best[0]])}
        kept |= {base for one in kept for base in self._bases(one)}
        for old in have:
            if old not in kept:
                self._remove(old)
        if self.mirror is not None:
            self.mirror.push()

    def _bases(self, step: int) -> list[int]:
        """Return the steps of the checkpoints that this one needs; of a damaged one those that are known."""
        found: list[int] = []
        try:
            for _, manifest in chain_of(self.path(step), read_manifest(self.path(step))):
                found.append(manifest.step)
        except CheckpointError:
            pass  # `latest_whole` reports it
        return found

    def latest_whole(self) -> Path | None:
        """Return the newest checkpoint that passes verification; None if there are no checkpoints.

        A damaged one is logged and the next older one is tried. Resuming repeats the same steps bit for bit, so this
        costs only time.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        damaged: CheckpointError | None = None
        for step in reversed(self.steps()):
            try:
                verify_checkpoint(self.path(step))
            except CheckpointError as error:
                damaged = damaged or error
                _log.warning("skipping a damaged checkpoint: %s", error)
            else:
                return self.path(step)
        if damaged is not None:
            raise damaged
        return None

    def best_path(self) -> Path | None:
        """Return the folder of the checkpoint with the best score; None if none was evaluated."""
        best = self._best(self.steps())
        return None if best is None else self.path(best[0])

    def _best(self, steps: list[int]) -> tuple[int, float] | None:
        """Return (step, score); the earlier of equal scores."""
        best: tuple[int, float] | None = None
        for step in steps:
            try:
                score = read_manifest(self.path(step)).progress.get("score")
            except CheckpointError:
                continue  # a damaged checkpoint cannot be the best; `latest_whole` reports it
            if score is not None and (best is None or (score > best[1] if self.higher_is_better else score < best[1])):
                best = (step, score)
        return best

    def discard_after(self, step: int) -> None:
        """Remove checkpoints after a step; they are damaged, and training writes them again."""
        for later in self.steps() if self.group.rank == 0 else []:
            if later > step:
                self._remove(later)

    def _remove(self, step: int) -> None:
        """Rename before removing: if the process is killed here, no partial checkpoint keeps its name."""
        gone = self.folder / f".{self.path(step).name}.removed.old"
        self.path(step).rename(gone)
        shutil.rmtree(gone)
