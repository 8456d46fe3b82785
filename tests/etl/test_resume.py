"""Killed at any step, a run continues and ends with the same bytes; a failed one leaves nothing that looks whole."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from raw_files import data_bytes, text

from viviane.core.errors import ConfigError, DataError
from viviane.etl import criteo, run
from warm import Warm

CONFIG = criteo(num_dense=2, num_categorical=3, min_count=2)
# Runs the ETL with tiny shards, row groups and files, and kills itself at the n-th call of a function.
DRIVER = """
import os, signal, sys
from viviane.etl import criteo, pipeline, run, stage, write
raw, out, where, count = sys.argv[1:5]
write.ROWS_PER_GROUP, write.ROWS_PER_FILE = 500, 1000
first = pipeline._Run.__init__
def small(self, *args, **kwargs):
    first(self, *args, **kwargs)
    self.shard_bytes = 40_000
pipeline._Run.__init__ = small
from viviane.etl import sources
old_blocks = stage.text_blocks
stage.text_blocks = lambda *args, **kwargs: old_blocks(*args, **kwargs, block_bytes=20_000)
calls = 0
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
if where == "stage":
    stage.write_json_atomic = deadly(stage.write_json_atomic)
elif where == "learn":
    from viviane.etl.fitting import Fitter
    Fitter._counts = deadly(Fitter._counts)
elif where == "groups":
    from viviane.etl.group_fitting import GroupFitter
    GroupFitter._learn = deadly(GroupFitter._learn)
elif where == "derive":
    from viviane.etl import derive
    derive.add_group_columns = deadly(derive.add_group_columns)
elif where == "write":
    write.PartWriter._finish_file = deadly(write.PartWriter._finish_file)
from viviane.etl import EtlConfig
plain = criteo(num_dense=2, num_categorical=3, min_count=2).to_dict()
plain["derived"] = [
    {"type": "difference_lag", "name": "lag", "source": "I1", "by": "C2", "order_by": "I1"},
    {"type": "count", "name": "n", "by": "C1"},
    {"type": "target_encode", "name": "te", "by": ["C1", "C2"], "target": "label"},
]
plain["categorical"] += [
    {"name": name, "source": ["C1", name[1:]], "encoding": {"type": "categorify"}} for name in ("xC1", "xC2", "xC3")
]
plain["dense"] += [{"name": name, "operators": [{"type": "fill"}]} for name in ("lag", "n", "te")]
run(EtlConfig.from_dict(plain), raw, out, split="rows:train=0.8,test=0.2", threads=2)
"""


def raw_file(path: Path, rows: int = 6000) -> Path:
    noise = random.Random(3)
    lines = [
        f"{noise.randint(0, 1)}\t{noise.randint(-2, 99)}\t\t{noise.randint(0, 400):08x}\t{noise.randint(0, 9):x}\t\n"
        for _ in range(rows)
    ]
    return text(path, "".join(lines))


def drive(warm: Warm, raw: Path, out: Path, where: str, count: int) -> int:
    return warm.run(["-c", DRIVER, raw, out, where, count], cwd=raw.parent).returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """What a run that nobody kills writes."""
    folder = tmp_path_factory.mktemp("whole")
    assert drive(warm, raw_file(folder / "raw.tsv"), folder / "out", "nowhere", 0) == 0
    return folder / "out"


STEPS = [
    ("stage", 1),
    ("stage", 4),
    ("groups", 2),
    ("derive", 1),
    ("derive", 3),
    ("learn", 3),
    ("write", 1),
    ("write", 4),
]


@pytest.mark.parametrize(("where", "count"), STEPS)
def test_resume_after_kill(tmp_path: Path, where: str, count: int, warm: Warm, whole: Path) -> None:
    raw = raw_file(tmp_path / "raw.tsv")
    assert drive(warm, raw, tmp_path / "out", where, count) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.etl").exists()
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / ".out.etl").rglob("part-*.parquet")}
    assert bool(kept) == (where == "write" and count > 1)
    assert drive(warm, raw, tmp_path / "out", "nowhere", 0) == 0
    assert data_bytes(tmp_path / "out") == data_bytes(whole)
    assert not (tmp_path / ".out.etl").exists()


def test_another_job_does_not_take_up_old_work(tmp_path: Path, warm: Warm) -> None:
    raw = raw_file(tmp_path / "raw.tsv")
    assert drive(warm, raw, tmp_path / "out", "stage", 3) == -signal.SIGKILL
    raw_file(raw, rows=100)
    assert run(CONFIG, raw, tmp_path / "out").rows == {"train": 100}


def test_a_finished_job_is_not_done_again_and_not_overwritten(tmp_path: Path) -> None:
    raw = raw_file(tmp_path / "raw.tsv", 50)
    first = run(CONFIG, raw, tmp_path / "out")
    stamp = (tmp_path / "out/etl.zip").stat().st_mtime_ns
    again = run(CONFIG, raw, tmp_path / "out")
    assert (again.rows, again.seconds) == (first.rows, {})
    assert (tmp_path / "out/etl.zip").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match="the output exists"):
        run(CONFIG, raw, tmp_path / "out", split="rows:train=0.5,test=0.5")
    assert run(CONFIG, raw, tmp_path / "out", split="rows:train=0.5,test=0.5", overwrite=True).rows["test"] == 25
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "raw.tsv"]


def test_the_data_do_not_depend_on_threads_or_memory(tmp_path: Path) -> None:
    raw = raw_file(tmp_path / "raw.tsv", 20_000)
    run(CONFIG, raw, tmp_path / "one", threads=1, memory_limit="1GB", split="rows:train=0.5,test=0.5")
    run(CONFIG, raw, tmp_path / "many", threads=8, memory_limit="8GB", split="rows:train=0.5,test=0.5")
    assert data_bytes(tmp_path / "one") == data_bytes(tmp_path / "many")


def test_a_full_disk_is_said_and_nothing_is_taken_for_whole(tmp_path: Path) -> None:
    raw = raw_file(tmp_path / "raw.tsv", 20_000)
    program = (
        "import resource, signal, sys\n"
        "from viviane.etl import criteo, run\n"
        "from viviane.core.errors import DataError\n"
        "import duckdb, ibis\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "try:\n"
        "    run(criteo(num_dense=2, num_categorical=3), sys.argv[1], sys.argv[2])\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(raw), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "could not be read or written" in done.stdout
    assert "it resumes" in done.stdout
    assert not (tmp_path / "out").exists()
    assert run(criteo(num_dense=2, num_categorical=3), raw, tmp_path / "out").rows == {"train": 20_000}


@pytest.mark.skipif(os.name == "nt" or not Path("/proc/version").exists(), reason="/proc takes no folder on Linux only")
def test_an_unwritable_output_is_named(tmp_path: Path) -> None:
    raw = raw_file(tmp_path / "raw.tsv", 10)
    with pytest.raises(DataError, match=r"could not be read or written[\s\S]*/proc"):
        run(CONFIG, raw, "/proc/out")
