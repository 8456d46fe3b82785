"""Run a user's script with modules installed under the names of another package."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from viviane.core.errors import ConfigError, ConfigNotFoundError, suggest

_PATHS: Final = ("PYTHONPATH", "PATH")
_PACKAGE: Final = Path(__file__).resolve().parent.parent


@contextmanager
def installed_modules(modules: Mapping[str, Any], child: Path) -> Iterator[None]:
    """Put modules into `sys.modules` for a block, and restore what was there before.

    Args:
        modules: by the name under which scripts import them.
        child: folder that is put in front of PYTHONPATH, from which child processes import the modules. In front of
            PATH is this interpreter's folder, so that the `python` of child processes has the same packages.
    """
    before = {name: sys.modules.get(name) for name in modules}
    paths = {name: os.environ.get(name) for name in _PATHS}
    sys.modules.update(modules)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(child), *([path] if (path := paths["PYTHONPATH"]) else [])])
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), paths["PATH"] or os.defpath])
    try:
        yield
    finally:
        for name, path in paths.items():
            if path is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = path
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def checked_script(script: str | Path) -> Path:
    """Return the path of a script that exists.

    Raises:
        ConfigNotFoundError: it does not.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigNotFoundError("no such script", value=str(path))
    return path


def run_as_main(path: Path, args: Sequence[str]) -> None:
    """Run a script as `python path args` would; `sys.argv` and `sys.path` are restored afterwards."""
    argv, search = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, search


@contextmanager
def missing_names_explained(path: Path) -> Iterator[None]:
    """Turn a ModuleNotFoundError of a script into a ConfigError that names the package, or the name it lacks.

    Raises:
        ConfigError: the script imports a package that is not installed, or uses a name that a module or an object of
            this package does not have.
    """
    try:
        yield
    except AttributeError as error:
        place = _place_in_script(error)
        if place is None or not _is_own(error.obj):
            raise
        owner, names = _shown_name(error.obj), [name for name in dir(error.obj) if not name.startswith("_")]
        raise ConfigError(
            "the script uses a name that is not there", where=place, value=f"{owner}.{error.name}",
            fix=suggest(str(error.name), names),
        ) from error  # fmt: skip
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the script needs a package that is not installed", where=str(path), value=error.name,
            fix="install it, or remove what needs it",
        ) from error  # fmt: skip


def _place_in_script(error: AttributeError) -> str | None:
    """Return file and line of the access if it was outside of this package, else None."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "__getattr__"]
    if not frames or Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def _is_own(owner: Any) -> bool:
    """Whether a module, class or object is of this package, the modules installed by it included."""
    if isinstance(owner, ModuleType):
        return type(owner).__module__.startswith("viviane.") or owner.__name__.startswith("viviane.")
    kind = owner if isinstance(owner, type) else type(owner)
    return kind.__module__.startswith("viviane.")


def _shown_name(owner: Any) -> str:
    return str(owner.__name__) if isinstance(owner, ModuleType | type) else type(owner).__name__
