"""The environment that Triton runs in: its own, since its Python backend needs an older NumPy than Viviane does.

The server is the binary inside the wheel of nvidia-pytriton; the Python code of that package is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, MissingExtraError, VivianeError
from viviane.core.files import write_json_atomic

TRITON_PACKAGE: Final = "nvidia-pytriton==0.7.0"  # brings Triton 2.51.0
_PERF_ANALYZER: Final = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12")  # for their binaries alone
# The newest NumPy that the Python backend of Triton 2.51.0 exchanges tensors with, and a PyArrow that works with it.
_PINNED: Final = ("numpy==1.26.4", "pyarrow==21.0.0")
_LIBRARIES: Final = (
    "torch", "numba", "pydantic", "typer", "rich", "safetensors", "fsspec", "filelock", "jinja2", "psutil", "tenacity",
    "duckdb", "ibis-framework",
)  # fmt: skip
_WHERE_INSTALLED: Final = ("faiss-cpu",)  # for the indexes of recommenders
_PYTHONS: Final = ((3, 11), (3, 12))
_DONE: Final = "viviane-triton.json"
_PLACE: Final = "VIVIANE_TRITON_ENV"


class TritonError(VivianeError):
    """Triton could not be installed or started, or ended by itself."""


@dataclass(frozen=True)
class TritonEnvironment:
    """An installed Triton.

    Args:
        folder: of the virtual environment.
    """

    folder: Path

    @classmethod
    def find(cls, folder: str | Path | None = None) -> TritonEnvironment:
        """Return the installed environment.

        Args:
            folder: None takes $VIVIANE_TRITON_ENV, else a folder of the user's cache.

        Raises:
            MissingExtraError: there is none, or its installation was broken off.
        """
        place = environment_folder(folder)
        if not (place / _DONE).exists():
            raise MissingExtraError("Triton is not installed", where=str(place),
                                    fix="viviane serve --install-triton")  # fmt: skip
        return cls(place)

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        return next(self.folder.glob("lib/python3.*/site-packages"))

    @property
    def triton(self) -> Path:
        """The folder of the server."""
        return self.packages / "pytriton" / "tritonserver"

    @property
    def server(self) -> Path:
        """The server's binary."""
        return self.triton / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The process of the Python backend, for the version of the interpreter."""
        version = self.packages.parent.name.removeprefix("python")
        return self.triton / "python_backend_stubs" / version / "triton_python_backend_stub"

    @property
    def perf_analyzer(self) -> Path:
        """Triton's load generator."""
        return self.folder / "perf_analyzer" / "bin" / "perf_analyzer"

    def perf_analyzer_libraries(self) -> str:
        """Return the search path of shared libraries for `perf_analyzer`."""
        folder = self.folder / "perf_analyzer"
        return os.pathsep.join([str(folder / "nvidia" / "cuda_runtime" / "lib"), str(folder / "lib"), self.libraries()])

    def libraries(self) -> str:
        """Return the search path of shared libraries: the wheel's own, and the interpreter's libpython.

        Without the latter the stub may load a libpython of another patch version, which fails in odd ways.
        """
        code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR') or '')"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        places = [str(self.packages / "nvidia_pytriton.libs"), done.stdout.strip()]
        return os.pathsep.join(one for one in [*places, os.environ.get("LD_LIBRARY_PATH", "")] if one)


def environment_folder(folder: str | Path | None = None) -> Path:
    """Return where Triton is, or is to be, installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(folder or os.environ.get(_PLACE) or cache / "viviane" / "triton-2.51.0").expanduser().absolute()


def requirements() -> list[str]:
    """Return what is installed beside Triton: the libraries of this environment in their versions.

    Torch is the same to the last digit of its version, so that predictions are the same to the last bit.
    """
    found = [*_PINNED]
    for name in (*_LIBRARIES, *_WHERE_INSTALLED):
        try:
            found.append(f"{name}=={metadata.version(name).partition('+')[0]}")
        except metadata.PackageNotFoundError:
            found += [name] if name in _LIBRARIES else []
    return [f"{one.replace('==', '[duckdb]==', 1)}" if one.startswith("ibis-framework==") else one for one in found]


def install_triton(folder: str | Path | None = None, *, say: Callable[[str], Any] = print) -> TritonEnvironment:
    """Install Triton into an environment of its own; one that is complete stays as it is.

    Args:
        folder: None takes $VIVIANE_TRITON_ENV, else a folder of the user's cache.
        say: called with a line for each step.

    Raises:
        ConfigError: the folder holds something else. TritonError: no usable Python, or pip failed.
    """
    place = environment_folder(folder)
    if (place / _DONE).exists():
        say(f"Triton is installed: {place}")
        return TritonEnvironment(place)
    if place.exists() and any(place.iterdir()) and not (place / "pyvenv.cfg").exists():
        raise ConfigError("the folder is not empty", where=str(place), fix="choose another folder")
    say(f"installing Triton 2.51.0 into {place} (about 2 GB; several minutes)")
    shutil.rmtree(place, ignore_errors=True)
    _make_environment(place)
    environment = TritonEnvironment(place)
    # Its own requirements are those of its Python code, which is not used.
    tools = ["--no-deps", "--target", str(place / "perf_analyzer"), *_PERF_ANALYZER]
    for arguments in (["--no-deps", TRITON_PACKAGE], requirements(), tools):
        say(f"pip install {' '.join(arguments)}")
        _pip(environment, arguments)
    _link_libb64(environment)
    for needed in (environment.server, environment.stub):
        if not needed.exists():
            raise TritonError("the package holds no Triton server for this machine", where=str(needed),
                              allowed="Linux on x86-64 with glibc 2.35 or newer")  # fmt: skip
    write_json_atomic(place / _DONE, {"triton": "2.51.0", "packages": [TRITON_PACKAGE, *requirements()]})
    say("installed")
    return environment


def _link_libb64(environment: TritonEnvironment) -> None:
    """Give perf_analyzer the library that it lacks under the name it looks for; the server's wheel brings it."""
    folder = environment.folder / "perf_analyzer" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    for found in (environment.packages / "nvidia_pytriton.libs").glob("libb64-*.so.0d"):
        (folder / "libb64.so.0d").symlink_to(os.path.relpath(found, folder))


def _make_environment(place: Path) -> None:
    if sys.version_info[:2] in _PYTHONS:
        venv.create(place, with_pip=True)
        return
    for major, minor in _PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found is not None:
            subprocess.run([found, "-m", "venv", str(place)], check=True)
            return
    allowed = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise TritonError("Triton's Python backend needs another Python", value=version,
                      allowed=allowed, fix="put python3.12 on the PATH")  # fmt: skip


def _pip(environment: TritonEnvironment, arguments: list[str]) -> None:
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        fix = "offline, point pip at a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        raise TritonError("pip failed", where=" ".join(command), value="\n".join(lines[-5:]), fix=fix)
