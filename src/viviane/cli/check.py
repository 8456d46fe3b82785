"""`viviane check`: compare data sets, models, checkpoints and fitted ETLs with their recorded check sums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from viviane.core.data_manifest import MANIFEST_FILE
from viviane.core.errors import DataError, VivianeError
from viviane.core.exchange import recover
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.remote.cache import local_copy
from viviane.core.remote.published import published_location

Kind = Literal["data set", "model", "checkpoint", "fitted ETL"]
_MODEL_FILES = "files.json"
_ETL_SUFFIX = ".zip"


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Data sets, models, checkpoints, run folders, etl.zip; local or URLs."),
    ],
    rows: Annotated[
        bool, typer.Option("--rows", help="Read every row of data sets, too, and check every value.")
    ] = False,
) -> None:
    """Compare every file with the check sum recorded when it was written; exit code 1 where one differs."""
    failed = 0
    for path in paths:
        found = list(_found(published_location(path)))
        if not found:
            raise DataError(
                "there is nothing to check here", where=str(path),
                allowed="a data set, a model, a checkpoint, a run folder, an etl.zip, or a folder of them",
            )  # fmt: skip
        for place, kind in found:
            try:
                typer.echo(f"{place}: {kind}, {_checked(place, kind, rows)}")
            except VivianeError as error:
                failed += 1
                typer.echo(f"{place}: {kind}, DAMAGED\nerror: {error}", err=True)
    if failed:
        raise typer.Exit(1)


def _found(place: AnyPath) -> Iterator[tuple[AnyPath, Kind]]:
    """Yield what a path contains: one object, or all objects of a folder."""
    kind = _kind(place)
    if kind is not None:
        yield place, kind
        return
    if not place.is_dir():
        return
    inner: list[AnyPath] = sorted(place.iterdir(), key=lambda one: one.name)
    for one in inner:
        if one.name.startswith("."):
            continue
        if one.name == "checkpoints" and one.is_dir():
            yield from _found(one)
        elif (found := _kind(one)) is not None:
            yield one, found


def _kind(place: AnyPath) -> Kind | None:
    from viviane.config.base import load_json
    from viviane.schema import SCHEMA_FILE

    if place.is_file():
        return "fitted ETL" if place.suffix == _ETL_SUFFIX else None
    if isinstance(place, Path):
        recover(place)
    if (place / _MODEL_FILES).is_file():
        return "model"
    if (place / MANIFEST_FILE).is_file():
        manifest = load_json(place / MANIFEST_FILE)
        own = manifest.get("format") if isinstance(manifest, dict) else None
        return "checkpoint" if isinstance(own, str) else "data set"
    of_run = any((place / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    return "data set" if (place / SCHEMA_FILE).is_file() and not of_run else None


def _checked(place: AnyPath, kind: Kind, rows: bool) -> str:
    """Check one object and return what was compared."""
    if kind == "data set":
        return _check_data(place, rows)
    if kind == "fitted ETL":
        from viviane.etl import FittedEtl

        FittedEtl.load(place)
        return "intact"
    local = local_copy(place)
    if kind == "model":
        from viviane.model.saving import verify_model

        return f"intact, {len(verify_model(local))} files"
    from viviane.training import verify_checkpoint

    manifest = verify_checkpoint(local)
    return f"intact, step {manifest.step}, {sum(one.bytes for one in manifest.files.values()):,} bytes"


def _check_data(place: AnyPath, rows: bool) -> str:
    from viviane.data import Dataset

    data = Dataset(location(place) if isinstance(place, RemotePath) else place)
    size = data.verify()
    unknown = data.manifest is None or any(one.sha256 is None for one in data.manifest.files)
    if rows or unknown:
        data.check()
    said = f"intact, {len(data):,} rows, {size:,} bytes compared"
    if unknown:
        return f"{len(data):,} rows read, all values valid; it was written without check sums of its files"
    return f"{said}, all values valid" if rows else said
