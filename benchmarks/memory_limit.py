"""Run a command under a limit of memory that the operating system enforces, page cache included: a control group."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limited:
    """What became of a command.

    Args:
        code: its exit code; -9 where the limit ended it.
        seconds: it took.
        most_bytes: the most memory that it and its children had, with the page cache of the files they used.
        most_anonymous: the most memory of its processes without files, seen ten times a second.
        output: what it printed, both streams.
    """

    code: int
    seconds: float
    most_bytes: int
    most_anonymous: int
    output: str


def can_limit() -> bool:
    """Whether this process may make control groups with a limit of memory."""
    parent = _parent()
    return parent is not None and os.access(parent, os.W_OK)


def run_limited(
    words: Sequence[str], num_bytes: int, *, env: Mapping[str, str] | None = None, timeout_s: float = 3600.0
) -> Limited:
    """Run a command and its children in a new control group."""
    parent = _parent()
    if parent is None:
        raise OSError("no control group for memory on this machine")
    group = parent / f"viviane-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    version = 2 if (group / "memory.max").exists() else 1
    try:
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(num_bytes))
        start, most = time.perf_counter(), 0
        process = subprocess.Popen(
            ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=None if env is None else dict(env),
        )  # fmt: skip
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    most = max(most, _anonymous(group))
                    if time.perf_counter() - start > timeout_s:
                        raise
        finally:
            process.kill()
            process.wait()
        peak = group / ("memory.peak" if version == 2 else "memory.max_usage_in_bytes")
        most_bytes = int(peak.read_text()) if peak.exists() else 0
        return Limited(process.returncode, time.perf_counter() - start, most_bytes, most, output)
    finally:
        for _ in range(50):  # a group goes when the last of its processes has
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _parent() -> Path | None:
    if (_ROOT / "memory" / "memory.limit_in_bytes").exists():
        return _ROOT / "memory"
    own = Path("/proc/self/cgroup")
    if not (_ROOT / "cgroup.controllers").exists() or not own.exists():
        return None
    parent = _ROOT / own.read_text().strip().rpartition("::/")[2]
    return parent if "memory" in (parent / "cgroup.subtree_control").read_text() else None


def _anonymous(group: Path) -> int:
    """Return the bytes of a group's processes that are not pages of files."""
    try:
        lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(lines.get("anon", lines.get("total_rss", lines.get("rss", 0))))
