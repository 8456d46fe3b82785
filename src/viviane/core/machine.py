"""Description of the machine: processor, memory, GPUs, library versions; for `viviane doctor` and benchmark records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

GIB: Final = 1024**3
# Folder, limit file and usage file of control groups of version 2 and 1.
_CONTROL_GROUPS: Final = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Flags of /proc/cpuinfo that decide which vector instructions a kernel may use.
_CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Cpu:
    """A processor: its name, the cores that this process may use, and relevant vector instructions."""

    model: str
    num_cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees: name, memory in bytes, compute capability such as "9.0"."""

    name: str
    memory_bytes: int
    capability: str


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Describe the processor; without /proc/cpuinfo, from the platform module.

    Example:
        >>> cpu().num_cores >= 1
        True
    """
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    present = set(fields.get("flags", fields.get("Features", "")).split())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return Cpu(model, usable_cores(), tuple(flag for flag in _CPU_FLAGS if flag in present))


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    import psutil

    process = psutil.Process()  # macOS has no affinity
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) main memory in bytes."""
    import psutil

    found = psutil.virtual_memory()
    return int(found.total), int(found.available)


def free_memory() -> int | None:
    """Return the bytes of main memory that this process may still allocate: free memory, within its limits.

    Limits are those of the process (RLIMIT_AS, RLIMIT_DATA) and of its control group. None if unknown.
    """
    import psutil

    found: list[int | None] = [memory_bytes()[1]]
    own = psutil.Process().memory_info()
    if sys.platform == "linux":
        import resource

        for limit, used in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, getattr(own, "data", own.rss))):
            soft = resource.getrlimit(limit)[0]
            found.append(None if soft == resource.RLIM_INFINITY else max(0, soft - used))
    for folder, most, used_file in _CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # the process is in no such group
            text = (folder / most).read_text().strip()
            if text != "max":
                found.append(max(0, int(text) - int((folder / used_file).read_text())))
    known = [one for one in found if one is not None]
    return min(known) if known else None


def gpus() -> list[Gpu]:
    """Return the GPUs that torch sees; empty without GPUs."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}"))
    return found


def versions(*packages: str) -> dict[str, str | None]:
    """Return the installed version of each distribution, None if it is not installed, without importing it.

    Example:
        >>> versions("no-such-package")
        {'no-such-package': None}
    """
    result: dict[str, str | None] = {}
    for name in packages:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result[name] = None
    return result


def free_disk_bytes(folder: str | Path) -> int:
    """Return the free space, in bytes, of the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


def describe() -> str:
    """Return the machine in one line: cores, processor, memory, GPUs.

    Example:
        >>> "cores" in describe()
        True
    """
    processor, (total, _) = cpu(), memory_bytes()
    parts = [f"{processor.num_cores} cores {processor.model}", f"{total / GIB:.0f} GiB"]
    names = [gpu.name for gpu in gpus()]
    parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(parts)


def commit(folder: str | Path) -> str | None:
    """Return the git commit of `folder`, with "+" if files differ from it; None outside a repository."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode != 0:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")
