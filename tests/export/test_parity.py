"""Rows in which large terms cancel: rounding is accepted there, and nothing else is, nor in other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import viviane as vv
from viviane.core.errors import ExportError
from viviane.export.parity import Case, Reference, compare
from viviane.export.program import freeze
from viviane.schema import Schema

DENSE = 13
HALF_UNIT = 2.0**-24


class Cancels(torch.nn.Module):
    """The square of a sum less the sum of squares, as a factorization machine has it."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(DENSE, 1, generator=draw) * 0.01)

    def forward(self, batch: Any) -> torch.Tensor:
        terms = batch.dense[..., None] * self.weight  # (B, N, 1)
        return (terms.sum(1) ** 2 - (terms**2).sum(1)) * 0.5


@pytest.fixture(scope="module")
def compared() -> tuple[list[Case], Any]:
    """Cases of such a model, and its program in float32."""
    schema = Schema(
        labels=[{"name": "click"}],
        dense=[{"name": f"i{n}"} for n in range(DENSE)],
        categorical=[{"name": "c", "num_ids": 5}],
    )
    model = vv.Model(vv.Solver(device="cpu"), schema, module=Cancels())
    model.compile()
    parts = (model.module, model.trainer.objective, schema)
    program = freeze(*parts, kernels=False)
    reference = Reference(*parts, "fp32", torch.device("cpu"), program, {}, {})
    return reference.cases(), program


def off_by(program: Any, share: float, seed: int) -> Any:
    """Return a form whose squares are off by a share of themselves, up or down by chance."""
    draw = torch.Generator().manual_seed(seed)

    def run(tensors: Any) -> torch.Tensor:
        terms = tensors[0].double()[..., None] * program.module.weight.double()
        squares = [terms.sum(1) ** 2, (terms**2).sum(1)]
        one, other = (value * (1 + (torch.rand(value.shape, generator=draw) * 2 - 1) * share) for value in squares)
        return torch.sigmoid((one - other) * 0.5).float()

    return run


@pytest.mark.parametrize("seed", range(8))
def test_squares_that_round_otherwise_are_accepted(compared: Any, seed: int) -> None:
    cases, program = compared
    report = compare("onnx", off_by(program, HALF_UNIT, seed), cases, [], "fp32")
    assert all(line["tolerance"] <= line["largest_tolerance"] for line in report.cases)


def test_larger_differences_are_refused_with_their_row(compared: Any) -> None:
    cases, program = compared
    with pytest.raises(ExportError, match=r"1024 extreme rows, row \d+"):
        compare("onnx", off_by(program, HALF_UNIT * 256, 0), cases[-1:], [], "fp32")


def test_a_row_that_cancels_leaves_the_tolerance_of_others(compared: Any) -> None:
    cases, program = compared
    case = cases[-1]
    assert isinstance(case.spread, np.ndarray)
    worst = int(case.spread.max(1).argmax())
    quiet = int((case.spread.max(1) + (abs(case.exact - 0.5) > 0.4).max(1)).argmin())
    assert case.spread[worst] > 100 * case.spread[quiet]

    def shifted(tensors: Any) -> torch.Tensor:
        found: torch.Tensor = program(*tensors).clone()
        found[quiet] += 6 * float(case.spread[worst].max())  # the row that cancels may differ by 8 times as much
        return found

    with pytest.raises(ExportError, match=f"row {quiet}"):
        compare("onnx", shifted, [case], [], "fp32")
