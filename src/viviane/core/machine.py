"""What this machine is: processor, memory, GPUs, library versions. For `viviane doctor` and the figures' records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

GIB: Final = 1024**3
# Flags of /proc/cpuinfo that decide which vector instructions a kernel may use.
_CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Cpu:
    """A processor: its name, the cores this process may use, and the vector instructions that matter here."""

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
    """Describe the processor; where /proc/cpuinfo is not there, by what the platform tells.

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
    """Return the number of cores that this process may run on; not those that are masked off."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """Return (total, available) main memory in bytes; None where the system does not tell."""
    found: dict[str, int] = {}
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                found[name] = int(value.split()[0]) * 1024
    return found.get("MemTotal"), found.get("MemAvailable")


def gpus() -> list[Gpu]:
    """Return the GPUs that torch sees; an empty list where there is none."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}"))
    return found


def versions(*packages: str) -> dict[str, str | None]:
    """Return the installed version of each distribution, None for one that is absent; nothing is imported.

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
    """Say the machine in one line, for a record: cores, processor, memory, GPUs.

    Example:
        >>> "cores" in describe()
        True
    """
    processor, (total, _) = cpu(), memory_bytes()
    parts = [f"{processor.num_cores} cores {processor.model}"]
    if total is not None:
        parts.append(f"{total / GIB:.0f} GiB")
    names = [gpu.name for gpu in gpus()]
    parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(parts)


def commit(folder: str | Path) -> str | None:
    """Return the git commit of `folder`, with "+" where files differ from it; None outside a repository."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode != 0:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")
