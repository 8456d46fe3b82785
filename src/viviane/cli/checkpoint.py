"""`viviane checkpoint`: look into a checkpoint, compare two, reshard tables, take them out."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from viviane.cli.subcommands import command_group
from viviane.core.locations import RemotePath, location
from viviane.core.remote.cache import local_copy
from viviane.core.remote.published import publish_folder

if TYPE_CHECKING:
    from viviane.training import Manifest

_MOST = 65536  # processes

app = command_group("Work on a checkpoint without its model; every file is verified first.")

Checkpoint: TypeAlias = Annotated[Path, typer.Argument(help="A checkpoint: a folder with manifest.json.")]
Made: TypeAlias = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, here or at a URL.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def inspect(path: Checkpoint, as_json: AsJson = False) -> None:
    """Print what it holds: steps, versions, dense tensors, tables."""
    from viviane.training import verify_checkpoint

    path = local_copy(path)
    _inspect(path, verify_checkpoint(path), as_json)


@app.command()
def diff(
    path: Checkpoint,
    other: Annotated[Path, typer.Argument(help="The checkpoint to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Print which tensors differ, and by how much; exit code 1 where any does."""
    from viviane.training.checkpoint.tools import compare_checkpoints

    _diff(compare_checkpoints(local_copy(path), local_copy(other)), as_json)


@app.command()
def reshard(
    path: Checkpoint,
    out: Made,
    processes: Annotated[int | None, typer.Option(min=1, max=_MOST, help="Cut tables by rows into this many.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan's JSON file, as `viviane plan` writes.")] = None,
) -> None:
    """Cut its tables another way: for a number of processes, or by a plan."""
    from viviane.parallel import ShardingPlan
    from viviane.training import verify_checkpoint
    from viviane.training.checkpoint.tools import reshard as write

    path = local_copy(path)
    with _published(out) as folder:
        write(path, folder, processes=processes,
              plan=None if plan is None else ShardingPlan.from_json_file(plan))  # fmt: skip
        typer.echo(f"{location(out)}: {_num_files(verify_checkpoint(folder))} files of tables")


@app.command()
def compact(path: Checkpoint, out: Made) -> None:
    """Write an incremental checkpoint with whole tables, which needs no other."""
    from viviane.training import verify_checkpoint
    from viviane.training.checkpoint.tools import compact as write

    path = local_copy(path)
    with _published(out) as folder:
        write(path, folder)
        typer.echo(f"{location(out)}: whole tables, {_num_bytes(verify_checkpoint(folder)):,} bytes")


@app.command()
def export(
    path: Checkpoint,
    out: Made,
    kind: Annotated[str, typer.Option("--format", help="npy, safetensors or parquet.")] = "npy",
) -> None:
    """Write tables by key, and dense weights."""
    from viviane.training.checkpoint.export import export_checkpoint

    path, place = local_copy(path), location(out)
    with _published(out) as folder:
        for file in export_checkpoint(path, folder, kind):
            typer.echo(place / file.relative_to(folder).as_posix())


def _published(out: Path) -> AbstractContextManager[Path]:
    """Return the folder to write: for a URL a local one, which is copied there at the end."""
    place = location(out)
    return publish_folder(place) if isinstance(place, RemotePath) else nullcontext(place)


def _num_files(manifest: Manifest) -> int:
    return sum(len(table.files) for table in manifest.tables.values())


def _num_bytes(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files.values())


def _inspect(path: Path, manifest: Manifest, as_json: bool) -> None:
    from viviane.training.checkpoint.increments import chain_of

    bases = [
        {"folder": place.name, "step": content.step, "bytes": _num_bytes(content)}
        for place, content in list(chain_of(path, manifest))[1:]
    ]
    tables = [
        {
            "table": full, "type": entry.weight.dtype, "rows": entry.weight.shape[0], "dim": entry.weight.shape[1],
            "bytes": sum(manifest.files[name].bytes for name in entry.files), "files": len(entry.files),
            "state": list(entry.state), "step": entry.step, "dynamic": entry.is_dynamic,
            "increment": entry.is_increment,
        }
        for full, entry in manifest.tables.items()
    ]  # fmt: skip
    dense = {name: str(entry) for name, entry in manifest.dense.items()}
    head: dict[str, Any] = {
        "step": manifest.step, "epoch": manifest.epoch, "viviane": manifest.viviane, "torch": manifest.torch,
        "format": manifest.version, "optimizer_state": manifest.optimizer_state,
        "bytes": _num_bytes(manifest),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps({**head, "bases": bases, "dense": dense, "tables": tables}, indent=2))
        return
    for name, value in head.items():
        typer.echo(f"{name.replace('_', ' '):<16} {f'{value:,}' if name in ('step', 'bytes') else value}")
    for one in bases:
        typer.echo(f"base   {one['folder']}  step {one['step']:,}, {one['bytes']:,} bytes")
    for name, text in dense.items():
        typer.echo(f"dense  {name}  {text}")
    for one in tables:
        rows = f"{one['rows']:,} {'keys' if one['dynamic'] else 'rows'}"
        state = ", ".join(one["state"]) or "none"  # type: ignore[arg-type]
        typer.echo(
            f"table  {one['table']}  {rows} x {one['dim']} {one['type']}, {one['bytes']:,} bytes in {one['files']} "
            f"file(s){', changed rows alone' if one['increment'] else ''}, optimizer state: {state}, step {one['step']}"
        )


def _diff(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_finite(row) for row in rows], indent=2))
    elif not rows:
        typer.echo("no difference: both hold the same bits")
    else:
        for row in rows:
            typer.echo(f"{row['tensor']}: {row['difference']}")
    if rows:
        sys.exit(1)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a difference with NaN has no largest one."""
    return {name: None if value == float("inf") else value for name, value in row.items()}
