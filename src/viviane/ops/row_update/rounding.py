"""Stochastic rounding to 16 bits: the one definition that every implementation repeats bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def noise(seed: int, step: int, rows: Tensor, dim: int) -> Tensor:
    """Return 32 even random bits for each number of some rows, (U, dim), int64; all arithmetic modulo 2^32.

        x = seed + step * 0x9E3779B1 + row * 0x85EBCA77 + column * 0xC2B2AE3D
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        x =  x ^ (x >> 16)

    `row` counts from the table's first row and enters with its lower 32 bits.
    """
    columns = torch.arange(dim, device=rows.device, dtype=torch.int64)
    start = (seed + step * 0x9E3779B1) & _LOW
    x = (start + (rows.to(torch.int64).unsqueeze(1) & _LOW) * 0x85EBCA77 + columns * 0xC2B2AE3D) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def round_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Round float32 up or down to bfloat16: add 16 random bits below the last kept one, and cut.

    NaN and infinities stay what they are.
    """
    bits = values.view(torch.int32).to(torch.int64) & _LOW
    moved = (bits + (random & 0xFFFF)) & 0xFFFF0000
    kept = torch.where(torch.isfinite(values), moved, bits & 0xFFFF0000)
    kept = torch.where(torch.isnan(values), torch.full_like(kept, 0x7FC00000), kept)
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept).to(torch.int32)
    return signed.view(torch.float32).to(torch.bfloat16)


def round_float16(values: Tensor, random: Tensor) -> Tensor:
    """Round float32 up or down to float16.

    From 2^-14 on: 13 random bits below the last kept one, then the cut. Below, where float16 has steps of 2^-24:
    floor(|x| 2^24 + u) steps with u the lower 24 bits / 2^24. Beyond 65504 the value becomes 65504 with its sign;
    NaN stays.
    """
    bits = values.view(torch.int32).to(torch.int64) & _LOW
    moved = (bits + (random & 0x1FFF)) & 0xFFFFE000
    signed = torch.where(moved >= 1 << 31, moved - (1 << 32), moved).to(torch.int32)
    large = signed.view(torch.float32)
    steps = torch.floor(values.abs() * 2.0**24 + (random & 0xFFFFFF).to(torch.float32) * 2.0**-24)
    small = torch.copysign(steps * 2.0**-24, values)
    kept = torch.where(values.abs() < 2.0**-14, small, large).clamp(-65504.0, 65504.0)
    return torch.where(torch.isnan(values), values, kept).to(torch.float16)
