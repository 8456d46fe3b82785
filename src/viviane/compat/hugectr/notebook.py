"""Parsing of notebooks into steps: files that cells write, programs that shell lines run, and plain cells.

A cell is Python with IPython's lines in it: `!command` and `%magic`. They are steps of their own, except in a block or
an assignment (`x = !command`), where they become calls, see `SHELL` and `MAGIC`. A cell whose first line is a cell
magic (`%%writefile`, `%%bash`) contains only that.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Shell lines that one shell runs, with the number of their cell."""

    text: str
    cell: int = 0


@dataclass(frozen=True)
class Magic:
    """A line magic, or a cell magic with its "%%": name, arguments, number of the cell."""

    name: str
    rest: str
    cell: int = 0


@dataclass(frozen=True)
class Source:
    """Python code of a cell, with the number of the cell."""

    cell: int
    text: str


Step: TypeAlias = Written | Line | Magic | Source
_SHELLS: Final = ("%%bash", "%%sh", "%%script")
_IGNORED: Final = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics that do not affect what the cell does."""
_SHOWN: Final = ("%%html", "%%HTML", "%%javascript", "%%js", "%%latex", "%%markdown", "%%svg", "%%SVG")
"""Cell magics whose text is only shown."""
TIMING: Final = ("time", "timeit", "prun")
"""Line magics that run the statement after them."""
SHELL: Final = "viviane_shell_line"
"""Name of the function that runs a shell line: text, cell, whether the lines of its output are returned."""
MAGIC: Final = "viviane_magic_line"
"""Name of the function that runs a line magic: name, arguments, cell."""
_NAME: Final = r"[\w.]+(?:\[[^\]]*\])?"
_TARGET: Final = rf"^(\s*)({_NAME}(?:\s*,\s*{_NAME})*\s*,?\s*=\s*)?"
_SHELL_LINE: Final = re.compile(_TARGET + r"!!?(.*)$")
_MAGIC_LINE: Final = re.compile(_TARGET + r"%(\w+)\s*(.*)$")
_TIMING_OPTIONS: Final = re.compile(r"^(-[nrtpoqcv]+ ?[0-9]* +)+")
_HELP_LINE: Final = re.compile(r"^\s*(?:\?{1,2}\s*[\w.]+|[%\w.]+\s*\?{1,2})\s*$")


@dataclass(frozen=True)
class Command:
    """One command of a shell line.

    Args:
        words: the command and its arguments, without redirections.
        variables: environment variables that precede it.
        marked: the words, with marks in place of the special characters in quotation marks, see `unmarked`.
        output: the file that gets what it prints, and how: ">", ">>", "tee", "tee -a"; None: it is only shown.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    marked: tuple[str, ...] = ()
    output: tuple[str, str] | None = None

    def program(self) -> tuple[str, list[str]] | None:
        """Return the Python file that it runs, and its arguments; None if it runs something else.

        Of `huge_ctr --train config.json`, HugeCTR's program up to 3.2, it is the JSON file.

        Example:
            >>> Command(("mpirun", "-np", "2", "python3", "-u", "train.py", "--lr", "3")).program()
            ('train.py', ['--lr', '3'])
        """
        names = [Path(word).name for word in self.words]
        if "huge_ctr" in names and "--train" in self.words[:-1]:
            return self.words[self.words.index("--train") + 1], []
        starts = [i for i, name in enumerate(names) if re.fullmatch(r"python[\d.]*", name)]
        if not starts or (starts[0] and names[0] not in _LAUNCHERS):
            return None
        rest = list(self.words[starts[0] + 1 :])
        while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
            rest.pop(0)
        return (rest[0], rest[1:]) if rest and rest[0].endswith(".py") else None


_LAUNCHERS: Final = ("mpirun", "mpiexec", "horovodrun", "nsys", "numactl", "time", "nohup", "env", "sudo", "taskset")
_REDIRECTIONS: Final = ("<", ">", ">>", ">&", "&>", "<<", ">|", "&>>")
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
    if words[:1] in (["%%writefile"], ["%%file"]):
        if len(words) > 1:
            yield Written(words[-1].strip("\"'"), rest, "-a" in words or "--append" in words)
    elif words[:1] and words[0] in _SHELLS:
        yield Line(rest.replace("\\\n", " "), number)
    elif words[:1] and words[0].startswith("%%"):
        if words[0] == "%%capture" and any(not word.startswith("-") for word in words[1:]):
            yield Magic(words[0], " ".join(words[1:]), number)  # assigns the output to a variable
        elif words[0] in _IGNORED:
            yield from _steps_of_cell(number, rest)
        elif words[0] not in _SHOWN:
            yield Magic(words[0], " ".join(words[1:]), number)
    else:
        yield from _steps_of_python(number, re.sub(r"(?m)^(\s*!.*)\\\n", r"\1 ", text))


def _steps_of_python(number: int, text: str) -> Iterator[Step]:
    plain: list[str] = []
    for line in text.splitlines():
        step = None if _is_open("\n".join(plain)) else _special(number, line)
        if step is None or isinstance(step, str):
            plain.append(line if step is None else step)
            continue
        if any(one.strip() for one in plain):
            yield Source(number, "\n".join(plain))
        plain = []
        yield step
    if any(line.strip() for line in plain):
        yield Source(number, "\n".join(plain))


