"""Run a user's script with modules installed under the names of another package."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, ConfigNotFoundError

_PATH: Final = "PYTHONPATH"


@contextmanager
def installed_modules(modules: Mapping[str, Any], child: Path) -> Iterator[None]:
    """Put modules into `sys.modules` for a block, and restore what was there before.

    Args:
        modules: by the name under which scripts import them.
        child: folder that is put in front of PYTHONPATH; its `sitecustomize` installs the modules in child processes.
    """
    before = {name: sys.modules.get(name) for name in modules}
    path = os.environ.get(_PATH)
    sys.modules.update(modules)
    os.environ[_PATH] = os.pathsep.join([str(child), *([path] if path else [])])
    try:
        yield
    finally:
        if path is None:
            os.environ.pop(_PATH, None)
        else:
            os.environ[_PATH] = path
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
def missing_packages_named(path: Path) -> Iterator[None]:
    """Turn a ModuleNotFoundError of a script into a ConfigError that names the package.

    Raises:
        ConfigError: the script imports a package that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the script needs a package that is not installed", where=str(path), value=error.name,
            fix="install it, or remove what needs it",
        ) from error  # fmt: skip
