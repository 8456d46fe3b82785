"""Programs inside notebooks: cells that begin with %%writefile, written beside each other."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viviane.config.base import load_json
from viviane.core.errors import ConfigError, suggest


@dataclass(frozen=True)
class Written:
    """What one cell writes: a file, its text, and whether it is added to what is there."""

    name: str
    text: str
    append: bool


def written_files(notebook: str | Path) -> list[Written]:
    """Return what the cells of a notebook write, in order.

    Raises:
        ConfigError: the file is no notebook.
    """
    content = load_json(notebook)
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ConfigError("the file is no notebook", where=str(notebook))
    found = []
    for cell in content["cells"]:
        text = _text(cell.get("source", ""))
        first, _, rest = text.lstrip("\n").partition("\n")
        words = first.split()
        if cell.get("cell_type") == "code" and words[:1] == ["%%writefile"] and len(words) > 1:
            found.append(Written(words[-1].strip("\"'"), rest, "-a" in words or "--append" in words))
    return found


def extract(notebook: str | Path, folder: Path, program: str | None = None) -> list[Path]:
    """Write the files of a notebook into a folder, and return those that import hugectr, in order.

    Args:
        notebook: the file.
        folder: where relative names go.
        program: return this one alone.

    Raises:
        ConfigError: no cell writes a program, or not the one that is asked for.
    """
    programs: dict[str, Path] = {}
    for one in written_files(notebook):
        path = folder / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (path.read_text(encoding="utf-8") if one.append and path.exists() else "") + one.text
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".py" and _imports_hugectr(text):
            programs[one.name] = path
    if not programs:
        raise ConfigError("no cell writes a program that imports hugectr", where=str(notebook),
                          fix="%%writefile program.py in the first line of a cell")  # fmt: skip
    if program is None:
        return list(programs.values())
    chosen = {name: path for name, path in programs.items() if program in (name, Path(name).name)}
    if not chosen:
        raise ConfigError("no cell writes this program", where=str(notebook), value=program,
                          fix=suggest(program, programs))  # fmt: skip
    return list(chosen.values())


def _text(source: Any) -> str:
    return source if isinstance(source, str) else "".join(source)


def _imports_hugectr(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if any(name.split(".")[0] == "hugectr" for name in names):
            return True
    return False
