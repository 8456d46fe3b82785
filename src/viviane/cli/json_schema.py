"""`viviane schema`: a JSON Schema of each declarative file, with which an editor completes and checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from viviane.core.errors import ConfigError, suggest
from viviane.core.files import write_bytes_atomic

KINDS = {
    "train": "the file of `viviane train` and `viviane tune`",
    "etl": "the declarative file of `viviane etl`",
    "sequences": "the file of `viviane etl` that makes sequences",
    "model": "a model's graph, as `Model.to_json` writes it",
    "data": "schema.json of a data set",
}


def command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="; ".join(f"{n}: {w}" for n, w in KINDS.items()))],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; else it is printed.")] = None,
) -> None:
    """Print the JSON Schema of a declarative file, for editors and for checks."""
    text = json.dumps(json_schema(kind), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_bytes_atomic(output, text.encode())


def json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a kind of file.

    Raises:
        ConfigError: no such kind.
    """
    if kind not in KINDS:
        raise ConfigError("no such kind of file", value=kind, allowed=", ".join(KINDS), fix=suggest(kind, KINDS))
    found: dict[str, Any] = _settings(kind).model_json_schema()
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
    if kind == "train":
        found["properties"]["model"] = _forms_of_model(found)
    return found


def _settings(kind: str) -> Any:
    if kind == "train":
        from viviane.cli.train_config import TrainConfig

        return TrainConfig
    if kind == "model":
        from viviane.model import ModelFile

        return ModelFile
    if kind == "data":
        from viviane.schema import Schema

        return Schema
    from viviane import etl

    return etl.EtlConfig if kind == "etl" else etl.SequenceConfig


def _forms_of_model(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of `model`: a reference model by name with its settings, a graph, or a file."""
    from viviane.model import ModelFile
    from viviane.zoo import ZOO

    definitions = schema.setdefault("$defs", {})
    forms: list[dict[str, Any]] = []
    for name, model in ZOO.items():
        own = model.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(own.pop("$defs", {}))
        own["properties"] = {"zoo": {"const": name}, **own.get("properties", {})}
        own["required"] = ["zoo", *own.get("required", [])]
        forms.append(own)
    graph = ModelFile.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(graph.pop("$defs", {}))
    nodes = {"nodes": graph["properties"]["nodes"]}
    forms.append({"type": "object", "properties": nodes, "required": ["nodes"], "additionalProperties": False})
    file = {"file": {"type": "string"}}
    forms.append({"type": "object", "properties": file, "required": ["file"], "additionalProperties": False})
    return {"title": "Model", "anyOf": forms}
