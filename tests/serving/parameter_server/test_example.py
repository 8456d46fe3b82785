"""The example of online learning, a few windows long, on a real broker."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_model_that_follows_beats_a_frozen_one(broker: Any, tmp_path: Path) -> None:
    broker.make("clicks", 1)
    broker.make("ctr", 2)
    command = [sys.executable, str(ROOT / "examples" / "online_learning.py"), "--broker", broker.servers,
               "--windows", "4", "--rows", "6000", "--folder", str(tmp_path / "online")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = dict(re.findall(r"^(\w+): AUC (\d\.\d+)", done.stdout, re.MULTILINE))
    assert float(found["served"]) > float(found["frozen"]) + 0.005
    assert "<svg" in (tmp_path / "online" / "online_learning.svg").read_text()
