"""Run a notebook: its programs, the shell lines that run Python, and its plain cells.

A notebook runs completely if a shell line runs a program or a plain cell imports hugectr: plain cells and shell lines
in order, as "Run All" would. Otherwise the programs that its cells write run, one after the other.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.notebook import (
    Command,
    Line,
    Magic,
    Source,
    Step,
    Written,
    chosen_program,
    commands_of,
    imports_hugectr,
    programs_of,
    steps_of,
    write,
)
from viviane.core.errors import ConfigError

RunFile: TypeAlias = Callable[[Path, Sequence[str]], None]
RunCell: TypeAlias = Callable[[str, str, dict[str, Any]], None]
_QUIET: Final = ("ls", "cat", "head", "tail", "echo", "pwd", "nvidia-smi", "wc", "tree", "which", "sleep", "date")
"""Commands that only print something: skipped without a note."""


def run_notebook(
    notebook: Path, args: Sequence[str], program: str | None, *, run_file: RunFile, run_cell: RunCell
) -> None:
    """Run a notebook in the working directory.

    Args:
        notebook: the file.
        args: arguments of programs that no shell line runs.
        program: run only this program; its cells and those of other files are written.
        run_file: runs a program with its arguments.
        run_cell: runs Python, as (text, name, variables).

    Raises:
        ConfigError: the notebook has nothing to run, or does not write the requested program.
    """
    steps = steps_of(notebook)
    if program is not None:
        name = chosen_program(steps, program, notebook)
        for one in steps:
            if isinstance(one, Written):
                write(one, Path.cwd())
        say(f"{notebook.name}: {name}")
        run_file(Path.cwd() / name, args)
        return
    lines = [command for one in steps if isinstance(one, Line) for command in commands_of(one.text, {})]
    as_a_whole = any(command.program() for command in lines)
    as_a_whole = as_a_whole or any(isinstance(one, Source) and imports_hugectr(one.text) for one in steps)
    if not as_a_whole and not programs_of(steps):
        raise ConfigError("no cell writes a program that imports hugectr, and none imports it", where=str(notebook),
                          fix="%%writefile program.py in the first line of a cell, or an import in one")  # fmt: skip
    _Run(notebook, steps, args, run_file, run_cell).all(as_a_whole=as_a_whole)


class _Run:
    """One run of a notebook: the variables of its plain cells, and its position."""

    def __init__(
        self, notebook: Path, steps: Sequence[Step], args: Sequence[str], run_file: RunFile, run_cell: RunCell
    ) -> None:
        self.notebook, self.steps, self.args = notebook, steps, args
        self.run_file, self.run_cell = run_file, run_cell
        self.variables: dict[str, Any] = {"__name__": "__main__"}
        self.missing: set[str] = set()
        """Packages of plain cells that are not installed."""
        run_by_lines = {
            Path(found[0]).name
            for one in steps if isinstance(one, Line)
            for command in commands_of(one.text, {})
            if (found := command.program())
        }  # fmt: skip
        self.last_cells = {
            name: max(i for i, one in enumerate(steps) if isinstance(one, Written) and one.name == name)
            for name in programs_of(steps)
            if Path(name).name not in run_by_lines
        }
        """Programs that no shell line runs, by their last cell."""

    def all(self, *, as_a_whole: bool) -> None:
        for place, one in enumerate(self.steps):
            if isinstance(one, Written):
                path = write(one, Path.cwd())
                if self.last_cells.get(one.name) == place:
                    say(f"{self.notebook.name}: {path.name}")
                    self.run_file(path, self.args)
            elif as_a_whole:
                self._step(one)

    def _step(self, one: Step) -> None:
        if isinstance(one, Source):
            self._cell(one)
        elif isinstance(one, Line):
            with _same_folder():
                for command in commands_of(one.text, self.variables):
                    self._command(command)
        elif isinstance(one, Magic):
            self._magic(one)

    def _cell(self, one: Source) -> None:
        name = f"{self.notebook.name}, cell {one.cell}"
        try:
            self.run_cell(one.text, name, self.variables)
        except ImportError as error:
            what = error.name or str(error).partition("\n  do:")[0].replace("\n  where:", ":")
            self.missing.add(what)
            say(f"Warning: {name} is skipped: it needs {what}, which is not installed")
        except NameError as error:
            if not self.missing:
                raise
            say(f"Warning: {name} is skipped: {error}, after cells without {', '.join(sorted(self.missing))}")

    def _command(self, command: Command) -> None:
        words, found = command.words, command.program()
        if found is not None:
            path, args = Path(os.path.expandvars(found[0])), found[1]
            if not path.is_file():
                say(f"Warning: {self.notebook.name}: {path} does not exist and was not run")
                return
            say(f"{self.notebook.name}: {' '.join([str(path), *args])}")
            with _variables(command):
                try:
                    self.run_file(path, args)
                except ModuleNotFoundError as error:
                    say(f"Warning: {path} did not run: it needs {error.name}, which is not installed")
        elif words[:1] == ("cd",) and len(words) == 2:
            os.chdir(Path(words[1]).expanduser())
        elif words[:1] == ("mkdir",):
            for folder in (word for word in words[1:] if not word.startswith("-")):
                Path(os.path.expandvars(folder)).mkdir(parents=True, exist_ok=True)
        elif words[:1] == ("cp",) and len([word for word in words if not word.startswith("-")]) == 3:
            _, source, target = (os.path.expandvars(word) for word in words if not word.startswith("-"))
            _copy(Path(source), Path(target))
        elif words and words[0] not in _QUIET:
            say(f"Note: {self.notebook.name}: not run: {' '.join(words)}")

    def _magic(self, one: Magic) -> None:
        if one.name == "cd" and one.rest:
            os.chdir(Path(one.rest.strip("\"'")).expanduser())
        elif one.name in ("env", "set_env") and (found := re.match(r"(\w+)(?:\s*=\s*|\s+)(.*)", one.rest)):
            os.environ[found[1]] = found[2].strip()
        elif one.name == "run" and one.rest:
            self._command(Command(("python", *one.rest.split())))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target / source.name if target.is_dir() else target, dirs_exist_ok=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


@contextmanager
def _same_folder() -> Iterator[None]:
    """Restore the working directory: a shell line changes only its own."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _variables(command: Command) -> Iterator[None]:
    """Set the variables that precede a command, for a block."""
    before = {name: os.environ.get(name) for name in command.variables}
    os.environ.update(command.variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
