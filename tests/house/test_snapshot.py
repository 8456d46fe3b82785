"""Public names, signatures, command-line flags and settings change on purpose: `make snapshot` accepts a change."""

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

import viviane
from viviane.cli import main as command_line
from viviane.config.base import Settings

FOLDER = Path(__file__).parent / "snapshots"
ACCEPT = bool(os.environ.get("VIVIANE_ACCEPT_SNAPSHOT"))


def all_modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(viviane.__path__, "viviane.")]
    return [viviane, *(importlib.import_module(name) for name in names)]


def signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def is_plain(kind: type) -> bool:
    """Whether a class is ours to describe by its signature; settings are described by their fields instead."""
    return not issubclass(kind, Settings) and not issubclass(kind, BaseException)


def describe(value: Any) -> Any:
    if inspect.isclass(value) and is_plain(value):
        members = {"()": signature(value)}
        for name, member in sorted(vars(value).items()):
            if name.startswith("_"):
                continue
            if isinstance(member, classmethod | staticmethod):
                members[name] = type(member).__name__ + " " + signature(member.__func__)
            elif inspect.isfunction(member) and member.__qualname__.startswith(f"{value.__qualname__}."):
                # Others were put there by a library: torch wraps an optimizer's inherited step on its first use.
                members[name] = signature(member)
            elif isinstance(member, property) or type(member).__name__ == "cached_property":
                members[name] = "property"
        return members
    if inspect.isclass(value):
        return "settings" if issubclass(value, Settings) else "error"
    return signature(value) if inspect.isroutine(value) else type(value).__name__


def public_names() -> dict[str, Any]:
    rooms = [module for module in all_modules() if module is viviane or hasattr(module, "__path__")]
    return {
        room.__name__: {name: describe(getattr(room, name)) for name in sorted(getattr(room, "__all__", ()))}
        for room in rooms
    }


def command_line_flags() -> dict[str, Any]:
    commands = {}
    for name in command_line.COMMANDS:
        command = command_line.find_command(name)
        inner = getattr(command, "commands", None)  # of a group
        for words, one in {name: command}.items() if inner is None else [(f"{name} {x}", inner[x]) for x in inner]:
            flags: dict[str, Any] = {}
            for parameter in one.params:
                names = [*parameter.opts, *parameter.secondary_opts]
                flags[" ".join(names)] = "required" if parameter.required else repr(parameter.default)
            commands[words] = flags
    return commands


def settings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in all_modules():
        for name, value in vars(module).items():
            ours = inspect.isclass(value) and issubclass(value, Settings) and value.__module__ == module.__name__
            if ours and not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = {
                    (field.alias or key): default_of(field) for key, field in value.model_fields.items()
                }
    return found


def default_of(field: Any) -> str:
    if field.default_factory is not None:
        return f"{field.default_factory.__name__}()"
    return "required" if field.default is PydanticUndefined else repr(field.default)


def check(name: str, current: dict[str, Any]) -> None:
    path = FOLDER / f"{name}.json"
    text = json.dumps(current, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if ACCEPT:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    kept = path.read_text() if path.exists() else ""
    if kept == text:
        return
    difference = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm="", n=1)
    pytest.fail(
        f"the public {name} changed. If that is meant, run `make snapshot`, commit {path.name} and add a line to "
        "CHANGELOG.md:\n" + "\n".join(difference),
        pytrace=False,
    )


def test_public_names() -> None:
    check("names", public_names())


def test_command_line_flags() -> None:
    check("flags", command_line_flags())


def test_settings() -> None:
    check("settings", settings())


def test_a_change_is_shown_as_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.FOLDER", tmp_path)
    monkeypatch.setattr(f"{__name__}.ACCEPT", False)
    (tmp_path / "flags.json").write_text('{\n "train": {\n  "--lr": "0.1"\n }\n}\n')
    with pytest.raises(pytest.fail.Exception, match=r'(?s)run `make snapshot`.*-  "--lr": "0.1"\n\+  "--lr": "0.2"'):
        check("flags", {"train": {"--lr": "0.2"}})


def test_a_description_names_what_callers_depend_on() -> None:
    @dataclasses.dataclass
    class Point:
        x: int
        y: int = 2

        def move(self, by: int = 1) -> None: ...

        @property
        def far(self) -> bool: ...

    assert describe(Point)["()"].startswith("(x: int, y: int = 2)")
    assert describe(Point)["move"] == "(self, by: int = 1) -> None"
    assert describe(Point)["far"] == "property"
