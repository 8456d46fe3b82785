"""A dynamic table's keys and what belongs to them, as callers see them: export, import, saved state.

Shapes: K keys, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from viviane.core.errors import CheckpointError
from viviane.embedding.dynamic_store import DynamicStore
from viviane.ops.hash_table import content_problem

_CLOCK = 0xFFFFFFFF


@dataclass(frozen=True)
class DynamicContent:
    """Keys and what belongs to them.

    Args:
        keys: (K,), int64, distinct.
        weight: (K, D).
        scores: (K,), int64: by the table's `eviction`, the larger the longer a key stays: clock of last use ("lru"),
            epoch * 2^32 + clock ("epoch_lru"), uses ("lfu"), epoch * 2^32 + uses ("epoch_lfu"), yours ("custom").
        clocks: (K,), int64: the table's clock at each key's last use.
        state: optimizer state by name, each (K, D) or (K,); empty: it starts over.
    """

    keys: Tensor
    weight: Tensor
    scores: Tensor
    clocks: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)


def _scores(table: DynamicStore, rows: Tensor) -> Tensor:
    stamps, uses, eviction = table.index.stamps[rows], table.index.uses, table.table.eviction
    if uses is None:
        return stamps if eviction == "epoch_lru" else stamps & _CLOCK
    if eviction == "epoch_lfu":
        return (stamps & ~_CLOCK) + uses[rows].clamp_max(_CLOCK)
    return uses[rows]


def export_keys(table: DynamicStore, since: int | None, min_score: int | None) -> DynamicContent:
    """See `DynamicTable.export`."""
    rows = table.index.rows_in_use()
    if since is not None:
        rows = rows[(table.index.stamps[rows] & _CLOCK) > since]
    scores = _scores(table, rows)
    if min_score is not None:
        rows, scores = rows[scores >= min_score], scores[scores >= min_score]
    state = {name: part[rows] for name, part in table.state.items()}
    return DynamicContent(table.index.keys[rows], table.weight[rows], scores, table.index.stamps[rows] & _CLOCK, state)


def import_keys(table: DynamicStore, content: DynamicContent) -> None:
    """See `DynamicTable.import_`."""
    where = f"table {table.table.name!r}"
    parts = {"keys": content.keys, "scores": content.scores, "weight": content.weight, **content.state}
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.layout is not torch.strided or part.is_meta or not part.dim():
            raise CheckpointError("not a dense tensor in memory", where=f"{where}, {name}", value=type(part).__name__)
    count = len(content.keys)
    for name in ("keys", "scores"):
        if parts[name].shape != (count,) or parts[name].dtype not in (torch.int32, torch.int64):
            value = f"{tuple(parts[name].shape)} of {parts[name].dtype}"
            raise CheckpointError("not whole numbers, one per key", where=f"{where}, {name}", value=value)
    if content.state and content.state.keys() != table.state.keys():
        raise CheckpointError(
            "another optimizer's state", where=where, value=", ".join(content.state), allowed=", ".join(table.state)
        )
    for name, own in {"weight": table.weight, **(table.state if content.state else {})}.items():
        given = content.weight if name == "weight" else content.state[name]
        if given.shape != (count, *own.shape[1:]):
            raise CheckpointError(
                "the shape differs", where=f"{where}, {name}", value=tuple(given.shape),
                allowed=str((count, *own.shape[1:])),
            )  # fmt: skip
    keys, scores = content.keys.to(table.device), content.scores.to(table.device)
    distinct, times = torch.unique(keys, return_counts=True)
    if len(distinct) != count:
        raise CheckpointError("a key occurs twice", where=f"{where}, keys", value=int(distinct[times > 1][0]))
    rows = table.find_or_insert(keys, scores if table.table.eviction == "custom" else None)
    table.reset_state(rows)
    table.weight[rows] = content.weight.to(table.weight)
    for name, part in content.state.items():
        table.state[name][rows] = part.to(table.device)
    if table.index.uses is not None and table.table.eviction != "custom":
        table.index.uses[rows] = scores & _CLOCK if table.table.eviction == "epoch_lfu" else scores


def state_entries(table: DynamicStore, prefix: str, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Return the table's part of a state_dict: all that a later run needs to continue bit for bit.

    Args:
        table: the table.
        prefix: of the names.
        rows: only the keys in these rows, rising; None: all keys. What does not belong to keys is complete.
    """
    rows = table.index.rows_in_use() if rows is None else rows
    parts = {"keys": table.index.keys[rows], "rows": rows, "weight": table.copied(table.weight, rows)}
    parts |= {f"state.{name}": table.copied(part, rows) for name, part in table.state.items()}
    parts |= {"stamps": table.index.stamps[rows], "free": table.index.free_rows()}
    if table.index.uses is not None:
        parts["uses"] = table.index.uses[rows]
    if table.admission is not None:
        parts |= {f"admission.{name}": part for name, part in table.admission.tensors().items()}
    parts["counters"] = torch.tensor([table.clock, table.epoch, table.num_steps])
    return {prefix + name: part for name, part in parts.items()}


def entry_names(table: DynamicStore) -> list[str]:
    """Return the names of what `state_entries` has, without prefix: it copies all rows, this nothing."""
    names = ["keys", "rows", "weight", *(f"state.{name}" for name in table.state), "stamps", "free"]
    names += [] if table.index.uses is None else ["uses"]
    names += [] if table.admission is None else [f"admission.{name}" for name in table.admission.tensors()]
    return [*names, "counters"]


def misfits(table: DynamicStore, given: Mapping[str, Tensor], *, weights_only: bool = False) -> list[str]:
    """Return the reasons, one line each, why saved tensors, without prefix, cannot replace the table's content."""
    expected = entry_names(table)
    if weights_only:
        expected = [name for name in expected if not name.startswith(("state.", "admission."))]
    missing = [f"{name} is missing" for name in expected if name not in given]
    if missing:
        return missing
    count, lines = len(given["keys"]), []
    for name, part in {"weight": table.weight, **{f"state.{n}": s for n, s in table.state.items()}}.items():
        shape = (count, *part.shape[1:])
        if name in expected and given[name].shape != shape:
            lines.append(f"{name} has shape {tuple(given[name].shape)}, the table's is {shape}")
    if count + len(given["free"]) > table.index.max_rows:
        lines.append(f"keys: {count} do not fit into max_capacity {table.index.max_rows}")
    if lines:
        return lines
    uses = None if table.index.uses is None else given["uses"]
    wrong = [
        content_problem(given["keys"], given["rows"], given["stamps"], uses, given["free"], table.index.max_rows),
        None if table.admission is None or weights_only else table.admission.problem(given, "admission."),
        None if _are_counters(given["counters"]) else "counters are not three whole numbers from 0",
    ]
    return [line for line in wrong if line is not None]


def _are_counters(counters: Tensor) -> bool:
    return counters.shape == (3,) and counters.dtype == torch.int64 and int(counters.min()) >= 0


def load_entries(
    table: DynamicStore, prefix: str, given: Mapping[str, Tensor], missing_keys: list[str], error_msgs: list[str]
) -> set[str]:
    """Replace the table's content, as `nn.Module.load_state_dict` asks; returns the accepted keys."""
    table.check_released("load")
    expected = [prefix + name for name in entry_names(table)]
    missing = [name for name in expected if name not in given]
    missing_keys.extend(missing)
    if not missing:
        own = {name.removeprefix(prefix): given[name] for name in expected}
        wrong = misfits(table, own)
        error_msgs.extend(prefix + line for line in wrong)
        if not wrong:
            table.replace(own)
    return set(expected)
