"""Requirements of an artifact for the machine that runs it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import Field

from viviane.config.base import Settings
from viviane.core.errors import ExportError

# Flags of /proc/cpuinfo that affect compilers; others, such as virtualization, do not matter.
_FAMILIES: Final = (
    "avx",
    "amx",
    "sse",
    "ssse",
    "fma",
    "bmi",
    "f16c",
    "popcnt",
    "abm",
    "movbe",
    "aes",
    "pclmulqdq",
    "vaes",
    "vpclmulqdq",
    "gfni",
    "sha_ni",
    "adx",
    "rdseed",
    "rdrand",
    "sve",
    "asimd",
    "fphp",
    "bf16",
    "i8mm",
)
_VERSION: Final = r"^[0-9]{1,6}\.[0-9]{1,6}$"


class Requirements(Settings):
    """The machine and the versions that an artifact runs with.

    Args:
        torch_from: minimum version of torch, such as "2.13".
        torch_below: the first unsupported version of torch; None: no limit is known.
        architecture: processor architecture, such as "x86_64"; None: any.
        cpu_flags: instructions that it may use.
        device: "cpu" or "cuda".
        capability: compute capability of the GPU it was compiled for, such as "9.0"; None: any.
        libraries: other packages that it needs.
    """

    torch_from: str | None = Field(default=None, pattern=_VERSION)
    torch_below: str | None = Field(default=None, pattern=_VERSION)
    architecture: str | None = None
    cpu_flags: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    capability: str | None = None
    libraries: tuple[str, ...] = ()

    def check(self, form: str, folder: Path) -> None:
        """Refuse an artifact that does not run on this machine.

        Raises:
            ExportError: a requirement is not met; names it and what the machine has.
        """
        where, version = f"{folder}, form {form!r}", torch_version()
        low, high = self.torch_from, self.torch_below
        if (low is not None and version < _numbers(low)) or (high is not None and version >= _numbers(high)):
            allowed = f"torch {low} or later" + ("" if high is None else f", below {high}")
            raise _refuse(
                "another version of torch", where, torch.__version__, allowed, "export the model with this torch"
            )
        if self.architecture is not None and self.architecture != platform.machine():
            raise _refuse("a processor of another kind", where, platform.machine(), self.architecture)
        missing = sorted(set(self.cpu_flags) - set(cpu_flags()))
        if missing:
            what = "instructions that this processor lacks"
            raise _refuse(what, where, ", ".join(missing), "a processor that has them")
        if self.device == "cuda":
            if not torch.cuda.is_available():
                raise _refuse("a GPU", where, "it has no GPU", f"compute capability {self.capability or 'any'}")
            own = capability()
            if self.capability is not None and own != self.capability:
                raise _refuse(
                    "a GPU of another architecture",
                    where,
                    f"compute capability {own}",
                    f"compute capability {self.capability}",
                )


def _refuse(what: str, where: str, value: str, allowed: str, fix: str | None = None) -> ExportError:
    fix = fix or "export the model on a machine like this one, or use another form"
    return ExportError(f"the artifact needs {what}", where=where, value=value, allowed=allowed, fix=fix)


def torch_version() -> tuple[int, ...]:
    """Return torch's major and minor version."""
    return _numbers(torch.__version__)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])


def this_minor() -> tuple[str, str]:
    """Return torch's version as "2.13", and the next one."""
    major, minor = torch_version()
    return f"{major}.{minor}", f"{major}.{minor + 1}"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the instructions of this processor that affect compilers; empty if the system does not report them."""
    if not cpuinfo.exists():
        return ()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(flag for flag in value.split() if flag.startswith(_FAMILIES)))
    return ()


def capability() -> str:
    """Return the compute capability of the current GPU, such as "9.0"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"
