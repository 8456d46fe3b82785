"""kill -9 at writes of a training that publishes: after its next start servers have the bits of the saved model."""

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import viviane as vv
from viviane.serving import InferenceSession
from warm import Warm

KILLED = Path(__file__).parents[2] / "kill" / "killed.py"
COMMAND = "from viviane.cli.main import main; main()"
CONFIG = {
    "name": "ctr", "data": {"train": "data"},
    "solver": {"batch_size": 64, "epochs": 2, "lr": 0.05, "device": "cpu", "checkpoint_every": 4,
               "keep_checkpoints": 1},
    "model": {"zoo": "deepfm", "dim": 4, "deep_mlp": [8]},
}  # fmt: skip
ROWS = {"item": np.arange(300)}


class Place:
    """A folder with data, a topic, and the training in it."""

    def __init__(self, folder: Path, data: Path, broker: Any, warm: Warm) -> None:
        self.folder, self._warm = folder, warm
        folder.mkdir()
        shutil.copytree(data, folder / "data")
        (folder / "c.json").write_text(json.dumps(CONFIG))
        topic = f"topic-{uuid4().hex[:8]}"
        broker.make(topic, partitions=2)
        self.address = f"kafka://{broker.servers}/{topic}"

    def train(self, limit: int = 0, *more: str) -> tuple[int, list[str], str]:
        words = ["train", "c.json", "--publish", self.address, "--publish-every", "0.01", "--run-folder", "run"]
        done = self._warm.run([KILLED, str(limit), COMMAND, *words, "--quiet", *more], cwd=self.folder)
        last = done.stdout.strip().splitlines()[-1:] or [""]
        return done.returncode, json.loads(last[0]) if last[0].startswith("[") else [], done.stdout + done.stderr

    def check(self) -> None:
        """See that a server that began with the snapshot has the bits of the trained model."""
        run = self.folder / "run"
        with InferenceSession(run / "model", device="cpu") as session:
            truth = session.predict(ROWS)
        sent = json.loads((run / "outbox/sent.json").read_text())["publication"]
        updates = {"address": self.address, "visible": "publication"}
        with InferenceSession(run / "snapshot", device="cpu", tables={"host": {}, "updates": updates}) as session:
            assert session.tables is not None
            assert session.tables.updates is not None
            assert session.tables.updates.wait_for(sent, 20)
            assert np.array_equal(session.predict(ROWS), truth)
        assert not list(self.folder.rglob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_many_writes(broker: Any, warm: Warm, tmp_path: Path) -> None:
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "item", "num_ids": 300}])
    random = np.random.default_rng(0)
    columns = {"y": random.integers(0, 2, 640).astype(np.float32), "item": random.integers(3, 300, 640)}
    vv.write_dataset(tmp_path / "data", schema, [columns])
    whole = Place(tmp_path / "whole", tmp_path / "data", broker, warm)
    code, writes, said = whole.train()
    assert code == 0, said
    whole.check()
    kills = 0
    for number in [len(writes) * part // 25 for part in range(1, 25)]:
        place = Place(tmp_path / f"killed-{number}", tmp_path / "data", broker, warm)
        code, _, said = place.train(number)
        kills += code == -9
        assert code in (0, -9), said
        if code:
            code, _, said = place.train(0, "--resume")
            assert code == 0, f"killed at write {number}, {writes[number - 1]}: {said}"
        place.check()
        shutil.rmtree(place.folder)
    print(f"published training: {kills} kills of {len(writes)} writes")
    assert kills > 15
