"""The slots of tables in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.slot_table import FREE, HALF_LIFE, HEAT, OLDEST, HostRows, SlotPlan, SlotRange, SlotTable


def admit(table: SlotTable, rows: Tensor, slots: Tensor, stamp: int, guard: int, plan: SlotPlan) -> None:
    """Give the rows of a batch slots; see `SlotTable.admit`."""
    rows = rows.to(torch.int64)
    found = table.slots_of(rows)
    absent = found < 0
    hits = torch.unique(found[~absent])
    hits = hits[table.used[hits] < stamp]
    table.heat[hits] = cooled(table.heat[hits], stamp - table.used[hits]) + HEAT
    table.used[hits] = stamp
    table.counts += torch.stack([torch.tensor(len(rows)), absent.sum().cpu()]).to(table.device)
    wanted = torch.unique(table.places_of(rows[absent]))
    own = [wanted[(wanted >= r.first_row) & (wanted < r.first_row + r.num_rows)] for r in table.ranges]
    ages = [_ages(table, one, stamp, guard) for one in table.ranges]
    needs = [len(one) for one in own]
    fits = all(need <= int((age > 0).sum()) for need, age in zip(needs, ages, strict=True))
    report = [int(fits), sum(needs), *needs, *(int((age == 0).sum()) for age in ages)]
    plan.report.copy_(torch.tensor(report))
    plan.starts.copy_(torch.tensor([0, *torch.tensor(needs).cumsum(0).tolist()]))
    if not fits:
        return
    for places, part, age, start in zip(own, table.ranges, ages, plan.starts.tolist(), strict=False):
        taken = _taken(age, len(places)) + part.first_slot
        new, old, kept = table.row_at[places].to(torch.int64), table.owner[taken], table.kept[taken].to(torch.int64)
        dirty = (table.dirty[taken] > 0) & (old >= 0)
        where = slice(start, start + len(places))
        plan.new_rows[where], plan.new_places[where], plan.new_slots[where] = new, places, taken
        plan.old_rows[where], plan.is_dirty[where] = old, dirty.to(torch.uint8)
        leaves = old >= 0
        table.slot_of[old[leaves]] = (-1 - torch.where(dirty, places, kept)[leaves]).to(torch.int32)
        table.slot_of[new] = (taken + 1).to(torch.int32)
        table.row_at[places[dirty]], table.row_at[kept[dirty]] = old[dirty].to(torch.int32), new[dirty].to(torch.int32)
        table.kept[taken] = torch.where(dirty, kept, places).to(torch.int32)
        table.owner[taken], table.used[taken], table.heat[taken] = new, stamp, HEAT
        table.dirty[taken] = dirty.to(torch.uint8)  # what is at the place that it keeps is not this row
    slots.copy_(table.slot_of[rows] - 1)


def cooled(heat: Tensor, age: Tensor) -> Tensor:
    """Return heat after a number of batches: halved each half-life, in a line between."""
    return (heat >> (age // HALF_LIFE).clamp(0, 31)) * (2 * HALF_LIFE - age % HALF_LIFE) // (2 * HALF_LIFE)


def _ages(table: SlotTable, part: SlotRange, stamp: int, guard: int) -> Tensor:
    inside = slice(part.first_slot, part.first_slot + part.num_slots)
    used, owner = table.used[inside], table.owner[inside]
    warmth = cooled(table.heat[inside], stamp - used).to(torch.float32)
    level = (warmth.view(torch.int32) >> 18) - ((127 + 7) << 5)
    ages = OLDEST - level.clamp(0, OLDEST - 1)
    ages[used >= guard] = 0
    ages[owner < 0] = FREE
    return ages


def _taken(age: Tensor, count: int) -> Tensor:
    """Return which slots of a table to take: free ones, then older ones than the last of them, then as old ones."""
    taken = torch.sort(age, descending=True, stable=True).indices[:count]
    own = age[taken]
    kind = torch.where(own == FREE, 0, torch.where(own > own[-1:], 1, 2))
    return taken[torch.argsort(kind * len(age) + taken)]


def swap(table: SlotTable, plan: SlotPlan, host: HostRows) -> None:
    """Move rows between slots and host memory; see `SlotTable.swap`."""
    if not plan.report[0]:
        return
    starts = plan.starts.tolist()
    for t, memory in enumerate(host.memory, host.first_table):
        own = slice(starts[t], starts[t + 1])
        if memory is None or own.start == own.stop:
            continue
        at, places = plan.new_slots[own] - host.first_slot, plan.new_places[own] - table.ranges[t].first_row
        dirty = plan.is_dirty[own] > 0
        for column in host.columns:
            slots = column.slots.view(torch.int32).view(len(column.slots), -1)
            rows = memory[:, column.offset : column.offset + column.width]
            fresh = rows[places]
            rows[places[dirty]] = slots[at[dirty]]
            slots[at] = fresh
        host.moved += torch.stack([torch.tensor(len(places), device=dirty.device), dirty.sum()])


def mark_dirty(dirty: Tensor, slots: Tensor) -> None:
    """Note changes; see `SlotTable.mark_dirty`."""
    dirty[slots.to(torch.int64)] = 1
