"""Values beside the index on a GPU: beginnings of new rows, and the last of several values of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from viviane.ops.hash_table.gpu_value_kernels import assign_kernel, draw_kernel, latest_kernel
from viviane.ops.hash_table.marks import Marks as AnyMarks
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

LAWS: Final = {"uniform": 0, "normal": 1, "constant": 2}
_BLOCK: Final = 1024
_PROGRAMS: Final = 1024
_TILE: Final = 2048  # numbers a program copies


def start_rows(
    weight: Tensor | None,
    state: Mapping[str, Tensor],
    beginnings: Mapping[str, float],
    rows: Tensor,
    keys: Tensor,
    law: tuple[str, float, float],
    seed: int,
    entries: Tensor | None,
    count: Tensor | None,
) -> None:
    """Begin rows, of the keys at `entries`; `count` says on the device how many there are."""
    wide = [name for name, part in state.items() if part.dim() == 2]
    single = [name for name, part in state.items() if part.dim() == 1]
    tables: list[Tensor | None] = [*(state[name] for name in wide), None, None]
    parts = [*tables[:2], state[single[0]] if single else None]
    values = [*[*(beginnings[name] for name in wide), 0.0, 0.0][:2], beginnings[single[0]] if single else 0.0]
    shown = weight if weight is not None else next((part for part in parts if part is not None), None)
    if shown is None or not len(rows):
        return
    dim = next((part.shape[1] for part in (weight, *parts[:2]) if part is not None), 1)
    kind, a, b = law
    numbers = _numbers(a, b - a if kind == "uniform" else b, seed, shown.device)
    programs = min(_PROGRAMS, ceil_div(len(rows) * dim, _BLOCK))
    with on_device(shown):
        draw_kernel[(programs,)](
            weight, *parts, *values, rows, entries, keys, numbers[0], numbers[1], len(rows), count, dim=dim,
            kind=LAWS[kind], block=_BLOCK, num_warps=4,
        )  # fmt: skip


_kept: dict[tuple[float, float, int, torch.device], tuple[Tensor, Tensor]] = {}


def _numbers(a: float, b: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return seed and numbers on the device; kept, since a copy there waits for it."""
    known = _kept.get((a, b, seed, device))
    if known is None:
        signed = seed - 2**64 if seed >= 2**63 else seed
        rounded = torch.tensor([a, b], dtype=torch.float32).to(torch.float64)
        known = _kept[a, b, seed, device] = (torch.tensor([signed], device=device), rounded.to(device))
    return known


def assign_marked(table: Tensor, rows: Tensor, values: Tensor, latest: Tensor, stride: int, call: int) -> None:
    """Give rows the values of the entries that are marked as their last ones."""
    count, dim = len(rows), table.shape[1]
    if count and dim:
        block = max(1, min(256, _TILE // power_of_two(dim)))
        with on_device(table):
            assign_kernel[(ceil_div(count, block),)](
                table, rows, values, latest, call, count, stride=stride, dim=dim, width=power_of_two(dim), block=block,
                num_warps=1 if dim <= _TILE else 4,
            )  # fmt: skip


class Marks(AnyMarks):
    """Records which entry of a row is its last, without sorting: a mark a row, (R,), int64, that only rises."""

    def __init__(self) -> None:
        self._marks: Tensor | None = None
        self._call = 0

    def assign(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Give rows the values of their last entries, rounded to their type; rows below zero are passed over."""
        if not len(rows) or not table.shape[1]:
            return
        if self._marks is None or len(self._marks) < len(table):
            self._marks = torch.zeros(power_of_two(len(table)), dtype=torch.int64, device=table.device)
        self._call += 1
        with on_device(table):
            latest_kernel[(ceil_div(len(rows), 256),)](rows, self._marks, self._call, len(rows), block=256)
        assign_marked(table, rows, values, self._marks, 1, self._call)
