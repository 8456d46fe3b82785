"""Settings in YAML, read as strictly as JSON: the core schema of YAML 1.2, without tags, aliases or repeated keys."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Final

from viviane.core.errors import ConfigError, ConfigNotFoundError
from viviane.core.json_files import parse_json
from viviane.core.locations import AnyPath, location
from viviane.core.optional import require

SUFFIXES: Final = (".yaml", ".yml")
_MAX_BYTES: Final = 16 << 20
# YAML 1.2's scalars: unlike in YAML 1.1, `no` and `12:30` are texts and `1e-3` is a number.
_SCALARS: Final = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"^[-+]?[0-9]+$"), "-+0123456789"),
    ("float", re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"), "-+.0123456789"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
)


def is_yaml(path: str | AnyPath) -> bool:
    """Return whether a file's name says that it is YAML.

    Example:
        >>> is_yaml("train.yml"), is_yaml("train.json")
        (True, False)
    """
    return str(path).lower().endswith(SUFFIXES)


def read_yaml(path: str | AnyPath) -> Any:
    """Read one YAML document of plain data: what JSON can hold, within the same limits.

    Raises:
        ConfigNotFoundError: no such file. MissingLibraryError: PyYAML is not installed.
        ConfigError: the file is not YAML, or uses tags, anchors, repeated keys or several documents.
    """
    place = location(path)
    try:
        with place.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigNotFoundError("no such file", where=str(path)) from None
    except OSError as problem:
        raise ConfigError("cannot read the YAML file", where=str(path), value=str(problem)) from problem
    if len(data) > _MAX_BYTES:
        raise ConfigError("the YAML file is too large", where=str(path), allowed=f"{_MAX_BYTES:,} bytes")
    return parse_yaml(data, where=str(path))


def parse_yaml(data: str | bytes, *, where: str) -> Any:
    """Return the plain data of a YAML document; errors as for `read_yaml`.

    Example:
        >>> parse_yaml("solver: {lr: 1e-3, epochs: 2}\\nname: no", where="train.yaml")
        {'solver': {'lr': 0.001, 'epochs': 2}, 'name': 'no'}
    """
    yaml = require("yaml", extra="yaml", purpose="settings in YAML")
    try:
        plain = yaml.load(data, Loader=_loader(yaml))  # a loader that makes plain data only
        # The limits of JSON hold for both: depth, whole numbers of 64 bits, no NaN.
        return parse_json(json.dumps(plain, allow_nan=False), where=where)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError("not plain YAML", where=place, value=problem) from None
    except ConfigError:  # a limit of JSON, already explained
        raise
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError("not plain YAML", where=where, value=str(error).splitlines()[0]) from None


def yaml_text(data: Any) -> str:
    """Return plain data as a YAML document that `parse_yaml` and readers of YAML 1.1 understand alike.

    Raises:
        MissingLibraryError: PyYAML is not installed.

    Example:
        >>> print(yaml_text({"name": "no", "columns": [{"name": "site", "list": False}]}), end="")
        name: 'no'
        columns:
        - name: site
          list: false
    """
    yaml = require("yaml", extra="yaml", purpose="settings in YAML")

    return str(yaml.dump(data, Dumper=_dumper(yaml), sort_keys=False, allow_unicode=True, width=120))


def _dumper(yaml: Any) -> Any:
    """Return a dumper class of plain data."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> Any:
            style = None if data.isprintable() else '"'  # escaped: other quotes would fold ends of lines
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, Dumper.represent_str)

    for name, pattern, first in _SCALARS:  # quotes texts that are other scalars in YAML 1.2 alone, such as 1e-3
        Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, ["" if c == "\0" else c for c in first])
    return Dumper


def _loader(yaml: Any) -> Any:
    """Return a loader class of plain data."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.events.AliasEvent) or getattr(event, "anchor", None):
                raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
            if getattr(event, "tag", None):
                raise yaml.composer.ComposerError(None, None, f"the tag {event.tag} is not read", event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    problem = f"the key {key!r} is not a text: write it in quotes"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                if key in found:
                    problem = f"the key {key!r} is repeated"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                found[key] = self.construct_object(value_node, deep=True)
            return found

        def construct_yaml_int(self, node: Any) -> int:
            return int(self.construct_scalar(node))

        def construct_yaml_float(self, node: Any) -> float:
            return float(self.construct_scalar(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_mapping)
    for name, pattern, first in _SCALARS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", pattern, ["" if c == "\0" else c for c in first])
    return Loader
