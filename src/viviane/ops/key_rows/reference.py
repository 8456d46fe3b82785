"""The plain truth of mapping keys to rows."""

from __future__ import annotations

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


def _replacement(keys: Tensor, rule: ColumnRule, null_row: int) -> Tensor:
    if rule.policy == HASH:
        return hashed(keys, rule.num_rows, rule.padding) + rule.base
    return torch.full_like(keys, rule.replacement if rule.policy == REPLACE else null_row)
