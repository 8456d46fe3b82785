"""The steps of a program: kernels and their operands, side by side in memory that the native call reads."""

from __future__ import annotations

import ctypes
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.embedding.lookup import OneHotPlan
from viviane.ops.int8_rows import is_int8

_OPERANDS: Final = 2
_ROOM: Final = 16
"""Words of a step: tickets taken, tickets, operands."""
_MOST_STEPS: Final = 512
_NEVER: Final = 2**63 - 1

Packed: TypeAlias = dict[tuple[int, torch.Size], tuple[Tensor, Any]]
"""Weights, which stay alive, and what `viviane.ops.linear` packs them into."""


class Steps:
    """Writes steps, and runs them.

    Args:
        capacity: most rows of a batch.
        id_dtype: of the ids of batches.
        packed: weights as products read them, by the address of the weight; programs of one model share them.
        rounds_layers: whether large layers are computed in 8 bits.
    """

    def __init__(self, capacity: int, id_dtype: torch.dtype, packed: Packed, *, rounds_layers: bool = False) -> None:
        from viviane.ops.linear.cpu import ROWS
        from viviane.ops.programs.cpu import kernels_key, program_kernel

        self._capacity, self._id_dtype, self._key = capacity, id_dtype, kernels_key()
        self._packed, self._rounds_layers = packed, rounds_layers
        self._calls = np.zeros((_MOST_STEPS, _ROOM), np.int64)
        self._table = np.zeros((_MOST_STEPS, 2), np.int64)
        self._first_wrong = np.zeros(_MOST_STEPS, np.int64)
        self._driver, self._block = program_kernel(self._key), ROWS
        self._run = np.array([0, 1, 0, 0], np.int64)
        self._kept: list[Any] = []
        self._sizes: list[int] = []
        self._dense: list[int] = []
        self._keys: list[int] = []
        self._blocks: list[int] = []
        self.count = 0

    def keep(self, *things: Any) -> None:
        """Keep what steps have addresses of."""
        self._kept += things

    def _add(self, kernel: Any, operands: list[int], size_at: int = 0) -> int:
        """Write a step, and return where its operands begin among all words."""
        if self.count == _MOST_STEPS:
            raise ConfigError("the model has too many layers for a program", allowed=f"{_MOST_STEPS} steps")
        step = self.count
        self._calls[step, 1] = 1
        self._calls[step, _OPERANDS : _OPERANDS + len(operands)] = operands
        self._table[step] = kernel.address, self._calls.ctypes.data + step * _ROOM * 8
        self.keep(kernel)
        first = step * _ROOM + _OPERANDS
        self._sizes.append(first + size_at)
        self.count += 1
        return first

    def lookup(self, plan: OneHotPlan, out: int, stride: int) -> None:
        """Look up one-hot features: keys to rows, rows to columns of `out`."""
        from viviane.ops.embedding_bag.cpu import copy_kernel, scale_kernel
        from viviane.ops.int8_rows.cpu import gather_kernel as int8_kernel
        from viviane.ops.key_rows.cpu import key_kernel
        from viviane.ops.native.numbers import KINDS

        rules, weight, chosen = plan.row_map.rules, plan.storage.weight, plan.row_map.columns
        features, dim = len(rules.columns), plan.storage.dim
        table, places = rules.table.t().contiguous(), (ctypes.c_int64 * len(plan.places))(*plan.places)
        rows = torch.empty(self._capacity * features, dtype=rules.row_dtype)
        self.keep(table, rows, chosen, weight, places)
        first_wrong = self._first_wrong.ctypes.data + 8 * len(self._keys)
        key_run = key_kernel(self._id_dtype.itemsize, rows.element_size(), chosen is None, self._key)
        picked = 0 if chosen is None else chosen.data_ptr()
        operands = [0, 0, 1, picked, table.data_ptr(), rows.data_ptr(), 0, features, rules.null_row, first_wrong]
        self._keys.append(self._add(key_run, operands, size_at=6))
        if is_int8(weight):
            run = int8_kernel(dim, weight.shape[1], KINDS[torch.float32], self._key)
        elif weight.dtype == torch.float32:
            run = copy_kernel(dim * 4, self._key)
        else:
            run = scale_kernel(dim, KINDS[weight.dtype], KINDS[torch.float32], self._key)
        operands = [weight.data_ptr(), rows.data_ptr(), rows.element_size(), out, ctypes.addressof(places), 0, 0]
        self._add(run, [*operands, features, stride, 4, 0], size_at=6)

    def copy(self, source: int | None, source_stride: int, out: int, stride: int, width: int) -> None:
        """Copy columns of float32; from the batch's dense numbers where `source` is None."""
        from viviane.ops.programs.cpu import columns_kernel

        operands = [0, source or 0, 4 * source_stride, out, 4 * stride, 4 * width]
        first = self._add(columns_kernel(self._key), operands)
        if source is None:
            self._dense.append(first + 1)

    def linear(
        self, x: int | None, stride: int, weight: Tensor, bias: Tensor, out: int, *, relu: bool = False,
        crossed: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Add a fully connected layer, of the batch's dense numbers where x is None; `crossed`: x_0 and x_l."""
        kernel, operands = self._product(x, stride, weight, bias, out, relu, [*(crossed or (0, 0))])
        first = self._add(kernel, operands)
        self._blocks.append(first - _OPERANDS + 1)
        if x is None:
            self._dense.append(first + 1)

    def _product(
        self, x: int | None, stride: int, weight: Tensor, bias: Tensor, out: int, relu: bool, crossed: list[int]
    ) -> tuple[Any, list[int]]:
        """Return the kernel of a fully connected layer, and its operands."""
        from viviane.ops.linear.cpu import linear_kernel, linear_operands, pack
        from viviane.ops.linear.cpu_int8 import (
            int8_kernel,
            int8_operands,
            is_worth_it,
            pack_int8,
            rounded_row_bytes,
            with_biases,
        )

        rounds, place = self._rounds_layers and is_worth_it(weight), (weight.data_ptr(), weight.shape)
        if place not in self._packed:
            self._packed[place] = weight, pack_int8(weight) if rounds else pack(weight)
        packed = self._packed[place][1]
        if rounds:
            packed = with_biases(packed, bias)
            room = torch.empty(self._capacity * rounded_row_bytes(weight.shape[1]), dtype=torch.uint8)
            self.keep(packed, room)
            shape = (weight.shape[0], weight.shape[1])
            return int8_kernel(self._key), int8_operands(
                0, x or 0, stride, packed, out, len(bias), shape, relu, self._block, crossed, room.data_ptr()
            )  # fmt: skip
        bias = bias.detach().contiguous()
        self.keep(packed, bias)
        operands = linear_operands(0, x or 0, stride, packed, bias, out, len(bias), relu, self._block, crossed)
        return linear_kernel(self._key), operands

    def add(self, a: int | None, a_stride: int, b: int | None, b_stride: int, out: int, width: int) -> None:
        """Add two tensors' rows; None stands for the batch's dense numbers."""
        from viviane.ops.programs.cpu import add_kernel

        first = self._add(add_kernel(self._key), [0, a or 0, 4 * a_stride, b or 0, 4 * b_stride, out, width])
        self._dense += [first + at for at, one in ((1, a), (3, b)) if one is None]

    def scaled_vectors(self, x: int | None, stride: int, weight: Tensor, out: int, out_stride: int) -> None:
        """Add rows of W (s, d), each times one of x's s numbers."""
        from viviane.ops.programs.cpu import scaled_vectors_kernel

        weight = weight.detach().contiguous()
        self.keep(weight)
        operands = [0, x or 0, 4 * stride, weight.data_ptr(), out, 4 * out_stride, *weight.shape]
        first = self._add(scaled_vectors_kernel(self._key), operands)
        if x is None:
            self._dense.append(first + 1)

    def pair_sums(self, vectors: int, sums: int, out: int, shape: tuple[int, int]) -> None:
        """Add sums over all pairs of vectors, shape (S, D); `sums` has room for (C, D)."""
        from viviane.ops.pair_sums.cpu import sum_kernel

        self._add(sum_kernel(shape[1], self._key), [0, shape[0], vectors, sums, out])

    def interaction(
        self, dense: int, embeddings: int, out: int, shape: tuple[int, int], *, pad: bool, itself: bool
    ) -> None:
        """Add dot products of all pairs of vectors; shape (S, D) of the embeddings, dense 0 where there is none."""
        from viviane.ops.dot_interaction.cpu import dots_kernel

        front = int(dense != 0)
        self._add(dots_kernel(shape[0] + front, front, shape[1], pad, itself, self._key), [0, dense, embeddings, out])

    def probabilities(self, z: int, stride: int, out: int, out_stride: int, width: int, shift: float) -> None:
        """Add probabilities of logits."""
        from viviane.ops.probabilities.cpu import bits_of, probabilities_kernel

        operands = [0, z, 4 * stride, out, 4 * out_stride, width, bits_of(shift)]
        self._add(probabilities_kernel(self._key), operands)

    # Running ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Mark the program as complete."""
        self._words = self._calls.reshape(-1)
        self._at_blocks = np.array(self._blocks, np.int64)
        self._at_sizes, self._at_dense = np.array(self._sizes, np.int64), np.array(self._dense, np.int64)
        self._first_wrong = self._first_wrong[: len(self._keys)]
        self._untouched = [_NEVER] * len(self._keys)
        self._table_at, self._run_at = self._table.ctypes.data, self._run.ctypes.data
        self._size = -1

    def begin(self, size: int, dense: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Bind the inputs of the next run; returns objects that must stay alive until it ends."""
        if not dense.is_contiguous() or dense.dtype != torch.float32:
            dense = dense.float().contiguous()
        if ids.dtype != self._id_dtype or not ids.is_contiguous():
            ids = ids.to(self._id_dtype).contiguous()
        words = self._words
        if size != self._size:
            words[self._at_sizes] = self._size = size
            words[self._at_blocks] = -(-size // self._block)
        words[self._at_dense] = dense.data_ptr()
        if self._keys:
            address, width = ids.data_ptr(), ids.shape[1]
            for at in self._keys:
                words[at], words[at + 1] = address, width
            self._first_wrong[:] = _NEVER
        return dense, ids

    def run(self, first: int, count: int) -> None:
        """Run some steps, in this thread, without the interpreter's lock."""
        self._run[2], self._run[3] = self._table_at + first * 16, count
        self._driver.call_at(self._run_at)

    def found_bad_key(self) -> bool:
        """Whether a key of the last run was out of the range of a table that refuses it."""
        if not self._keys:
            return False
        found: list[int] = self._first_wrong.tolist()
        return found != self._untouched
