"""`viviane checkpoint`: look into a checkpoint, compare two, reshard tables, take them out."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viviane.core.errors import ConfigError, suggest
from viviane.core.locations import RemotePath, location
from viviane.core.remote.cache import local_copy
from viviane.core.remote.published import publish_folder

if TYPE_CHECKING:
    from viviane.training import Manifest

_MOST = 65536  # processes

ACTIONS = {
    "inspect": "PATH: what it holds",
    "diff": "A B: which tensors differ, and by how much; exit code 1 where any does",
    "reshard": "PATH OUT --processes N or --plan FILE: cut its tables another way",
    "compact": "PATH OUT: an incremental checkpoint with whole tables, which needs no other",
    "export": "PATH OUT --format npy, safetensors or parquet: tables by key, dense weights",
}


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="; ".join(f"{n} {w}" for n, w in ACTIONS.items()))],
    path: Annotated[Path, typer.Argument(help="A checkpoint: a folder with manifest.json.")],
    other: Annotated[Path | None, typer.Argument(metavar="[B|OUT]", help="Of diff, reshard, export.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="reshard: cut tables by rows into this many.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="reshard: a plan's JSON file, as `viviane plan` writes.")] = None,
    kind: Annotated[str, typer.Option("--format", help="export: npy, safetensors or parquet.")] = "npy",
    as_json: Annotated[bool, typer.Option("--json", help="inspect, diff: print JSON.")] = False,
) -> None:
    """Work on a checkpoint without its model; every file is verified first."""
    from viviane.parallel import ShardingPlan
    from viviane.training import verify_checkpoint
    from viviane.training.checkpoint.export import export_checkpoint
    from viviane.training.checkpoint.tools import compact, compare_checkpoints, reshard

    if action not in ACTIONS:
        raise ConfigError("no such action", value=action, fix=suggest(action, ACTIONS))
    if (other is None) != (action == "inspect"):
        raise ConfigError(f"viviane checkpoint {action} takes {'one path' if other else 'two paths'}",
                          allowed=ACTIONS[action])  # fmt: skip
    path = local_copy(path)
    if action == "inspect":
        _inspect(path, verify_checkpoint(path), as_json)
        return
    assert other is not None
    if action == "diff":
        _diff(compare_checkpoints(path, local_copy(other)), as_json)
        return
    place = location(other)
    with publish_folder(place) if isinstance(place, RemotePath) else nullcontext(place) as out:
        if action == "reshard":
            reshard(path, out, processes=processes, plan=None if plan is None else ShardingPlan.from_json_file(plan))
            typer.echo(f"{place}: {_num_files(verify_checkpoint(out))} files of tables")
        elif action == "compact":
            compact(path, out)
            typer.echo(f"{place}: whole tables, {_num_bytes(verify_checkpoint(out)):,} bytes")
        else:
            for file in export_checkpoint(path, out, kind):
                typer.echo(place / file.relative_to(out).as_posix())


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
