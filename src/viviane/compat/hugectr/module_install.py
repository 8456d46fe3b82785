"""Install the module `hugectr` in sys.modules while a script written for HugeCTR runs."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from viviane.compat.hugectr import mpi
from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.notebook_run import run_notebook
from viviane.compat.hugectr.reading import close_readers
from viviane.compat.hugectr.symbols import HugectrModule, modules
from viviane.compat.hugectr.tensors import want_gradients
from viviane.core.errors import ConfigError, ConfigNotFoundError

_PATH: Final = "PYTHONPATH"
_CHILD: Final = Path(__file__).parent / "child"


@contextmanager
def installed() -> Iterator[None]:
    """Let `import hugectr` find HugeCTR's modules for a block; afterwards take them away, and stop all readers.

    Python programs that the block starts find them as well. A block inside such a block has the same modules.
    """
    if isinstance(sys.modules.get("hugectr"), HugectrModule):
        try:
            yield
        finally:
            _end()
        return
    made = {**modules(), **mpi.stand_in()}
    before = {name: sys.modules.get(name) for name in made}
    path = os.environ.get(_PATH)
    sys.modules.update(made)
    os.environ[_PATH] = os.pathsep.join([str(_CHILD), *([path] if path else [])])
    try:
        yield
    finally:
        _end()
        if path is None:
            os.environ.pop(_PATH, None)
        else:
            os.environ[_PATH] = path
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def install() -> None:
    """Install the modules for the rest of this program, which a script has started."""
    sys.modules.update({**modules(), **mpi.stand_in()})
    atexit.register(_end)


def _end() -> None:
    close_readers()
    print_notes()


def run_script(script: str | Path, args: Sequence[str] = (), program: str | None = None) -> None:
    """Run a script of HugeCTR's as `python script args` would, or a notebook, see `notebook_run`.

    Args:
        script: a Python file, or a notebook, whose files are written into the working directory.
        args: the script's own.
        program: of a notebook run this one alone.

    Raises:
        ConfigError: there is no such script, or it asks for what cannot be honoured.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigNotFoundError("no such script", value=str(path))
    if path.suffix == ".ipynb":
        with installed():
            run_notebook(path, args, program, run_file=_run, run_cell=_run_cell)
        return
    if program is not None:
        raise ConfigError("a program is chosen from a notebook", value=program, fix="leave --program out")
    try:
        _run(path, args)
    except ModuleNotFoundError as error:
        raise ConfigError("the script needs a package that is not installed", where=str(path), value=error.name,
                          fix="install it, or take out what needs it") from error  # fmt: skip


def _run(path: Path, args: Sequence[str]) -> None:
    argv, search = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.resolve().parent)]
    text = path.read_text(encoding="utf-8", errors="replace")
    want_gradients("check_out_tensor" in text and re.search(r"\bTrain\b", text) is not None)
    try:
        with installed():
            runpy.run_path(str(path), run_name="__main__")
    finally:
        want_gradients(False)
        sys.argv, sys.path[:] = argv, search


def _run_cell(text: str, name: str, variables: dict[str, Any]) -> None:
    """Run a notebook's plain cell; its last expression is not shown."""
    try:
        exec(compile(text, name, "exec"), variables)
    finally:
        close_readers()
