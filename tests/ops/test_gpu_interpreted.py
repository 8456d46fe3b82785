"""Run the tests of the GPU's kernels in Triton's interpreter, in processes that Triton starts anew in."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))
# A process starts for seconds: each takes several files, and these are enough of them to keep two cores at work.
SHARES = [FILES[first::4] for first in range(4)]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/ops/gpu runs on it"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


@pytest.mark.parametrize(
    "paths", SHARES, ids=lambda paths: ",".join(path.stem.removeprefix("test_gpu_") for path in paths)
)
def test_in_the_interpreter(paths):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, paths)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
