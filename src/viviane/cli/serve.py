"""`viviane serve`: models over HTTP and gRPC, by our own server or by NVIDIA's Triton."""

from __future__ import annotations

import json
import signal
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.serving import ModelEntry
    from viviane.serving.server import ServerSettings
    from viviane.serving.triton import TritonSettings

_ENGINES = ("viviane", "triton")


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="A run folder, a saved model, versions 1/, 2/ of one, a folder of models, or a saved recommender; "
            "NAME=PATH names one.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file of settings; options change them.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: batching.max_delay_ms=2.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of HTTP (8000); 0 takes a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of gRPC (8001); 0 takes a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.")] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Requests of a model computed at the same time.")] = None,
    max_delay_ms: Annotated[
        float | None, typer.Option(min=0, help="How long a request may wait for others, to be predicted with them.")
    ] = None,
    allow_load: Annotated[bool, typer.Option("--allow-load", help="Clients may load and unload models.")] = False,
    engine: Annotated[str, typer.Option(help="viviane, or triton: NVIDIA's Triton server.")] = "viviane",
    write_only: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only write Triton's model repository, with the models inside.")
    ] = None,
    install_triton: Annotated[
        bool, typer.Option("--install-triton", help="Install Triton into an environment of its own, and end.")
    ] = False,
) -> None:
    """Answer requests for predictions until SIGTERM or Ctrl-C."""
    if install_triton:
        _install()
        return
    if engine not in _ENGINES:
        raise ConfigError("no such engine", where="--engine", value=engine, allowed=", ".join(_ENGINES))
    session = {name: value for name, value in (("device", device), ("instances", instances)) if value is not None}
    data = _read(config, changes or [])
    recommenders, others = _recommenders(models or [])
    entries = _entries(others, session)
    if write_only is not None or engine == "triton":
        options = {"host": host, "http_port": port, "grpc_port": grpc_port, "max_delay_ms": max_delay_ms,
                   "instances": instances, "allow_load": allow_load or None}  # fmt: skip
        _triton(data, config, options, entries, session, recommenders, write_only)
        return
    options = {"host": host, "http_port": port, "grpc_port": grpc_port, "allow_load": allow_load or None}
    _serve(data, config, options, max_delay_ms, entries, session, recommenders)


def _serve(
    data: dict[str, Any],
    config: Path | None,
    options: dict[str, Any],
    max_delay_ms: float | None,
    entries: list[ModelEntry],
    session: dict[str, Any],
    recommenders: dict[str, str],
) -> None:
    from viviane.serving.server import InferenceServer, ServerSettings

    if max_delay_ms is not None:
        data["batching"] = {**data.get("batching", {}), "max_delay_ms": max_delay_ms}
    settings = ServerSettings.from_dict({**data, **_given(options)}, where=_origin(config))
    if entries or not recommenders:
        settings = _with_models(settings, entries, session)
    _warn_about_network(settings.host, settings.is_local)
    opened = _opened(recommenders, session.get("device", "auto"))
    server = InferenceServer(settings, metadata.version("viviane"), opened)

    def started() -> None:
        for name, versions in server.repository.names().items():
            typer.echo(f"model {name}: version {', '.join(map(str, versions))}")
        for name in opened:
            typer.echo(f"recommender {name}")
        typer.echo(f"HTTP: {server.http_url} (open it in a browser to try a row)")
        if server.grpc_target is not None:
            typer.echo(f"gRPC: {server.grpc_target}")

    server.run(started)
    typer.echo("ended")


