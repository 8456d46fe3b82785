"""The plain truth of mapping keys to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.key_rows import HASH, RAISE, REPLACE, ColumnRule, KeyRules, hashed


def key_rows(keys: Tensor, rules: KeyRules, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the storage rows of keys, (N, F), and the record of the first key out of range under RAISE."""
    own = keys.to(torch.int64) if columns is None else keys.index_select(1, columns).to(torch.int64)
    rows = torch.empty_like(own)
    wrong = torch.zeros_like(own, dtype=torch.bool)
    for f, rule in enumerate(rules.columns):
        column = own[:, f]
        bad = (column < 0) | (column >= rule.num_rows)
        good = torch.where(column == rule.padding, rules.null_row, column + rule.base)
        rows[:, f] = torch.where(bad, _replacement(column, rule, rules.null_row), good)
        wrong[:, f] = bad if rule.policy == RAISE else False
    record = torch.zeros(3, dtype=torch.int64, device=keys.device)
    places = wrong.flatten().nonzero()
    if len(places):
        place = places[0]
        record = torch.cat([torch.ones_like(place), place, own.flatten()[place]])
    return rows.to(rules.row_dtype).contiguous(), record


def bag_rows(keys: Sequence[Tensor], offsets: Sequence[Tensor], rules: KeyRules) -> tuple[Tensor, Tensor, Tensor]:
    """Return the storage rows of the keys of bags, (N,), their offsets, and the record of the first out of range."""
    rows, starts = [], [offsets[0][:1].to(torch.int64)]
    first, start = torch.zeros(3, dtype=torch.int64, device=offsets[0].device), 0
    for own, ends, rule in zip(keys, offsets, rules.columns, strict=True):
        found, record = key_rows(own.unsqueeze(1), KeyRules([rule], rules.null_row, own.device))
        record[1] += start * record[0]
        first = torch.where(first[0] != 0, first, record)
        rows.append(found.view(-1).to(rules.row_dtype))
        starts.append(ends[1:].to(torch.int64) + start)
        start += len(own)
    return torch.cat(rows), torch.cat(starts), first


def _replacement(keys: Tensor, rule: ColumnRule, null_row: int) -> Tensor:
    if rule.policy == HASH:
        return hashed(keys, rule.num_rows, rule.padding) + rule.base
    return torch.full_like(keys, rule.replacement if rule.policy == REPLACE else null_row)
