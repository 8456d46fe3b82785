"""The documentation runs: Python blocks are executed, `viviane` lines are parsed, links and generated tables hold."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from viviane.cli import main as command_line
from warm import Warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
# The only way out, on the line before a block; the reason is for the reader of the source.
NOT_RUN = re.compile(r"<!-- not run, needs (?:a GPU|Spark|TensorFlow): .+ -->\s*\Z")

RUNNER = """
import json, sys
namespace = {"__name__": "__main__"}
for file, line, source in json.loads(sys.argv.pop()):
    exec(compile("\\n" * line + source, file, "exec"), namespace)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str
    runs: bool


def blocks(page: Path, text: str | None = None) -> list[Block]:
    text = page.read_text() if text is None else text
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("body"))
        runs = not NOT_RUN.search(text[: match.start()])
        found.append(Block(page, line, match["language"], body, runs))
    return found


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=relative)
def test_python_blocks_run(page: Path, tmp_path: Path, warm: Warm) -> None:
    program = [(str(page), b.line, b.body) for b in blocks(page) if b.language == "python" and b.runs]
    done = warm.run(["-c", RUNNER, json.dumps(program)], cwd=tmp_path)
    assert done.returncode == 0, f"{relative(page)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def command_lines(body: str) -> list[list[str]]:
    """Return the words of each `viviane ...` line of a shell block; continued lines are joined."""
    lines = re.sub(r"\\\n\s*", " ", body).splitlines()
    words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines if "viviane" in line]
    return [line[1:] for line in words if line and line[0] == "viviane"]


def parse(words: list[str]) -> None:
    """Check the words against the real command line, without running anything."""
    while words and words[0] in ("-v", "--verbose"):
        words = words[1:]
    if not words or words[0] == "--help":
        return
    name, rest = words[0], words[1:]
    assert name in command_line.COMMANDS, f"no command {name!r}; there are {', '.join(command_line.COMMANDS)}"
    command = command_line.find_command(name)
    if (inner := getattr(command, "commands", None)) is not None:
        if not rest or rest[0] == "--help":
            return
        assert rest[0] in inner, f"viviane {name} has no command {rest[0]!r}; there are {', '.join(inner)}"
        name, command, rest = f"{name} {rest[0]}", inner[rest[0]], rest[1:]
    parameters = command.params
    options = {flag: p for p in parameters if p.param_type_name == "option" for flag in [*p.opts, *p.secondary_opts]}
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    given, positional = set(), 0
    while rest:
        word, *rest = rest
        if word in ("|", ">", "&&", "--help"):
            break
        if word.startswith("-") and len(word) > 1:
            flag, _, value = word.partition("=")
            assert flag in options, f"viviane {name} has no flag {flag}; it has {', '.join(sorted(options))}"
            given.add(options[flag].name)
            if not value and not getattr(options[flag], "is_flag", False):
                assert rest, f"viviane {name} {flag} needs a value"
                rest = rest[max(options[flag].nargs, 1) :]
        else:
            positional += 1
    needed = sum(argument.required for argument in arguments)
    most = float("inf") if any(argument.nargs == -1 for argument in arguments) else len(arguments)
    assert needed <= positional <= most, f"viviane {name} takes {needed} to {most} arguments, {positional} are given"
    missing = [p.opts[0] for p in options.values() if p.required and p.name not in given]
    assert not missing, f"viviane {name} needs {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("bash", "sh", "shell", "console", "text", ""):
            for words in command_lines(block.body):
                try:
                    parse(words)
                except AssertionError as error:
                    pytest.fail(f"{relative(page)}:{block.line + 1}: viviane {shlex.join(words)}\n{error}")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{relative(page)} links to {target}, which is not there"


def test_tables_of_figures_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_are_found_where_they_stand() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n- b\n\n    ```python\n    y = 2\n    ```\n"
    text += "\n<!-- not run, needs a GPU: it trains on two -->\n```python\nz = 3\n```\n"
    found = blocks(ROOT / "README.md", text)
    assert [block.body for block in found] == ["x = 1\n", "y = 2\n", "z = 3\n"]
    assert [block.line for block in found] == [3, 9, 14]
    assert [block.runs for block in found] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("viviane docter", "no command 'docter'"),
        ("viviane doctor --jsn", "has no flag --jsn"),
        ("viviane doctor here", "takes 0 to 0 arguments, 1 are given"),
        ("viviane checkpoint inspct a", "checkpoint has no command 'inspct'"),
        ("viviane checkpoint diff a", "checkpoint diff takes 2 to 2 arguments, 1 are given"),
    ],
)
def test_wrong_commands_are_refused(line: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        parse(command_lines(line)[0])


def test_continued_commands_are_joined() -> None:
    body = "pip install viviane\n$ viviane -v doctor \\\n    --json  # all of it\n"
    assert command_lines(body) == [["-v", "doctor", "--json"]]
    parse(command_lines(body)[0])


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    absent = [page for page in pages if page not in menu]
    assert not absent, f"add to the nav of mkdocs.yml: {', '.join(absent)}"
