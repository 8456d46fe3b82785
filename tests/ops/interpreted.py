"""The GPU's kernels in Triton's interpreter: each share of their tests runs once, whichever test asks for it first."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))
# A process starts for seconds: each takes several files, and these are enough of them to keep two cores at work.
SHARES = [FILES[first::4] for first in range(4)]


class Share(NamedTuple):
    """How a share's tests ended, what they wrote, and the file of their launches."""

    code: int
    words: str
    launches: Path


def run_share(folder: Path, whole: bool, number: int) -> Share:
    """Run a share's tests, or return what came of them.

    Args:
        folder: that all processes of this test run share.
        whole: all cases; else half or a quarter of those of tests with many.
        number: of the share.
    """
    launches, ended = folder / f"launches{number}.jsonl", folder / f"ended{number}.json"
    with (folder / f"lock{number}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, by the end of the process too
        if not ended.exists():
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
            added = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "VIVIANE_TEST_LAUNCHES": str(launches),
                     "VIVIANE_TEST_FEW": "" if whole else "1"}  # fmt: skip
            done = subprocess.run(
                [*command, *map(str, SHARES[number])], env={**os.environ, **added}, capture_output=True, text=True,
                check=False, cwd=ROOT,
            )  # fmt: skip
            ended.write_text(json.dumps([done.returncode, done.stdout + done.stderr]))
        return Share(*json.loads(ended.read_text()), launches)
