"""The shell lines of notebooks: the commands that run here, and the output of those that change nothing."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Final, TextIO, cast

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.notebook import Command, unmarked
from viviane.core.errors import ConfigError

_QUIET: Final = ("ls", "cat", "head", "tail", "echo", "pwd", "nvidia-smi", "wc", "tree", "which", "sleep", "date")
"""Commands that only print something: skipped without a note."""
READING: Final = (
    *_QUIET, "basename", "cut", "df", "dirname", "du", "env", "free", "grep", "hostname", "lscpu", "nproc", "printenv",
    "printf", "realpath", "seq", "sort", "stat", "tr", "uname", "uniq", "whoami", "zcat",
)  # fmt: skip
"""Commands that change nothing: run if a cell uses their output."""


class OutputLines(list[str]):
    """The lines that a command printed, with IPython's attributes: `l` and `list`, `n`, `s`."""

    @property
    def n(self) -> str:
        """The lines, each on its own."""
        return "\n".join(self)

    @property
    def s(self) -> str:
        """The lines, separated by spaces."""
        return " ".join(self)

    @property
    def l(self) -> list[str]:  # noqa: E743 - IPython's name
        """The lines."""
        return list(self)


def names_program(words: Sequence[str]) -> bool:
    """Return whether a command names a Python program after an interpreter."""
    starts = [i for i, word in enumerate(words) if re.fullmatch(r"python[\d.]*", Path(word).name)]
    rest = words[starts[0] + 1 :] if starts else ()
    return any(word.endswith(".py") for word in rest) and not {"-c", "-m"} & set(rest[:3])


def run_command(command: Command, notebook: str) -> None:
    """Run a command of a shell line that is no Python program: `cd`, `cp`, `export`, `mkdir`, an assignment.

    Others are not run: those that change something are named in a note.
    """
    words = command.words or ("export", *(f"{name}={value}" for name, value in command.variables.items()))
    if words[0] == "cd" and len(words) == 2:
        change_folder(words[1], notebook)
    elif words[0] == "export":
        pairs = (word.partition("=") for word in words[1:] if "=" in word)
        os.environ.update({name: os.path.expandvars(value) for name, _, value in pairs})
    elif words[0] == "mkdir":
        for folder in paths_of(command):
            folder.mkdir(parents=True, exist_ok=True)
    elif words[0] == "cp" and len(paths_of(command)) > 1:
        *sources, target = paths_of(command)
        for source in sources:
            if source.exists():
                _copy(source, target / source.name if len(sources) > 1 else target)
            else:
                say(f"Warning: {notebook}: {source} does not exist and was not copied")
    elif words[0] not in _QUIET:
        say(f"Note: {notebook}: not run: {' '.join(words)}")


def change_folder(folder: str, where: str) -> None:
    """Change the working directory.

    Raises:
        ConfigError: there is no such folder.
    """
    path = Path(os.path.expandvars(folder)).expanduser()
    if not path.is_dir():
        raise ConfigError("no such folder", where=f"{where}, cd", value=str(path))
    os.chdir(path)


def output_of(text: str, where: str) -> OutputLines:
    """Return the lines that a shell line prints; `python` is the interpreter of this process."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        done = subprocess.run(["/bin/sh", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                              env={**os.environ, "PATH": path})  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError("a shell line did not run", where=where, value=text) from error
    return OutputLines(done.stdout.decode("utf-8", "replace").splitlines())


def expanded_words(marked: Sequence[str]) -> list[str]:
    """Return the marked words of a command with environment variables, and the files that patterns match."""
    found: list[str] = []
    for word in marked:
        value = os.path.expandvars(word)
        if value.startswith("~"):
            value = str(Path(value).expanduser())
        files: list[Path] = []
        if re.search(r"[*?[]", value):
            path = Path(value)
            files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        found += [str(one) for one in files] or [unmarked(value)]
    return found


def paths_of(command: Command) -> list[Path]:
    """Return the paths that a command names, without its options."""
    return [Path(word) for word in expanded_words([one for one in command.marked[1:] if not one.startswith("-")])]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target / source.name if target.is_dir() else target, dirs_exist_ok=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


@contextmanager
def same_shell() -> Iterator[None]:
    """Restore the working directory and the variables: shell lines change only their own."""
    before, variables = Path.cwd(), dict(os.environ)
    try:
        yield
    finally:
        os.chdir(before)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def reads(command: Command) -> bool:
    """Return whether a command changes nothing but the file that its output is redirected to."""
    return bool(command.words) and command.program() is None and Path(command.words[0]).name in READING


@contextmanager
def output_kept(command: Command) -> Iterator[None]:
    """Write what Python prints in a block to the file that a command's output is redirected to, if there is one."""
    if command.output is None:
        yield
        return
    name, how = command.output
    path = Path(os.path.expandvars(name)).expanduser()
    with path.open("a" if how in (">>", "tee -a") else "w", encoding="utf-8") as file:
        shown: TextIO = cast(TextIO, _Copies(file, sys.stdout)) if how.startswith("tee") else file
        with redirect_stdout(shown):
            yield


class _Copies(io.TextIOBase):
    """A stream that writes to several others."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        """Write a text to all."""
        for one in self._streams:
            one.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush all that are open: the collector flushes this stream once more, after the block that closed a file."""
        for one in self._streams:
            if not one.closed:
                one.flush()


@contextmanager
def variables_of(command: Command) -> Iterator[None]:
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
