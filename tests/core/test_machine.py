import os
import subprocess
from pathlib import Path

import pytest

from viviane.core import machine


def test_cpu_is_read_from_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: fpu avx2 avx512f amx_bf16\n\nmodel name\t: Other\n"
    )
    found = machine.cpu(file)
    assert found.model == "Some CPU: fast"
    assert found.flags == ("avx2", "avx512f", "amx_bf16")
    assert found.num_cores == machine.usable_cores()


def test_cpu_without_cpuinfo_still_has_cores(tmp_path: Path) -> None:
    assert machine.cpu(tmp_path / "absent").num_cores >= 1
    assert machine.cpu(tmp_path / "absent").flags == ()


def test_memory_is_in_bytes() -> None:
    total, available = machine.memory_bytes()
    assert 256 << 20 < total < 1 << 50
    assert 0 < available <= total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_masked_cores_do_not_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert machine.usable_cores() == len(before)


def test_description_counts_equal_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = machine.Gpu("Big GPU", 80 * machine.GIB, "9.0")
    monkeypatch.setattr(machine, "gpus", lambda: [gpu, gpu])
    monkeypatch.setattr(machine, "memory_bytes", lambda: (64 * machine.GIB, None))
    assert machine.describe().endswith("64 GiB, 2 x Big GPU")


def test_commit_marks_changed_files(tmp_path: Path) -> None:
    assert machine.commit(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "file").write_text("one")
    git("init")
    git("add", "file")
    git("commit", "-m", "one")
    clean = machine.commit(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "file").write_text("two")
    assert machine.commit(tmp_path) == clean + "+"