def _special(number: int, line: str) -> Step | str | None:
    """Return the step of one of IPython's lines, the Python that replaces it in a block, or None for other lines."""
    if shell := _SHELL_LINE.match(line):
        indent, target, text = shell[1], shell[2] or "", shell[3].strip()
        call = f"{indent}{target}{SHELL}({text!r}, {number}, {bool(target)})"
        return call if indent or target else Line(text, number)
    if magic := _MAGIC_LINE.match(line):
        indent, target, name, rest = magic[1], magic[2] or "", magic[3], magic[4].strip()
        if name in TIMING:
            return f"{indent}{target}{_TIMING_OPTIONS.sub('', rest) or 'pass'}"
        call = f"{indent}{target}{MAGIC}({name!r}, {rest!r}, {number})"
        return call if indent or target else Magic(name, rest, number)
    return re.sub(r"\S.*", "pass", line) if _HELP_LINE.match(line) else None


def _is_open(text: str) -> bool:
    """Return whether a string, a bracket or a continued line of Python code does not end in the text."""
    if text.endswith("\\"):
        return True
    try:
        for _ in tokenize.generate_tokens(io.StringIO(text).readline):
            pass
    except tokenize.TokenError as error:
        return "EOF in multi-line" in str(error)
    except SyntaxError:
        return False
    return False


def commands_of(line: str, names: Mapping[str, Any]) -> list[Command]:
    """Return the commands of shell lines; `{expression}` and `$name` refer to Python's or the environment's variables.

    Of shell syntax the redirection of a command's output to a file is kept, `tee` included; the rest is ignored.

    Example:
        >>> [one.words for one in commands_of("cd {d} && python3 a.py --x $n > log 2>&1", {"d": "x", "n": 3})]
        [('cd', 'x'), ('python3', 'a.py', '--x', '3')]
    """
    return [command for text in expanded(line, names).splitlines() for command in _commands_of_line(text)]


def expanded(line: str, names: Mapping[str, Any]) -> str:
    """Return a shell line with the values of Python's variables; what is no variable or expression stays.

    Example:
        >>> expanded("ls {d + '/x'} $d {print}", {"d": "data"})
        'ls data/x data {print}'
    """

    def value(match: re.Match[str]) -> str:
        if match[2] is not None:
            return str(names[match[2]]) if match[2] in names else match[0]
        if match[1] in names:
            return str(names[match[1]])
        try:
            found = eval(match[1], {"__builtins__": _FUNCTIONS}, dict(names))
        except Exception:
            return match[0]
        return match[0] if callable(found) or found is Ellipsis else str(found)

    return re.sub(r"(?<!\$)\{([^{}]+)\}|(?<!\\)\$\{?(\w+)\}?", value, line)


_FUNCTIONS: Final = {one.__name__: one for one in (str, int, float, len, min, max, abs, round, sum, sorted, range)}


def _commands_of_line(text: str) -> list[Command]:
    marked = _MARKED.sub(_with_marks, text)
    lexer = shlex.shlex(marked, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        tokens = list(lexer)
    except ValueError:  # an unterminated quotation
        return []
    result, words, before = list[Command](), list[str](), ";"
    redirection, output = "", None
    for token in [*tokens, ";"]:
        if redirection:
            if redirection in (">", ">>", "&>", "&>>", ">|") or (redirection == ">&" and not token.isdigit()):
                output = (unmarked(token), ">>" if ">>" in redirection else ">")
            redirection = ""
        elif token in _SEPARATORS:
            if words and before in ("|", "|&") and words[0] == "tee" and result:
                result[-1] = replace(result[-1], output=(unmarked(words[-1]), "tee -a" if "-a" in words else "tee"))
            elif words:
                result.append(replace(_command(words), output=output))
            words, output, before = [], None, token
        elif token in _REDIRECTIONS:
            number = words.pop() if words and words[-1] in _STREAMS else _STREAMS[0]
            redirection = token if number == _STREAMS[0] else "2" + token
        else:
            words.append(token)
    return result


def _command(marked: Sequence[str]) -> Command:
    variables: dict[str, str] = {}
    rest = list(marked)
    while rest and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = unmarked(value)
    return Command(tuple(unmarked(word) for word in rest), variables, tuple(rest))


_MARKED: Final = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?<!\S)[12](?=>)")
"""What is in quotation marks, and the numbers of streams before a redirection."""
_STREAMS: Final = ("\ue101", "\ue102")
"""The marks of the numbers 1 and 2 of streams; other numbers are arguments."""
_MARKS: Final = {ord(one): 0xE000 + place for place, one in enumerate("*?[~$")}
_MARKS_OF_TEXT: Final = {one: mark for one, mark in _MARKS.items() if one != ord("$")}
_BACK: Final = {mark: one for one, mark in _MARKS.items()}


def _with_marks(found: re.Match[str]) -> str:
    if found[0] in ("1", "2"):
        return _STREAMS[int(found[0]) - 1]
    return found[0].translate(_MARKS if found[0][0] == "'" else _MARKS_OF_TEXT)


def unmarked(word: str) -> str:
    """Return a word with its special characters in place of the marks."""
    return word.translate(_BACK)


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


_PACKAGES: Final = ("hugectr", "hugectr2onnx", "hierarchical_parameter_server", "hps_torch")


def imports_hugectr(text: str) -> bool:
    """Return whether Python code imports hugectr, one of its modules or of its packages; False for other text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(name.split(".")[0] in _PACKAGES for name in names):
            return True
    return False


def _text(source: Any) -> str:
    if isinstance(source, str):
        return source
    return "".join(str(part) for part in source) if isinstance(source, list) else ""
