"""Checkpoints written beside training by two processes: each its shards, the same bits, and errors known to both."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes
from group_model import PLAN, make_data, make_trainer, settings

from viviane.core.errors import CheckpointError
from viviane.data import Dataset
from viviane.embedding import row_snapshot
from viviane.parallel import Group
from viviane.training import read_manifest, verify_checkpoint
from viviane.training.checkpoint.held_rows import HeldRows
from viviane.training.checkpoint.store import CheckpointStore
from viviane.training.checkpoint.tools import compare_checkpoints


def job(folder):
    group, train = Group.world(), Dataset(folder / "train")
    row_snapshot.PIECE_BYTES = 64
    pieces, moved = HeldRows.pieces, []

    def slowly(self):
        for piece in pieces(self):
            yield piece
            time.sleep(0.002)
        moved.append(self._snapshot.kept_bytes)

    HeldRows.pieces = slowly
    for beside in (False, True):
        changes = {"checkpoint_every": 5, "keep_checkpoints": 20, "ema_decay": 0.9, "max_steps": 22}
        solver = settings(async_checkpoint=beside, **changes)
        make_trainer(group, solver, run_folder=folder / str(beside)).fit(train)
    assert max(moved) > 0
    stores = [CheckpointStore(folder / kind / "checkpoints", 20) for kind in ("False", "True")]
    assert stores[0].steps() == stores[1].steps() == [5, 10, 15, 20, 22]
    for step in stores[0].steps() if group.rank == 0 else []:
        assert not compare_checkpoints(stores[0].path(step), stores[1].path(step))
        assert {
            one["table"]: one["kind"] for one in read_manifest(stores[1].path(step)).plans["tables"]["tables"]
        } == PLAN

    def failing(self):
        if group.rank == 1 and len(moved) > 6:
            raise OSError(28, "No space left on device")
        moved.append(1)
        yield from pieces(self)

    moved.clear()
    HeldRows.pieces = failing
    trainer = make_trainer(group, settings(async_checkpoint=True, checkpoint_every=7), run_folder=folder / "full")
    with pytest.raises(CheckpointError, match="disk is full") as caught:
        trainer.fit(train)
    assert str(caught.value).startswith("rank 1: ") == (group.rank == 0)
    steps = [one[0] for one in group.gather_numbers([trainer.step])]
    assert steps[0] == steps[1] < 51, "the processes stop at one step"
    group.gather_numbers([0])
    store = CheckpointStore(folder / "full" / "checkpoints", 2)
    assert all(verify_checkpoint(store.path(step)) for step in store.steps())
    assert not list(store.folder.glob(".step*"))


@pytest.mark.slow
def test_two_processes_save_while_they_train(tmp_path):
    make_data(tmp_path)
    processes.run(2, job, tmp_path)
