"""Install the module `hugectr` in sys.modules while a script written for HugeCTR runs."""

from __future__ import annotations

import atexit
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from viviane.compat.hugectr import mpi
from viviane.compat.hugectr.arguments import print_notes
from viviane.compat.hugectr.notebook_run import run_notebook
from viviane.compat.hugectr.reading import close_readers, open_readers
from viviane.compat.hugectr.symbols import HugectrModule, modules
from viviane.compat.hugectr.tensorflow_lookup import close_servers, keras_of_scripts
from viviane.compat.hugectr.tensors import want_gradients
from viviane.compat.hugectr.train_json import train_from_json
from viviane.core.errors import ConfigError
from viviane.core.scripts import checked_script, installed_modules, missing_names_explained, run_as_main

_CHILD: Final = Path(__file__).parent / "child"


@contextmanager
def installed() -> Iterator[None]:
    """Let `import hugectr` find HugeCTR's modules for a block; afterwards remove them and stop all readers.

    Python programs that the block starts find them as well. A nested block uses the same modules.
    """
    is_nested, before = isinstance(sys.modules.get("hugectr"), HugectrModule), open_readers()
    with nullcontext() if is_nested else installed_modules({**modules(), **mpi.stand_in()}, _CHILD):
        try:
            yield
        finally:
            close_readers(but=before)  # a notebook's cells go on with theirs after a program that one of them runs
            if not is_nested:
                close_servers()
            print_notes()


def install() -> None:
    """Install the modules for the rest of this program, which a script has started."""
    sys.modules.update({**modules(), **mpi.stand_in()})
    atexit.register(_end)


def _end() -> None:
    close_readers()
    close_servers()
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
    path = checked_script(script)
    if path.suffix == ".ipynb":
        text = path.read_text(encoding="utf-8", errors="replace")
        with keras_of_scripts(text), installed(), missing_names_explained(path):
            run_notebook(path, args, program, run_file=_run, run_cell=_run_cell)
        return
    if program is not None:
        raise ConfigError("a program is chosen from a notebook", value=program, fix="leave --program out")
    with missing_names_explained(path):
        _run(path, args)


def _run(path: Path, args: Sequence[str]) -> None:
    if path.suffix == ".json":
        train_from_json(path)
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    want_gradients("check_out_tensor" in text and re.search(r"\bTrain\b", text) is not None)
    try:
        with keras_of_scripts(text), installed():
            run_as_main(path, args)
    finally:
        want_gradients(False)


def _run_cell(text: str, name: str, variables: dict[str, Any]) -> None:
    """Run a notebook's plain cell; its last expression is not shown, and its readers serve the cells after it.

    Tools that read the source of functions, such as TensorFlow's AutoGraph, find it as in IPython.
    """
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in text.splitlines()], name)
    try:
        code = compile(text, name, "exec")
    except (SyntaxError, ValueError) as error:  # the latter of a null character
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            "a cell is no Python", where=f"{name}{line}", value=getattr(error, "msg", str(error))
        ) from error
    exec(code, variables)
