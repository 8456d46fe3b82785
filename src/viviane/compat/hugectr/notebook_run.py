"""Run a notebook: its programs, the shell lines that run Python, and its plain cells.

A notebook runs completely if a shell line runs a program or a plain cell imports hugectr: plain cells and shell lines
in order, as "Run All" would. Otherwise the programs that its cells write run, one after the other.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.notebook import (
    MAGIC,
    SHELL,
    Command,
    Line,
    Magic,
    Source,
    Step,
    Written,
    chosen_program,
    commands_of,
    expanded,
    imports_hugectr,
    programs_of,
    steps_of,
    write,
)
from viviane.compat.hugectr.notebook_shell import (
    READING,
    OutputLines,
    change_folder,
    expanded_words,
    names_program,
    output_kept,
    output_of,
    reads,
    run_command,
    same_shell,
    variables_of,
)
from viviane.core.errors import ConfigError

RunFile: TypeAlias = Callable[[Path, Sequence[str]], None]
RunCell: TypeAlias = Callable[[str, str, dict[str, Any]], None]
_WITHOUT_EFFECT: Final = (
    "alias", "autoreload", "autosave", "cat", "colors", "config", "conda", "dhist", "head", "history", "less",
    "load_ext", "ls", "ll", "lsmagic", "matplotlib", "more", "pdb", "pip", "precision", "pwd", "reload_ext",
    "unload_ext", "uv", "who", "who_ls", "whos", "xmode",
)  # fmt: skip
"""Line magics that show something, set the display or install packages: skipped."""
_RUN_MAGICS: Final = ("cd", "cp", "env", "mkdir", "run", "set_env", "sx", "system")
_VALUE_MAGICS: Final = ("env", "pwd", "sx", "system")
"""Line magics whose value a cell may assign."""


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
        self.variables: dict[str, Any] = {"__name__": "__main__", "display": print}
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
        if as_a_whole:
            for one in self.steps:
                self._check(one)
            self.variables |= {SHELL: self._shell_call, MAGIC: self._magic_call}
        for place, one in enumerate(self.steps):
            if isinstance(one, Written):
                path = write(replace(one, name=expanded(one.name, self.variables)), Path.cwd())
                if self.last_cells.get(one.name) == place:
                    say(f"{self.notebook.name}: {path.name}")
                    self.run_file(path, self.args)
            elif as_a_whole:
                self._step(one)

    def _check(self, one: Step) -> None:
        """Refuse, before anything runs, a step that cannot run as in Jupyter."""
        if isinstance(one, Magic):
            self._check_magic(one.name, one.rest, one.cell, _RUN_MAGICS)
        elif isinstance(one, Line):
            for command in commands_of(one.text, {}):
                words = command.words
                if command.program() is None and names_program(words):
                    raise ConfigError("a shell line runs a program in a way that is not supported",
                                      where=self._where(one.cell), value=" ".join(words),
                                      fix="write `!python program.py arguments`, one line per run")  # fmt: skip
        elif isinstance(one, Source):
            for name, values in calls_of(one.text):
                if name == SHELL and values[2]:
                    self._check_reading(values[0], values[1])
                elif name == MAGIC:
                    self._check_magic(values[0], values[1], values[2], (*_RUN_MAGICS, *_VALUE_MAGICS))

    def _check_magic(self, name: str, rest: str, cell: int, known: Sequence[str]) -> None:
        if name not in known and name not in _WITHOUT_EFFECT:
            mark = "" if name.startswith("%%") else "%"
            raise ConfigError("a magic of IPython is not supported", where=self._where(cell),
                              value=f"{mark}{name} {rest}".strip(),
                              allowed="%%writefile, %%bash, %%time, " + ", ".join(f"%{one}" for one in _RUN_MAGICS),
                              fix="remove it from the notebook, or write what it does in Python")  # fmt: skip
        if name in ("sx", "system"):
            self._check_reading(rest, cell)

    def _check_reading(self, text: str, cell: int) -> None:
        for command in commands_of(text, {}):
            name = Path(command.words[0]).name if command.words else ""
            is_python = command.program() is not None or re.fullmatch(r"python[\d.]*", name)
            if "$(" in text or "`" in text or not (name in READING or is_python):
                raise ConfigError("a cell uses the output of a command that may change something",
                                  where=self._where(cell), value=text, allowed=f"python, {', '.join(READING)}",
                                  fix="run it in a shell first, and assign what it printed")  # fmt: skip

    def _where(self, cell: int) -> str:
        return f"{self.notebook.name}, cell {cell}"

    def _step(self, one: Step) -> None:
        if isinstance(one, Source):
            self._cell(one)
        elif isinstance(one, Line):
            self._shell_call(one.text, one.cell, False)
        elif isinstance(one, Magic):
            self._magic_call(one.name, one.rest, one.cell)

    def _shell_call(self, text: str, cell: int, returns: bool) -> OutputLines | None:
        """Run shell lines; with `returns` return what they print, as IPython's `x = !command` does."""
        if returns:
            return output_of(expanded(text, self.variables), self._where(cell))
        with same_shell():
            for line in text.splitlines():
                commands = commands_of(line, self.variables)
                if any(one.output for one in commands) and all(reads(one) for one in commands):
                    output_of(expanded(line, self.variables), self._where(cell))
                    continue
                for command in commands:
                    self._command(command)
        return None

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
        found = command.program()
        if found is not None:
            path, args = (
                Path(os.path.expandvars(found[0])),
                expanded_words(command.marked[len(command.marked) - len(found[1]) :]),
            )
            if not path.is_file():
                say(f"Warning: {self.notebook.name}: {path} does not exist and was not run")
                return
            say(f"{self.notebook.name}: {' '.join([str(path), *args])}")
            with variables_of(command), output_kept(command):
                try:
                    self.run_file(path, args)
                except ModuleNotFoundError as error:
                    say(f"Warning: {path} did not run: it needs {error.name}, which is not installed")
        else:
            run_command(command, self.notebook.name)

    def _magic_call(self, name: str, rest: str, cell: int) -> Any:
        """Run a line magic, and return its value if it has one."""
        rest = expanded(rest, self.variables)
        if name == "cd" and rest:
            change_folder(rest.strip("\"'"), self._where(cell))
        elif name == "pwd":
            return str(Path.cwd())
        elif name == "env" and re.fullmatch(r"\w+", rest):
            return os.environ.get(rest, "")
        elif name in ("env", "set_env") and (found := re.match(r"(\w+)(?:\s*=\s*|\s+)(.*)", rest)):
            os.environ[found[1]] = found[2].strip()
        elif name == "run" and rest:
            for command in commands_of(f"python {rest}", {}):
                self._command(command)
        elif name in ("sx", "system"):
            return self._shell_call(rest, cell, True)
        elif name in ("cp", "mkdir"):
            for command in commands_of(f"{name} {rest}", {}):
                self._command(command)
        return None


def calls_of(text: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the calls that replace IPython's lines in a cell: the function's name and arguments."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # running the cell says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (SHELL, MAGIC):
            yield node.func.id, tuple(ast.literal_eval(one) for one in node.args)
