"""Commands under real limits of the machine: they succeed, or end with code 2 and an error that says what to do."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from viviane.core.errors import ConfigError
from viviane.core.machine import free_memory
from viviane.nn.init import Initializer
from warm import Warm

LIMITED = """
import os, resource, signal, sys
kind, amount = sys.argv[1], int(sys.argv[2])
from viviane.cli.main import main
if kind == "size of files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (amount, amount))
elif kind == "open files":
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + amount, used + amount))
elif kind == "memory":
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * os.sysconf("SC_PAGESIZE") + (amount << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.argv = ["viviane", *sys.argv[3:]]
main()
"""
SMALL = [
    *("--rows", "2000", "--valid-rows", "500", "--max-cardinality", "50"),
    *("--num-dense", "2", "--num-categorical", "2"),
]
CONFIG = {
    "data": {"train": "data/train", "validation": "data/valid"},
    "solver": {"batch_size": 250, "lr": 0.01, "device": "cpu", "checkpoint_every": 3},
    "model": {"zoo": "dcn_v2", "dim": 4, "deep_mlp": [8]},
    "metrics": ["auc"],
}
COMMANDS = {
    "train": ["train", "c.json", "--run-folder", "{}/run"],
    "predict": ["predict", "model", "data/valid", "--output", "{}/scores.parquet"],
    "predict to csv": ["predict", "model", "data/valid", "--output", "{}/scores.csv"],
    "evaluate": ["evaluate", "model", "data/valid"],
    "summary": ["summary", "c.json"],
    "plan": ["plan", "c.json", "--processes", "2", "--memory-gb", "1", "--memory-gb-per-s", "10"],
    "convert": ["convert", "data/valid", "{}/norm", "--to", "norm"],
    "generate": ["generate", "{}/more", *SMALL],
    "etl": ["etl", "raw.csv", "--infer", "--label", "click", "--output", "{}/clean", "--threads", "1"],
    "checkpoint": ["checkpoint", "reshard", "model/weights", "{}/other", "--processes", "2"],
    "keyset": ["keyset", "data/valid", "--output", "{}/keys"],
    "export": ["export", "model", "--output", "{}/exported", "--to", "torch-export"],
    "tune": ["tune", "c.json", "--output", "{}/tuned", "--trials", "1", "--search", "solver.lr=1e-4:0.1:log"],
    "check": ["check", "data/valid"],
}
LIMITS = [
    ("size of files", 1000), ("size of files", 3000), ("open files", 0), ("open files", 3), ("open files", 12),
    ("memory", 1), ("memory", 30), ("memory", 200), ("full disk", 4), ("full disk", 24), ("read-only folder", 0),
]  # fmt: skip
QUICK = {
    ("train", "size of files", 3000), ("predict", "full disk", 4), ("summary", "memory", 1), ("plan", "open files", 0),
    ("predict", "open files", 0),
}  # fmt: skip
ENDLESS = {"generate"}  # OpenBLAS asks again and again for the memory of its first product


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """Data, a config and a saved model."""
    folder = tmp_path_factory.mktemp("limits")
    (folder / "c.json").write_text(json.dumps(CONFIG))
    rows = "".join(f"{n % 2},i{n % 40},{n % 97}\n" for n in range(2000))
    (folder / "raw.csv").write_text(f"click,item,price\n{rows}")
    for words in (["generate", "data", *SMALL], ["train", "c.json", "--run-folder", "run"]):
        done = warm.run(["-m", "viviane.cli.main", *words], cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "run" / "model").rename(folder / "model")
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Where a file system may be mounted; what was is taken away."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mount(folder: Path, kilobytes: int, *, read_only: bool) -> None:
    options = "ro" if read_only else f"size={kilobytes}k"
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root and permission to mount")


CASES = [
    pytest.param(name, kind, amount, marks=[] if (name, kind, amount) in QUICK else [pytest.mark.slow])
    for name in COMMANDS for kind, amount in LIMITS if not (name in ENDLESS and kind == "memory")
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "amount"), CASES)
def test_a_command_under_a_limit(name: str, kind: str, amount: int, place: Path, mounted: Path, warm: Warm) -> None:
    if kind in ("full disk", "read-only folder"):
        mount(mounted, amount, read_only=kind == "read-only folder")
    words = [word.format(mounted) for word in COMMANDS[name]]
    done = warm.run(["-c", LIMITED, kind, amount, *words], cwd=place)
    assert done.returncode in (0, 2), (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert "error: " in done.stderr, done.stderr
        assert "  do: " in done.stderr, done.stderr


def test_a_weight_larger_than_half_of_the_free_memory_is_refused_before_it_is_taken() -> None:
    free = free_memory()
    assert free is not None
    with pytest.raises(ConfigError, match="a weight does not fit into memory") as refused:
        Initializer(0, "deep").uniform("weight", (2, free // 10), 1.0)  # .8 of it
    assert "layer 'deep', weight" in str(refused.value)
    made = Initializer(0, "deep").constant((2, 10 << 20))  # 80 MiB are compared, too, and fit
    assert made.shape == (2, 10 << 20)
