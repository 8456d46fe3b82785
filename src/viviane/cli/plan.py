"""`viviane plan`: where a model's tables go over several processes, why, and a picture of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.cli.plan_tiers import Placed, PlacedDynamic
    from viviane.cli.train_config import TrainConfig
    from viviane.data import Dataset
    from viviane.model.graph import GraphPlan
    from viviane.parallel.costs import Machine
    from viviane.parallel.planner import Planned, Planner

_ROWS_LOOKED_AT = 4096
_MOST = 65536  # processes of a plan
_H200 = {"memory_gb": 141, "memory_gb_per_s": 4300, "link_gb_per_s": 360}
"""For examples in messages: what a large copy and a kernel that stores over NVLink reach there."""
_CPU_LINK_SHARE = 4  # of the memory's speed: bytes between processes of one machine are copied in and out


def command(
    config: Annotated[Path, typer.Argument(help="JSON file of `viviane train`: data, solver, optimizer, model.")],
    processes: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="How many, one a device of the solver's.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="How many GPUs; this machine need not have them.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: solver.batch_size=8192.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a drawing as SVG.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of a device; else this machine's.")] = None,
    memory_gb_per_s: Annotated[float | None, typer.Option(help="Its speed; else measured.")] = None,
    link_gb_per_s: Annotated[float | None, typer.Option(help="Speed between devices; else measured.")] = None,
) -> None:
    """Choose where tables go, print bytes, expected time and balance for each process; for one process by default."""
    from viviane.cli.plan_tiers import placed_tables, show_dynamic, show_tiers
    from viviane.cli.train_config import read_train_config
    from viviane.core.device import resolve_device
    from viviane.core.files import write_bytes_atomic, write_json_atomic
    from viviane.data import Dataset
    from viviane.parallel.picture import plan_svg

    count = processes or gpus or 1
    if processes and gpus:
        raise ConfigError("a plan is for this many processes, or this many GPUs", fix="give --processes or --gpus")
    settings = read_train_config(config, changes or [])
    data = settings.data.open_train()
    if not isinstance(data, Dataset):
        fix = "plan with a data set of such rows: --set data.train=FOLDER"
        raise ConfigError("a stream has no statistics to plan by", where="data", value=settings.data.train, fix=fix)
    graph = settings.build(data.schema).plan()
    options = _DeviceOptions(memory_gb, memory_gb_per_s, link_gb_per_s)
    machine = _machine("cuda" if gpus else settings.solver.device, count, options, may_be_elsewhere=gpus is not None)
    placed: list[Placed] = []
    dynamic: list[PlacedDynamic] = []
    if gpus is None:
        device = resolve_device(settings.solver.device)
        placed, dynamic = placed_tables(settings, graph, data, device, count)
        if placed:
            show_tiers(placed, settings.solver.embedding_folder, device)
    show_dynamic(dynamic)
    in_memory = sum(one.slots * one.slot_bytes for one in placed)
    outside = _in_tiers(placed) - in_memory + sum(one.first_bytes for one in dynamic)
    machine = replace(machine, memory_bytes=machine.memory_bytes + outside)
    planned = _planner(settings, graph, data, count, machine).best()
    _show(planned)
    if output is not None:
        write_json_atomic(output, planned.plan.to_dict())
        typer.echo(f"plan:    {output}")
    if plot is not None:
        write_bytes_atomic(plot, plan_svg(planned).encode())
        typer.echo(f"drawing: {plot}")


def _in_tiers(placed: Sequence[Placed]) -> int:
    """Return the bytes of whole tables that tiers hold: the planner does not count what memory has no room for."""
    return sum(one.num_rows * one.row_bytes for one in placed)


class _DeviceOptions(NamedTuple):
    """Properties of a device from the command line."""

    memory_gb: float | None
    memory_gb_per_s: float | None
    link_gb_per_s: float | None

    def refuse_impossible(self) -> None:
        """Refuse figures that are not finite and positive."""
        for name, value in self._asdict().items():
            if value is not None and not (math.isfinite(value) and value > 0):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError("a figure of a device is a positive number", where=option, value=value)

    def refuse_missing(self, missing: Sequence[str], why: str) -> None:
        """Refuse to guess: a plan is as good as these figures."""
        given = [name for name in missing if getattr(self, name) is None]
        if given:
            options = " ".join(f"--{name.replace('_', '-')} {_H200[name]}" for name in given)
            raise ConfigError(f"{why}, so that its figures are not known", fix=f"give them; an H200's: {options}")


def _machine(device: str, count: int, options: _DeviceOptions, *, may_be_elsewhere: bool) -> Machine:
    """Describe a process's device: as the options say, else as measured here.

    Args:
        device: the solver's.
        count: of processes.
        options: figures that are given.
        may_be_elsewhere: GPUs are meant whether or not this machine has any.
    """
    import torch

    from viviane.core.device import resolve_device
    from viviane.core.machine import memory_bytes
    from viviane.parallel.measure import copy_gb_per_s, link_gb_per_s, machine_of

    if may_be_elsewhere and not torch.cuda.is_available():
        options.refuse_missing(list(_H200)[: 3 if count > 1 else 2], "this machine has no GPU")
        where = torch.device("cuda")
    else:
        where = resolve_device(device)
    options.refuse_impossible()
    memory_gb, speed, link = options
    if memory_gb is not None:
        held = int(memory_gb * 1e9)
    elif where.type == "cuda":
        held = torch.cuda.get_device_properties(where).total_memory
    else:
        held, _ = memory_bytes()
    speed = speed or copy_gb_per_s(where)
    note = "given" if link else "measured"
    if link is None and where.type == "cuda":
        link = link_gb_per_s() if count > 1 else speed  # one sends nothing
        if link is None:
            options.refuse_missing(["link_gb_per_s"], "this machine has no second GPU to send to")
    if link is None:
        link = speed / _CPU_LINK_SHARE
        note = f"assumed: 1/{_CPU_LINK_SHARE} of the memory's; --link-gb-per-s overrides it"
    sent = f", link {link:.1f} GB/s ({note})" if count > 1 else ""
    typer.echo(f"device {where}: {held / 1e9:.1f} GB, memory {speed:.1f} GB/s{sent}")
    return machine_of(where, held, speed, link)


def _planner(settings: TrainConfig, graph: GraphPlan, data: Dataset, processes: int, machine: Machine) -> Planner:
    """Take all tables of all embedding nodes together, as training does, under the names "<node>.<table>"."""
    import torch

    from viviane.model.module import joined_tables
    from viviane.parallel import Traffic
    from viviane.parallel.automatic import hot_shares_of, hotness_of, is_whole, own_kinds
    from viviane.parallel.planner import Planner

    tables, features = joined_tables(graph)
    if not tables:
        raise ConfigError("the model has no embedding tables, so there is nothing to plan")
    solver, traffic = settings.solver, Traffic.of(data.info)
    if not traffic.hotness and len(data):  # no statistics: a few rows give the lengths of bags
        rows = data.head(min(len(data), _ROWS_LOOKED_AT))
        traffic = Traffic({name: len(bag.values) / len(rows) for name, bag in rows.bags.items()})
    given = "auto" if is_whole(solver.plan) else solver.plan
    kinds = {
        f"{node}.{t}": k for node, own in graph.tables.items() for t, k in own_kinds(given, own.tables, node).items()
    }
    rule = settings.embedding_optimizer or settings.optimizer
    return Planner(
        tables, features, rule, solver.batch_size, processes, machine, hotness=hotness_of(features, traffic),
        hot_shares=hot_shares_of(features, traffic), wire_bytes=getattr(torch, solver.wire_dtype).itemsize,
        kinds=kinds,  # type: ignore[arg-type]  # read from the same settings as in training
    )  # fmt: skip


def _show(planned: Planned) -> None:
    """Print the plan, table by table and process by process."""
    from rich import box
    from rich.table import Table

    from viviane.cli.console import output

    plan, machine = planned.plan, planned.machine
    where = Table(title="Tables", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("table", "kind", "processes", "GB each", "ms each"):
        where.add_column(name, justify="right" if "each" in name else "left")
    for one in plan.tables:
        ranks = one.ranks or tuple(range(plan.world_size))
        cost = planned.costs[ranks[0]][one.table]
        listed = "all" if len(ranks) == plan.world_size else ", ".join(map(str, ranks))
        milliseconds = f"{cost.milliseconds(machine):.4f}"
        kind = f"{one.kind}, {one.num_hot:,} hot" if one.num_hot else one.kind
        where.add_row(one.table, kind, listed, f"{cost.held / 1e9:.4f}", milliseconds)
    load = Table(title="Processes", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("process", "GB held", "MB read and written", "MB sent", "ms"):
        load.add_column(name, justify="right")
    for rank in range(plan.world_size):
        cost = planned.total(rank)
        numbers = (cost.held / 1e9, cost.memory / 1e6, (cost.wire + cost.sums) / 1e6, cost.milliseconds(machine))
        load.add_row(str(rank), *(f"{number:,.3f}" for number in numbers))
    console = output()
    console.print(where)
    console.print(load)
    typer.echo(f"expected: {planned.milliseconds:.3f} ms for tables and exchange, balance {planned.balance:.0%}")
