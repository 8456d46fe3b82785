"""Which keys are worth a row: decisions about the keys of a batch that have none yet.

Shapes: M entries whose keys have no row, duplicates allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from viviane.embedding.dynamic_config import CountAdmission, FilterAdmission, ProbabilityAdmission
from viviane.ops.hash_table import content_problem, make_index, stamp_of
from viviane.ops.key_rows import mix

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class ByCount:
    """Admits a key seen `count` times, all entries of a batch counted before it is asked."""

    def __init__(self, rule: CountAdmission, seed: int, device: torch.device) -> None:
        self.rule = rule
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._pending = make_index(self.rule.max_pending, order="stamp", with_uses=True, device=self._device)

    def admit(self, keys: Tensor, clock: int) -> Tensor:
        """Return for each entry whether its key gets a row, (M,), bool."""
        pending, stamp = self._pending, stamp_of(0, clock)
        rows = pending.touch(keys, stamp)
        # Where more keys wait than are remembered, the batch's last new ones are not counted.
        pending.insert(keys, rows, (rows < 0).nonzero().squeeze(1), stamp)
        assert pending.uses is not None
        admitted = (rows >= 0) & (pending.uses[rows.clamp_min(0)] >= self.rule.count)
        pending.erase(keys[admitted])
        return admitted

    def tensors(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        pending, rows = self._pending, self._pending.rows_in_use()
        assert pending.uses is not None
        parts = {"keys": pending.keys[rows], "rows": rows, "stamps": pending.stamps[rows], "uses": pending.uses[rows]}
        return {**parts, "free": pending.free_rows()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what was saved."""
        self._pending.restore(saved["keys"], saved["rows"], saved["stamps"], saved["uses"], saved["free"])

    def problem(self, saved: Mapping[str, Tensor], prefix: str) -> str | None:
        """Return the reason why saved tensors, of names that begin with the prefix, cannot be taken over."""
        keys, rows, stamps, uses, free = (saved[prefix + one] for one in ("keys", "rows", "stamps", "uses", "free"))
        found = content_problem(keys, rows, stamps, uses, free, self._pending.max_rows)
        return None if found is None else f"{prefix.rstrip('.')}: {found}"


class ByProbability:
    """Admits a key by a coin that depends on seed, key and clock: all entries of a key in a batch share it."""

    def __init__(self, rule: ProbabilityAdmission, seed: int, device: torch.device) -> None:
        self.rule = rule
        self._seed = seed

    def clear(self) -> None:
        """There is nothing to forget."""

    def admit(self, keys: Tensor, clock: int) -> Tensor:
        """Return for each entry whether its key gets a row, (M,), bool: mix(mix(key) + seed + clock * s) / 2^63 < p."""
        start = (self._seed + clock * 0x9E3779B97F4A7C15) % 2**63
        return mix(mix(keys) + start).to(torch.float64) * 2.0**-63 < self.rule.probability

    def tensors(self) -> dict[str, Tensor]:
        """Return what must be saved: nothing."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over nothing."""

    def problem(self, saved: Mapping[str, Tensor], prefix: str) -> str | None:
        """There is nothing that could be wrong."""
        return None


class ByFilter:
    """Admits a key whose smallest counter in a count-min sketch has reached `count`."""

    def __init__(self, rule: FilterAdmission, seed: int, device: torch.device) -> None:
        self.rule = rule
        self.counters = torch.zeros(rule.depth * rule.width, dtype=torch.int32, device=device)
        """(depth * width,): a counter of row d for mix(key + (d + 1) s) mod width."""

    def clear(self) -> None:
        """Forget what was seen."""
        self.counters.zero_()

    def admit(self, keys: Tensor, clock: int) -> Tensor:
        """Return for each entry whether its key gets a row, (M,), bool."""
        rows = torch.arange(self.rule.depth, device=keys.device).unsqueeze(1)
        places = (
            mix(keys.to(torch.int64).unsqueeze(0) + (rows + 1) * _GOLDEN) % self.rule.width + rows * self.rule.width
        )
        flat = places.reshape(-1)
        self.counters.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        found = self.counters[places].amin(0) if len(keys) else flat
        self.counters[flat] = self.counters[flat].clamp_max(self.rule.count)  # full is full: no overflow later
        return found >= self.rule.count

    def tensors(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        return {"counters": self.counters}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what was saved."""
        self.counters.copy_(saved["counters"])

    def problem(self, saved: Mapping[str, Tensor], prefix: str) -> str | None:
        """Return the reason why saved tensors, of names that begin with the prefix, cannot be taken over."""
        own = saved[prefix + "counters"]
        if own.shape == self.counters.shape and own.dtype == torch.int32:
            return None
        return f"{prefix}counters are {tuple(own.shape)} of {own.dtype}, not {tuple(self.counters.shape)} of int32"


Admission = ByCount | ByProbability | ByFilter


def make_admission(
    rule: CountAdmission | ProbabilityAdmission | FilterAdmission | None, seed: int, device: torch.device
) -> Admission | None:
    """Return the object that decides by a rule about keys on a device; None: every key gets a row."""
    if isinstance(rule, CountAdmission):
        return ByCount(rule, seed, device)
    if isinstance(rule, ProbabilityAdmission):
        return ByProbability(rule, seed, device)
    return ByFilter(rule, seed, device) if isinstance(rule, FilterAdmission) else None
