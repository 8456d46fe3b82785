"""`viviane models`: list, load, unload and roll back the models of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote

import typer

from viviane.cli.console import printable
from viviane.cli.subcommands import command_group
from viviane.core.addresses import server_address
from viviane.core.errors import ConfigError, RemoteError, VivianeError
from viviane.core.json_files import expected_form, json_object, parse_json

TIMEOUT_S: Final = 600.0
MAX_REPLY_BYTES: Final = 16 << 20

app = command_group("Control the models of a running server, one that was started with --allow-load.")

Url: TypeAlias = Annotated[str, typer.Argument(help="The server: http://127.0.0.1:8000.")]
Name: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]


@app.command("list")
def list_models(url: Url) -> None:
    """Print all versions and their state."""
    for line in _lines_of(ask(url, "/v2/repository/index", {}), url):
        typer.echo(line)


@app.command()
def load(
    url: Url, model: Name, version: Annotated[int | None, typer.Option(min=1, help="The newest unless given.")] = None
) -> None:
    """Load a version next to those that respond, then switch to it."""
    _change(url, model, "load", version)


@app.command()
def unload(
    url: Url, model: Name, version: Annotated[int | None, typer.Option(min=1, help="All of them unless given.")] = None
) -> None:
    """Stop sending requests to a model, complete those that it has, free it."""
    _change(url, model, "unload", version)


@app.command()
def rollback(
    url: Url,
    model: Name,
    version: Annotated[int | None, typer.Option(min=1, help="The one before unless given.")] = None,
) -> None:
    """Let an earlier version respond again."""
    _change(url, model, "rollback", version)


def _change(url: str, model: str, action: str, version: int | None) -> None:
    content = {} if version is None else {"parameters": {"version": version}}
    found = ask(url, f"/v2/repository/models/{quote(model, safe='')}/{action}", content)
    if not isinstance(found, dict):
        raise RemoteError("the server's reply is no JSON object", where=url, value=str(found)[:80],
                          fix="check that the address is that of `viviane serve`")  # fmt: skip
    number = found.get("version", version)
    typer.echo(printable(f"{model}: {action}" + ("" if number is None else f", version {number}")))


def _lines_of(index: Any, url: str) -> list[str]:
    with expected_form(f"the reply of {url}", RemoteError):
        return [
            printable(f"{one['name']}  {one['version']}  {one['state']}  {one.get('reason') or ''}").rstrip()
            for one in index
        ]


def ask(url: str, path: str, content: dict[str, Any] | None = None) -> Any:
    """Send a request to a server and return its JSON; with `content` it is a POST.

    Raises:
        ConfigError: not an HTTP address, or the server refuses the request.
        RemoteError: no server responds, or its reply is not JSON.
    """
    server_address(url)
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            body = reply.read(MAX_REPLY_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise _refusal(_reason(error), url + path) from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: a redirection to an invalid address
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise RemoteError(
            "no server responds", where=url, value=str(cause), fix="start it, or check the port"
        ) from None
    return parse_json(body or b"{}", where=url + path, error=RemoteError, max_bytes=MAX_REPLY_BYTES)


def _refusal(reason: str, where: str) -> ConfigError:
    """Return a server's message, whose further lines say value, what is allowed and what to do, as an error here."""
    problem, *more = reason.splitlines() or [""]
    said = {name.strip(): printable(text.strip()) for name, sign, text in (one.partition(":") for one in more) if sign}
    value = said.get("value")
    return ConfigError(
        f"the server refuses the request: {printable(problem)}", where=said.get("where", where),
        allowed=said.get("allowed"), fix=said.get("do"), **({} if value is None else {"value": value.strip("'")}),
    )  # fmt: skip


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's message, or its text where it is not the JSON of an error."""
    try:
        text = error.read(4000).decode("utf-8", "replace")
    except (OSError, HTTPException):  # the connection ends within the reply
        return str(error)
    try:
        return str(json_object(parse_json(text.encode(), where=error.url), where=error.url)["error"])
    except (VivianeError, KeyError):
        return text or str(error)
