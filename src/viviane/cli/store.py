"""`viviane store`: rows of a saved model into a store and back, what a store holds, and whether it is right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import quote

import typer

from viviane.cli.subcommands import command_group
from viviane.core.errors import ConfigError, StoreError
from viviane.core.file_names import check_file_name
from viviane.core.files import replace_folder
from viviane.core.json_files import read_json_object

if TYPE_CHECKING:
    import numpy as np

    from viviane.serving.parameter_server.settings import TableSettings
    from viviane.serving.parameter_server.tables import ServedTables
    from viviane.store.hierarchy import TableHierarchy

_BATCH = 65_536

app = command_group("Look after the stores of served models; no server may have them open meanwhile.")

Saved: TypeAlias = Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a folder of versions.")]
Tiers: TypeAlias = Annotated[Path, typer.Option("--config", help='JSON of tiers: {"rocksdb": {"folder": "/nvme/ps"}}.')]
Version: TypeAlias = Annotated[
    int | None, typer.Option("--version", min=1, help="Which version; the latest unless given.")
]


@app.command("import")
def import_rows(model: Saved, config: Tiers, version: Version = None) -> None:
    """Write all rows of the saved model into the config's store; rows that updates have changed stay."""
    with _tables(model, config, version) as tables:
        for name, table in tables.items():
            _import(name, table)


@app.command("export")
def export_rows(
    model: Saved,
    config: Tiers,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder, which is made.")],
    version: Version = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
) -> None:
    """Write the rows that the store has now: keys.i64 and rows.bin a table."""
    with _tables(model, config, version) as tables:
        _export(tables, output, overwrite=overwrite)


@app.command()
def inspect(model: Saved, config: Tiers, version: Version = None) -> None:
    """Print the rows by table and tier."""
    with _tables(model, config, version) as tables:
        for name, table in tables.items():
            tiers = ", ".join(f"{level.tier.name} {level.tier.num_rows():,}" for level in table.levels)
            columns = ", ".join(f"{one.name} {one.dtype} x {one.width}" for one in table.layout.columns)
            typer.echo(f"{name}: {columns}, {table.layout.row_bytes} bytes a row; rows: {tiers}")


@app.command()
def verify(model: Saved, config: Tiers, version: Version = None) -> None:
    """Check that every row of the store can be read, and the check sums of the saved model."""
    with _tables(model, config, version) as tables:
        for name, table in tables.items():
            _verify(name, table)
    _verify_model(model, version)


def _check_clause(config: Path) -> None:
    """Refuse the settings of a server, whose models each have tiers."""
    content = read_json_object(config, error=ConfigError) if config.is_file() else {}
    outer = next((name for name in ("tables", "inference") if name in content), None)
    if outer is not None:
        raise ConfigError("this file has more than the tiers of one model", where=str(config), value=outer,
                          allowed="cache, host, redis, rocksdb, updates",
                          fix="write what stands under `tables` into a file of its own")  # fmt: skip


@contextmanager
def _tables(model: Path, config: Path, version: int | None) -> Iterator[Mapping[str, TableHierarchy]]:
    """Open the tables of a model with the config's store; caches and updates are left out."""
    from viviane.serving.parameter_server.settings import TableSettings

    _check_clause(config)
    settings = TableSettings.from_json_file(config).model_copy(update={"cache": None, "updates": None})
    if settings.rocksdb is None:
        what = "the config has no store: caches, host memory and Redis hold copies, which lookups fill"
        raise ConfigError(what, where=str(config), fix='add "rocksdb": {"folder": ...}')
    served = _open(model, version, settings)
    try:
        yield served.hierarchies
    finally:
        served.close()


def _open(model: Path, version: int | None, settings: TableSettings) -> ServedTables:
    import torch

    from viviane.serving.loading import load_model
    from viviane.serving.versions import find_version

    number, folder = find_version(model, version)
    loaded = load_model(folder, torch.device("cpu"), tables=settings, version=number)
    assert loaded.tables is not None
    return loaded.tables


def _store(table: TableHierarchy) -> int:
    return next(i for i, level in enumerate(table.levels) if level.role == "store")


def _import(name: str, table: TableHierarchy) -> None:
    import numpy as np

    store, base, count = table.levels[_store(table)].tier, table.levels[-1].tier, 0
    for keys, rows in base.scan(_BATCH):
        there = store.fetch(keys, table.layout.empty(len(keys)))  # rows that updates have changed stay
        store.put(np.ascontiguousarray(keys[~there]), np.ascontiguousarray(rows[~there]))
        count += int(np.count_nonzero(~there))
    store.flush()
    typer.echo(f"{name}: {count:,} rows written")


def _rows(table: TableHierarchy) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every key once, with its newest row."""
    store, base = table.levels[_store(table)].tier, table.levels[-1].tier
    yield from store.scan(_BATCH)
    for keys, rows in base.scan(_BATCH):
        there = store.fetch(keys, table.layout.empty(len(keys)))
        yield keys[~there], rows[~there]


def _export(tables: Mapping[str, TableHierarchy], output: Path, *, overwrite: bool) -> None:
    counts: dict[str, int] = {}
    with replace_folder(output, overwrite=overwrite) as work:
        for name, table in tables.items():
            folder = check_file_name(quote(name, safe=".-_"), where=f"table {name!r}")
            counts[folder] = _write_rows(table, work / folder)
    for folder, count in counts.items():
        typer.echo(f"{output / folder}: {count:,} rows")


def _write_rows(table: TableHierarchy, folder: Path) -> int:
    folder.mkdir(parents=True)
    count = 0
    with (folder / "keys.i64").open("wb") as keys_file, (folder / "rows.bin").open("wb") as rows_file:
        for keys, rows in _rows(table):
            keys_file.write(keys.astype("<i8").tobytes())
            rows_file.write(rows.tobytes())
            count += len(keys)
    (folder / "layout.json").write_text(json.dumps({**table.layout.to_json(), "num_rows": count}, indent=2) + "\n")
    return count


def _verify(name: str, table: TableHierarchy) -> None:
    count = 0
    for keys, rows in table.levels[_store(table)].tier.scan(_BATCH):
        if rows.shape != (len(keys), table.layout.row_bytes):
            raise StoreError("a stored row has another length", where=name, value=rows.shape)
        count += len(keys)
    typer.echo(f"{name}: {count:,} rows of the store can be read")


def _verify_model(model: Path, version: int | None) -> None:
    from viviane.model.saving import verify_model
    from viviane.serving.versions import find_version

    files = verify_model(find_version(model, version)[1])
    typer.echo(f"{model}: {len(files)} files have the size and check sum of their manifest")
