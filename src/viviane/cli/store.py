"""`viviane store`: rows of a saved model into a store and back, what a store holds, and whether it is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from viviane.core.errors import ConfigError, StoreError, suggest
from viviane.core.files import replace_folder

if TYPE_CHECKING:
    import numpy as np

    from viviane.serving.parameter_server.settings import TableSettings
    from viviane.serving.parameter_server.tables import ServedTables
    from viviane.store.hierarchy import TableHierarchy

ACTIONS = {
    "import": "MODEL: write all rows of the saved model into the config's store",
    "export": "MODEL: write the rows that the store has now to --output, keys.i64 and rows.bin a table",
    "inspect": "MODEL: rows by table and tier",
    "verify": "MODEL: check sums of the saved model, and that every row of the store can be read",
}
_BATCH = 65_536


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="; ".join(f"{n} {w}" for n, w in ACTIONS.items()))],
    model: Annotated[Path, typer.Argument(help="A saved model, or a folder of versions.")],
    config: Annotated[Path, typer.Option(help='JSON of tiers: {"rocksdb": {"folder": "/nvme/ps"}}.')],
    version: Annotated[int | None, typer.Option(min=1, help="Which version; the latest unless given.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="export: a folder, which is made.")] = None,
) -> None:
    """Look after the stores of served models; no server may have them open meanwhile."""
    from viviane.serving.parameter_server.settings import TableSettings

    if action not in ACTIONS:
        raise ConfigError("no such action", value=action, fix=suggest(action, ACTIONS))
    settings = TableSettings.from_json_file(config).model_copy(update={"cache": None, "updates": None})
    if settings.rocksdb is None:
        raise ConfigError("the config has no store", where=str(config), fix='add "rocksdb": {"folder": ...}')
    if action == "export" and output is None:
        raise ConfigError("nowhere to export to", fix="name a folder with --output")
    served = _open(model, version, settings)
    try:
        if output is not None and action == "export":
            _export(served, output)
            return
        for name, table in served.hierarchies.items():
            if action == "import":
                _import(name, table)
            elif action == "inspect":
                tiers = ", ".join(f"{level.tier.name} {level.tier.num_rows():,}" for level in table.levels)
                typer.echo(f"{name}: {table.layout}; rows: {tiers}")
            else:
                _verify(name, table)
    finally:
        served.close()
    if action == "verify":
        _verify_model(model, version)


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


def _export(served: ServedTables, output: Path) -> None:
    counts: dict[str, int] = {}
    with replace_folder(output, overwrite=False) as work:
        for name, table in served.hierarchies.items():
            counts[name] = _write_rows(table, work / name)
    for name, count in counts.items():
        typer.echo(f"{output / name}: {count:,} rows")


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
