"""`viviane doctor`: what is here, what each operation would run on, and what is broken."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from viviane.cli.diagnosis import Diagnosis


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show machine, libraries and implementations, and try a small training run; exit code 1 if it is broken."""
    from viviane.cli.diagnosis import diagnose  # loads torch

    diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _show(diagnosis)
    if not diagnosis.healthy:
        sys.exit(1)


def _show(diagnosis: Diagnosis) -> None:
    from rich.markup import escape

    from viviane.cli.console import output

    console = output()
    for table in (_machine(diagnosis), _extras(diagnosis), _operations(diagnosis), _checks(diagnosis)):
        console.print(table)
    for check in diagnosis.checks:
        if not check.ok:
            console.print(f"[red]{check.name}[/red]: {escape(check.fix)}")


def _table(title: str, *headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _machine(diagnosis: Diagnosis) -> Table:
    from viviane.core.machine import GIB

    here = diagnosis.machine
    table = _table("Machine", "what", "here")
    table.add_row("system", here["system"])
    flags = ", ".join(here["cpu"]["flags"]) or "no vector flags known"
    table.add_row("cpu", f"{here['cpu']['model']}, {here['cpu']['num_cores']} cores ({flags})")
    if here["memory_bytes"] is not None:
        free = (here["memory_available_bytes"] or 0) / GIB
        table.add_row("memory", f"{here['memory_bytes'] / GIB:.1f} GiB, {free:.1f} available")
    for index, gpu in enumerate(here["gpus"]):
        text = f"{gpu['name']}, {gpu['memory_bytes'] / GIB:.0f} GiB, capability {gpu['capability']}"
        table.add_row(f"cuda:{index}", text)
    table.add_row("temporary files", f"{here['temporary_folder']}, {here['temporary_free_bytes'] / GIB:.1f} GiB free")
    between = diagnosis.threads["torch_between_operations"]
    table.add_row("threads", f"{diagnosis.threads['torch']} within a torch operation, {between} between operations")
    installed = (f"{name} {version or 'absent'}" for name, version in diagnosis.versions.items())
    table.add_row("versions", ", ".join(installed))
    return table


def _extras(diagnosis: Diagnosis) -> Table:
    table = _table("Extras: pip install 'viviane[...]'", "extra", "purpose", "here")
    for one in diagnosis.extras:
        state = "[green]installed[/green]" if not one.missing else "not installed: " + ", ".join(one.missing)
        table.add_row(one.extra, one.purpose, state if one.available else "planned")
    return table


def _operations(diagnosis: Diagnosis) -> Table:
    table = _table("Operations", "operation", "device", "implementation", "why")
    for operation in diagnosis.operations:
        table.add_row(operation.name, operation.device, operation.implementation, operation.why)
    return table


def _checks(diagnosis: Diagnosis) -> Table:
    from rich.markup import escape

    table = _table("Checks", "check", "", "seen")
    for check in diagnosis.checks:
        table.add_row(check.name, "[green]works[/green]" if check.ok else "[red]broken[/red]", escape(check.seen))
    return table
