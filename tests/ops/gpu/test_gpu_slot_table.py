"""Slots planned by a GPU: the same state, bit for bit, as the reference's, on any sequence of batches."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from viviane.ops.dispatch import use_implementation
from viviane.ops.slot_table import ALWAYS_USED, HALF_LIFE, HEAT, HostRows, RowColumn, SlotRange, SlotTable
from viviane.ops.slot_table.reference import cooled

RANGES = [SlotRange(0, 3000, 0, 300), SlotRange(3000, 50, 300, 50), SlotRange(3050, 35_000, 350, 5000)]
WHOLE = 1  # has a slot for each row
PINNED = 2


class Model:
    """Tables, their slots, and rows that say which they are."""

    def __init__(self, device: torch.device, implementation: str, wide: int = 1) -> None:
        self.implementation, self.device = implementation, device
        self.table = SlotTable(RANGES, pinned=PINNED, device=device)
        slots = sum(one.num_slots for one in RANGES) + PINNED
        self.columns = {
            "weight": torch.zeros(slots, 5 * wide, dtype=torch.int32, device=device),
            "m": torch.zeros(slots, 5 * wide, dtype=torch.int32, device=device),
            "sum": torch.zeros(slots, dtype=torch.int32, device=device),
        }
        row_words = 12 * wide
        self.memory = [
            None
            if t == WHOLE
            else torch.arange(one.num_rows * row_words, dtype=torch.int32).view(-1, row_words).to(device) + t
            for t, one in enumerate(RANGES)
        ]
        parts = [
            RowColumn(self.columns["weight"], 0),
            RowColumn(self.columns["m"], 5 * wide),
            RowColumn(self.columns["sum"], 10 * wide),
        ]
        self.host = HostRows(0, self.memory, parts, 0)
        whole = RANGES[WHOLE]
        self.table.slot_of[whole.first_row : whole.first_row + 50] = torch.arange(301, 351, dtype=torch.int32)
        self.table.owner[300:350] = torch.arange(3000, 3050)
        self.table.used[300:350] = ALWAYS_USED

    def step(self, rows: torch.Tensor, stamp: int, guard: int, changed: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        rows = rows.to(self.device)
        slots = torch.empty_like(rows)
        with use_implementation(self.implementation):
            plan = self.table.admit(rows, slots, stamp=stamp, guard=guard)
            self.table.swap(plan, self.host)
            report = plan.report.tolist()
            if report[0]:
                places = slots[changed.to(self.device)]
                self.table.mark_dirty(places)
                for one in self.columns.values():
                    one[places.long()] += stamp
        return report, slots.cpu()

    def state(self) -> dict[str, torch.Tensor]:
        table = self.table
        found = {
            "slot_of": table.slot_of,
            "row_at": table.row_at,
            "owner": table.owner,
            "kept": table.kept,
            "used": table.used,
            "heat": table.heat,
            "dirty": table.dirty,
        }
        found |= {"counts": table.counts, "moved": self.host.moved, **self.columns}
        found |= {f"memory {t}": one for t, one in enumerate(self.memory) if one is not None}
        return {name: one.cpu() for name, one in found.items()}


def check_places(model: Model) -> None:
    """Each place is of one row; the copy of a row in a slot that is not changed is at its place."""
    table = model.table
    places = table.places_of(torch.arange(table.num_rows, device=model.device))
    for t, one in enumerate(RANGES):
        if t == WHOLE:
            continue
        inside = slice(one.first_row, one.first_row + one.num_rows)
        own = places[inside]
        assert torch.equal(own.sort().values.cpu(), torch.arange(inside.start, inside.stop))
        assert torch.equal(table.row_at[own].cpu(), torch.arange(inside.start, inside.stop, dtype=torch.int32))
        slots = torch.arange(one.first_slot, one.first_slot + one.num_slots, device=model.device)
        clean = slots[(table.owner[slots] >= 0) & (table.dirty[slots] == 0)]
        copies = model.memory[t][places[table.owner[clean]] - one.first_row]
        rows = torch.cat([part[clean].reshape(len(clean), part[0].numel()) for part in model.columns.values()], 1)
        assert torch.equal(copies[:, : rows.shape[1]], rows)


def draw(rng: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    parts = [one.first_row + (torch.rand(size, generator=rng) ** 4 * one.num_rows).to(torch.int64) for one in RANGES]
    parts.append(torch.randint(38_050, 38_052, (3,), generator=rng))  # pinned
    both = torch.cat(parts)
    return both[torch.randperm(len(both), generator=rng)].to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [1, 120])
def test_the_state_is_that_of_the_reference(device: torch.device, dtype: torch.dtype, wide: int) -> None:
    truth, found = Model(torch.device("cpu"), "reference", wide), Model(device, "gpu", wide)
    rng = torch.Generator().manual_seed(wide)
    ended = []
    for stamp in range(1, 9 if wide == 1 else 4):
        size = [40, 130, 0, 3000, 250][stamp % 5]
        rows = draw(rng, size, dtype)
        guard = max(1, stamp - stamp % 3)
        changed = torch.randperm(len(rows), generator=rng)[: len(rows) // 2]
        report, slots = truth.step(rows, stamp, guard, changed)
        assert found.step(rows, stamp, guard, changed)[0] == report
        ended.append(report[0])
        if report[0]:
            own = found.state()
            assert torch.equal(own["owner"][slots.long()], rows.long())
            check_places(found)
            assert all(torch.equal(one, own[name]) for name, one in truth.state().items()), stamp
    assert wide > 1 or (0 in ended and 1 in ended)


def test_rows_keep_what_was_added_to_them_wherever_they_are(device: torch.device) -> None:
    model = Model(device, "gpu")
    first = [None if one is None else one.clone() for one in model.memory]
    added: dict[int, int] = {}
    rng = torch.Generator().manual_seed(5)
    for stamp in range(1, 8):
        rows = draw(rng, 200, torch.int32).unique()
        report, slots = model.step(rows, stamp, stamp, torch.arange(len(rows)))
        assert report[0] == 1
        assert len(slots.unique()) == len(rows)
        for row in rows.tolist():
            added[row] = added.get(row, 0) + stamp
    every = torch.arange(model.table.num_rows, device=device)
    slot_of, place_of = (found.cpu() for found in (model.table.slots_of(every), model.table.places_of(every)))
    for row, amount in added.items():
        t = next((t for t, one in enumerate(RANGES) if one.first_row <= row < one.first_row + one.num_rows), None)
        if t is None:
            continue
        slot, at, place = int(slot_of[row]), row - RANGES[t].first_row, int(place_of[row]) - RANGES[t].first_row
        start = torch.zeros(12, dtype=torch.int32) if first[t] is None else first[t][at].cpu()
        if slot >= 0:
            parts: list[Any] = [one[slot].view(-1).cpu() for one in model.columns.values()]
            assert torch.equal(torch.cat(parts), start[:11] + amount)
        else:
            assert torch.equal(model.memory[t][place].cpu()[:11], start[:11] + amount)


@pytest.mark.parametrize("implementation", ["gpu", "reference"])
def test_a_batch_may_be_planned_before_the_rows_of_the_last_one_have_moved(
    device: torch.device, implementation: str
) -> None:
    models = [Model(device, implementation) for _ in range(2)]
    rng = torch.Generator().manual_seed(3)
    batches = [draw(rng, 60, torch.int32).to(device) for _ in range(8)]
    for late, model in zip((False, True), models, strict=True):
        waiting = []
        with use_implementation(implementation):
            for stamp, rows in enumerate(batches, 1):
                slots = torch.empty_like(rows)
                plan = model.table.admit(rows, slots, stamp=stamp, guard=max(1, stamp - 1))
                waiting.append((plan, slots, stamp))
                while len(waiting) > int(late):
                    moved, places, number = waiting.pop(0)
                    model.table.swap(moved, model.host)
                    model.table.mark_dirty(places)
                    for one in model.columns.values():
                        one[places.long()] += number
            if waiting:
                model.table.swap(waiting[0][0], model.host)
                for one in model.columns.values():
                    one[waiting[0][1].long()] += waiting[0][2]
                model.table.mark_dirty(waiting[0][1])
    truth, found = (model.state() for model in models)
    assert all(torch.equal(one, found[name]) for name, one in truth.items())
    assert found["moved"][1] > 0


def test_replayed_plans_give_the_bits_of_launched_ones(device: torch.device) -> None:
    """On a stream of their own plans of one size are recorded; on the default stream all are launched."""
    truth, found = Model(torch.device("cpu"), "reference"), Model(device, "gpu")
    rng = torch.Generator().manual_seed(11)
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        for stamp in range(1, 49):
            rows = draw(rng, [120, 120, 30][stamp % 3] + 20 * (stamp > 24), torch.int64)
            changed = torch.randperm(len(rows), generator=rng)[: len(rows) // 2]
            guard = max(1, stamp - stamp % 2)
            report, _ = truth.step(rows, stamp, guard, changed)
            assert found.step(rows, stamp, guard, changed)[0] == report, stamp
            own = found.state()
            assert all(torch.equal(one, own[name]) for name, one in truth.state().items()), stamp
    # Two sizes, each in the memory of two plans; the graphs of the smaller memory before are gone.
    assert len(found.table.scratch.graphs) == (4 if device.type == "cuda" else 0)


def test_a_batch_that_does_not_fit_changes_nothing(device: torch.device) -> None:
    model = Model(device, "gpu")
    model.step(torch.arange(200), 1, 1, torch.arange(200))
    before = model.state()
    report, _ = model.step(torch.arange(150, 400), 2, 1, torch.arange(0))
    assert report == [0, 200, 200, 0, 0, 200, 50, 0]
    after = model.state()
    changes = {"used", "heat", "counts"}  # the batch did ask for rows that were there
    assert all(torch.equal(one, before[name]) for name, one in after.items() if name not in changes)
    report, slots = model.step(torch.arange(150, 400), 3, 3, torch.arange(0))
    assert report[0] == 1
    assert torch.equal(model.table.owner.cpu()[slots], torch.arange(150, 400))


def test_the_least_used_leave_first_and_of_these_the_longest_unused(device: torch.device) -> None:
    model = Model(device, "gpu")
    none = torch.arange(0)
    for stamp, first in ((1, 0), (100, 100), (200, 200)):
        model.step(torch.arange(100) + first, stamp, stamp, none)
    model.step(torch.arange(0, 50), 201, 201, none)  # half of the oldest are used again
    model.step(torch.arange(1000, 1100), 202, 202, none)
    held = model.table.owner.cpu()[:300].sort().values
    assert torch.equal(held, torch.cat([torch.arange(50), torch.arange(150, 300), torch.arange(1000, 1100)]))


def test_heat_halves_and_stays_in_32_bits(device: torch.device) -> None:
    heat, ages = torch.tensor([512, 512, 512, 1 << 18, 512]), torch.tensor([0, 256, 512, 1024, 512 * 40])
    assert cooled(heat, ages).tolist() == [512, 384, 256, 1 << 16, 0]
    model, rows = Model(device, "gpu"), torch.arange(3)
    steady = torch.tensor([0], dtype=torch.int32)
    for _ in range(20_000):
        steady = cooled(steady, torch.ones_like(steady)) + HEAT
    assert steady.item() * 2 * HALF_LIFE < 2**31
    for stamp in range(1, 4):
        model.step(torch.cat([rows, rows]), stamp, stamp, torch.arange(0))
    assert model.table.heat[:3].tolist() == [1535 - 1] * 3  # each batch counts a row once


def test_a_changed_row_that_leaves_exchanges_places_with_the_row_that_comes(device: torch.device) -> None:
    model, every = Model(device, "gpu"), torch.arange(300)
    model.step(every, 1, 1, torch.arange(100, 300))
    model.step(torch.arange(1000, 1300), 2, 2, torch.arange(0))
    check_places(model)
    places = model.table.places_of(torch.arange(3000, device=device)).cpu()
    exchanged = torch.arange(3000)
    exchanged[100:300], exchanged[1100:1300] = torch.arange(1100, 1300), torch.arange(100, 300)
    assert torch.equal(places, exchanged)  # rows 0 to 99 were not changed: their copies were still at their places
    assert model.host.moved.tolist() == [600, 200]
    model.table.clear(RANGES[0])
    model.table.put_in_order(RANGES[0])
    assert torch.equal(model.table.places_of(torch.arange(3000, device=device)).cpu(), torch.arange(3000))