def _triton(
    data: dict[str, Any],
    config: Path | None,
    options: dict[str, Any],
    entries: list[ModelEntry],
    session: dict[str, Any],
    recommenders: dict[str, str],
    write_only: Path | None,
) -> None:
    from viviane.cli.triton_recommender import triton_model
    from viviane.serving import RepositorySettings
    from viviane.serving.triton import TritonEnvironment, TritonSettings, write_repository

    models = RepositorySettings.from_dict(data.pop("inference", {}), where=_origin(config)).models
    settings = TritonSettings.from_dict({**data, **_given(options)}, where=_origin(config))
    chosen = _merged(models, entries, session) if models or entries or not recommenders else []
    environment = TritonEnvironment.find() if write_only is None else None  # before models are loaded
    others = [triton_model(name, path, session.get("device", "auto")) for name, path in recommenders.items()]
    if write_only is not None:
        written = write_repository(write_only, chosen, settings, others=others)
        typer.echo(f"{write_only}: {', '.join(written)}")
        return
    _warn_about_network(settings.host, settings.host in ("127.0.0.1", "::1", "localhost"))
    with tempfile.TemporaryDirectory(prefix="viviane-triton-repository-") as folder:
        repository = Path(folder) / "repository"
        write_repository(repository, chosen, settings, others=others, copy=False)
        _run_triton(repository, settings, environment)


def _run_triton(repository: Path, settings: TritonSettings, environment: Any) -> None:
    from viviane.serving.triton import TritonServer

    server = TritonServer(repository, settings, environment)

    def handle(number: int, frame: object) -> None:
        server.ask_to_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    try:
        server.wait_until_ready()
        typer.echo(f"HTTP: {server.http_url}\ngRPC: {server.grpc_target}")
        code = server.wait()
    finally:
        server.stop()
    if code:
        from viviane.serving.triton.environment import TritonError

        raise TritonError("Triton ended with an error", value=code)
    typer.echo("ended")


def _install() -> None:
    from viviane.serving.triton import install_triton

    install_triton(say=typer.echo)


def _read(config: Path | None, changes: list[str]) -> dict[str, Any]:
    from viviane.cli.train_config import change_settings
    from viviane.config.base import load_json

    data = {} if config is None else load_json(config)
    if not isinstance(data, dict):
        raise ConfigError("settings are a JSON object", where=str(config), value=json.dumps(data)[:100])
    for change in changes:
        change_settings(data, change)
    return data


def _recommenders(models: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the folders that hold recommenders, by name, and the others."""
    found: dict[str, str] = {}
    others = []
    for one in models:
        name, equals, path = one.partition("=")
        named = bool(equals) and "/" not in name
        path = path if named else one
        if not (Path(path) / "recommender.json").is_file():
            others.append(one)
            continue
        name = name if named else Path(path).resolve().name
        if name in found:
            raise ConfigError("two recommenders of one name", value=name, fix="name one: NAME=PATH")
        found[name] = path
    return found, others


def _opened(recommenders: dict[str, str], device: str) -> dict[str, Any]:
    if not recommenders:
        return {}
    from viviane.cli.served_recommender import ServedRecommender

    return {name: ServedRecommender(path, device) for name, path in recommenders.items()}


def _entries(models: list[str], session: dict[str, Any]) -> list[ModelEntry]:
    from viviane.serving import SessionSettings
    from viviane.serving.server.found_models import find_entries

    found: list[ModelEntry] = []
    for one in models:
        name, equals, path = one.partition("=")
        named = bool(equals) and "/" not in name
        settings = SessionSettings(**session)
        found += find_entries(path if named else one, name=name if named else None, session=settings)
    return found


def _merged(models: tuple[ModelEntry, ...], entries: list[ModelEntry], session: dict[str, Any]) -> list[ModelEntry]:
    """Join the models of the settings, whose sessions options change, and those of the command line."""
    changed = [one.model_copy(update={"session": one.session.model_copy(update=session)}) for one in models]
    joined = [*changed, *entries]
    if not joined:
        raise ConfigError("no model to serve", fix="name one: viviane serve runs/dcn")
    return joined


def _with_models(settings: ServerSettings, entries: list[ModelEntry], session: dict[str, Any]) -> ServerSettings:
    joined = _merged(settings.inference.models, entries, session)
    return settings.changed(inference={"models": [one.to_dict() for one in joined]})


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _origin(config: Path | None) -> str | None:
    return None if config is None else str(config)


def _warn_about_network(host: str, is_local: bool) -> None:
    if not is_local:
        typer.echo(
            f"warning: {host} is reachable by other machines; there is no authentication or encryption", err=True
        )
