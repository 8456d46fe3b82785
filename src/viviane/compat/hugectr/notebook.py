"""Parsing of notebooks into steps: files that cells write, programs that shell lines run, and plain cells.

A cell is Python with IPython's lines in it: `!command` and `%magic`. A cell whose first line is a cell magic
(`%%writefile`, `%%bash`) contains only that.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from viviane.config.base import load_json
from viviane.core.errors import ConfigError, suggest
from viviane.core.json_files import expected_form


@dataclass(frozen=True)
class Written:
    """The file that a cell writes, its text, and whether it is appended."""

    name: str
    text: str
    append: bool


@dataclass(frozen=True)
class Line:
    """A shell line of a cell."""

    text: str


@dataclass(frozen=True)
class Magic:
    """A line magic: its name and arguments."""

    name: str
    rest: str


@dataclass(frozen=True)
class Source:
    """Python code of a cell, with the number of the cell."""

    cell: int
    text: str


Step: TypeAlias = Written | Line | Magic | Source
_SHELLS: Final = ("%%bash", "%%sh", "%%script")
_IGNORED: Final = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics that do not affect what the cell does."""
_SHELL_LINE: Final = re.compile(r"^\s*(?:\w+\s*=\s*)?!(.*)$")
_MAGIC_LINE: Final = re.compile(r"^\s*%(\w+)\s*(.*)$")


@dataclass(frozen=True)
class Command:
    """One command of a shell line.

    Args:
        words: the command and its arguments, without redirections.
        variables: environment variables that precede it.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def program(self) -> tuple[str, list[str]] | None:
        """Return the Python file that it runs, and its arguments; None if it runs something else.

        Example:
            >>> Command(("mpirun", "-np", "2", "python3", "-u", "train.py", "--lr", "3")).program()
            ('train.py', ['--lr', '3'])
        """
        names = [Path(word).name for word in self.words]
        starts = [i for i, name in enumerate(names) if re.fullmatch(r"python[\d.]*", name)]
        if not starts or (starts[0] and names[0] not in _LAUNCHERS):
            return None
        rest = list(self.words[starts[0] + 1 :])
        while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
            rest.pop(0)
        return (rest[0], rest[1:]) if rest and rest[0].endswith(".py") else None


_LAUNCHERS: Final = ("mpirun", "mpiexec", "horovodrun", "nsys", "numactl", "time", "nohup", "env", "sudo", "taskset")
_REDIRECTIONS: Final = ("<", ">", ">>", ">&", "&>", "<<", ">|")
_SEPARATORS: Final = (";", "&&", "||", "|", "&", "|&")


def steps_of(notebook: str | Path) -> list[Step]:
    """Return the steps of a notebook's code cells, in order.

    Raises:
        ConfigError: the file is not a notebook.
    """
    content = load_json(notebook)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ConfigError("the file is not a notebook", where=str(notebook))
    found: list[Step] = []
    for number, cell in enumerate(cells):
        if cell.get("cell_type") == "code":
            with expected_form(f"{notebook}, cell {number}"):
                found += _steps_of_cell(number, _text(cell.get("source", "")))
    return found


def _steps_of_cell(number: int, text: str) -> Iterator[Step]:
    first, _, rest = text.lstrip("\n").partition("\n")
    words = first.split()
    if words[:1] == ["%%writefile"]:
        if len(words) > 1:
            yield Written(words[-1].strip("\"'"), rest, "-a" in words or "--append" in words)
        return
    if words[:1] and words[0] in _SHELLS:
        yield from (Line(line) for line in rest.replace("\\\n", " ").splitlines() if line.strip())
        return
    if words[:1] and words[0].startswith("%%"):
        if words[0] in _IGNORED:
            yield from _steps_of_cell(number, rest)
        return
    plain: list[str] = []
    for line in re.sub(r"(?m)^(\s*!.*)\\\n", r"\1 ", text).splitlines():
        shell, magic = _SHELL_LINE.match(line), _MAGIC_LINE.match(line)
        if shell is None and magic is None:
            plain.append(line)
            continue
        if plain:
            yield Source(number, "\n".join(plain))
            plain = []
        yield Line(shell[1].strip()) if shell else Magic(magic[1], magic[2].strip())  # type: ignore[index]
    if any(line.strip() for line in plain):
        yield Source(number, "\n".join(plain))


def commands_of(line: str, names: Mapping[str, Any]) -> list[Command]:
    """Return the commands of a shell line; `{name}` and `$name` refer to Python's or the environment's variables.

    Shell syntax (pipes, redirections, loops) is ignored.

    Example:
        >>> [one.words for one in commands_of("cd {d} && python3 a.py --x $n > log 2>&1", {"d": "x", "n": 3})]
        [('cd', 'x'), ('python3', 'a.py', '--x', '3')]
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return str(names[name]) if name in names else match[0]

    text = re.sub(r"\{(\w+)\}|(?<!\\)\$\{?(\w+)\}?", value, line)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        tokens = list(lexer)
    except ValueError:  # an unterminated quotation
        return []
    result, words, skip = [], list[str](), False
    for token in [*tokens, ";"]:
        if skip:
            skip = False
        elif token in _SEPARATORS:
            result += [words] if words else []
            words = []
        elif token in _REDIRECTIONS:
            skip = True
            if words and words[-1] in ("1", "2"):
                words.pop()
        else:
            words.append(token)
    return [_command(one) for one in result]


def _command(words: Sequence[str]) -> Command:
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0]):
        name, _, text = rest.pop(0).partition("=")
        variables[name] = text
    return Command(tuple(rest), variables)


def write(one: Written, folder: Path) -> Path:
    """Write the file of a cell to a folder."""
    path = folder / one.name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (path.read_text(encoding="utf-8") if one.append and path.exists() else "") + one.text
    path.write_text(text, encoding="utf-8")
    return path


def programs_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the programs written by cells that import hugectr: their text by name, in order."""
    texts: dict[str, str] = {}
    for one in steps:
        if isinstance(one, Written) and one.name.endswith(".py"):
            texts[one.name] = texts.get(one.name, "") * one.append + one.text
    return {name: text for name, text in texts.items() if imports_hugectr(text)}


def chosen_program(steps: Sequence[Step], program: str, notebook: str | Path) -> str:
    """Return the name of a program that a notebook writes.

    Raises:
        ConfigError: no cell writes it.
    """
    programs = programs_of(steps)
    found = [name for name in programs if program in (name, Path(name).name)]
    if not found:
        raise ConfigError("no cell writes this program", where=str(notebook), value=program,
                          fix=suggest(program, programs))  # fmt: skip
    return found[0]


def imports_hugectr(text: str) -> bool:
    """Return whether Python code imports hugectr or one of its modules; False for other text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(name.split(".")[0] == "hugectr" for name in names):
            return True
    return False


def _text(source: Any) -> str:
    if isinstance(source, str):
        return source
    return "".join(str(part) for part in source) if isinstance(source, list) else ""
