"""Tables of a Keras model over two processes are those of one, and a checkpoint moves between them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("keras")
SCRIPT = Path(__file__).parent / "processes.py"


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    for count in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={count}",
            str(SCRIPT),
        ]
        command += [str(tmp_path / f"tables-{count}"), str(tmp_path / f"out-{count}")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, first, second = (np.load(tmp_path / name) for name in ("out-1-0.npy", "out-2-0.npy", "out-2-1.npy"))
    assert np.array_equal(first, second)
    assert np.abs(one - first).max() < 1e-6
    diff = [sys.executable, "-m", "viviane", "checkpoint", "inspect", str(tmp_path / "tables-2"), "--json"]
    assert "tables.t0" in subprocess.run(diff, capture_output=True, text=True, check=True).stdout
