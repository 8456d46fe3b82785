"""Move rows of a table by an optimizer's rule, straight from the gradients of a batch's lookups.

Shapes: R rows of the table, D its width, N entries (one row looked up once each), U distinct rows.

Gradients of equal rows are summed in a fixed order: the same input gives the same bits, run after run, whatever
the number of threads. Nothing of the table's size is made but `Scratch`, 4 bytes a row on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import VivianeError
from viviane.ops.dispatch import choose, implementation, load
from viviane.ops.rules import rule_of

__all__ = [
    "Entries",
    "Scratch",
    "initial_state",
    "join_rows",
    "norm_squared",
    "prepare_overlapped",
    "prepare_rows",
    "sort_entries",
    "state_shape",
    "sum_rows",
    "update_rows",
]


@dataclass(frozen=True)
class Entries:
    """N looked-up rows and their gradients: entry n has weights[n] * gradients[sources[n] : sources[n] + D].

    Args:
        rows: (N,), int32 or int64, contiguous.
        gradients: one dimension, contiguous; float32, float16 or bfloat16.
        sources: (N,), int32 or int64: the element of `gradients` at which an entry's D numbers begin. None: entry
            n has the n-th D numbers.
        weights: (N,), float32, or None for ones.
        aligned: a power of two that divides every number in `sources`; 4 and more let a GPU load in wide pieces.
        bound: of rows that are all 0 <= row < bound, which lets a GPU sort them by fewer bits; None: not known.
        skipped: how many of the last rows below the bound nobody updates or sums: a GPU does not sort their entries.
        order: (N,), on the rows' device, where equal rows are neighbours already and a GPU need not sort them: of each
            row the entry whose source and weight it has, 0, 1, to N - 1 where these are sorted, too; None: not known.
    """

    rows: Tensor
    gradients: Tensor
    sources: Tensor | None = None
    weights: Tensor | None = None
    aligned: int = 1
    bound: int | None = None
    order: Tensor | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        count = len(self.rows)
        for name, part in (("sources", self.sources), ("weights", self.weights), ("order", self.order)):
            if part is not None and part.shape != (count,):
                raise VivianeError(f"each entry needs one of {name}", value=f"{tuple(part.shape)} for {count} rows")
        if self.gradients.dim() != 1:
            raise VivianeError("gradients must be one flat tensor", value=tuple(self.gradients.shape))
        if self.aligned < 1 or self.aligned & (self.aligned - 1):
            raise VivianeError("alignment is a power of two", value=self.aligned)


WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Scratch:
    """Working memory of a table that stays between calls; give the same object with the same table.

    Updates recorded in CUDA graphs want one for each graph, or new rows in each.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ready: torch.cuda.Event | None = None
        """What the next update on a GPU waits for: the end of `prepare_rows`."""
        self.recorded = False
        """Whether what is kept is made by the replays of a CUDA graph."""


def update_rows(
    weight: Tensor,
    state: Mapping[str, Tensor],
    entries: Entries,
    rule: AnyOptimizer,
    *,
    lr: float | Tensor,
    step: int | Tensor,
    scale: float | Tensor = 1.0,
    first_row: int = 0,
    seed: int | Tensor = 0,
    scratch: Scratch | None = None,
    gate: Tensor | None = None,
    names: Tensor | None = None,
    first_name: int = 0,
) -> None:
    """Sum the gradients of equal rows, and move rows and state in place.

    For each distinct row r of the entries, in float32:

        g = scale * sum of weights[n] * gradient n over the entries n of row r
        g *= min(1, clip_row_norm / |g|)        where the rule has clip_row_norm
        g += weight_decay * w                   where it has weight_decay
        w, state = the rule's arithmetic        see `viviane.config.optimizers`

    Rows of 16 bits are rounded stochastically: up or down with odds that keep the mean, by a hash of seed, step,
    row and column, so that small steps are not lost.

    Args:
        weight: (R, D), contiguous; float32, float16 or bfloat16.
        state: by name, as `initial_state` lists it; float32.
        entries: gradients; rows outside first_row <= row < first_row + R are left out.
        rule: optimizer settings; its own `lr` is not read here.
        lr: learning rate of this step. This, step, scale and seed are numbers, or 0-dim tensors on the table's device,
            which a CUDA graph reads again in each replay; a float64 lr gives the bits that the number gives.
        step: of the table, from 1: bias correction, and clocks of "lazy_global".
        scale: what gradients are multiplied by first.
        first_row: what is subtracted from the entries' rows.
        seed: of stochastic rounding.
        scratch: kept from call to call; None makes its own.
        gate: 0-dim, int32, on the table's device; 0 leaves rows and state as they are, 1 does not.
        names: (R,), int64: the row that stochastic rounding takes each row for, less `first_name`; None: itself.
        first_name: what is subtracted from names.

    Example:
        >>> from viviane.config import SGD
        >>> weight = torch.ones(3, 2)
        >>> entries = Entries(torch.tensor([2, 0, 2]), torch.arange(6.0))
        >>> update_rows(weight, {}, entries, SGD(), lr=0.1, step=1)
        >>> weight.tolist()
        [[0.800000011920929, 0.699999988079071], [1.0, 1.0], [0.6000000238418579, 0.3999999761581421]]
    """
    check_table(weight)
    expected = initial_state(rule)
    if state.keys() != expected.keys():
        raise VivianeError("the state is not this rule's", value=", ".join(state), allowed=", ".join(expected))
    for name, part in state.items():
        shape = state_shape(name, weight, rule)
        if part.shape != shape or not part.is_contiguous():
            raise VivianeError(f"state {name!r} must be contiguous {shape}", value=tuple(part.shape))
    serving = choose(weight.device)
    module = load("row_update", serving)
    if serving != "gpu":  # the others compute with them on the host
        lr, step, seed = float(lr), int(step), int(seed)
        if gate is not None and not bool(gate):
            return
    module.update_rows(
        weight, state, entries, rule, lr=lr, step=step, scale=scale, first_row=first_row, seed=seed,
        scratch=scratch or Scratch(), **({} if gate is None or serving != "gpu" else {"gate": gate}),
        **({} if names is None or weight.dtype == torch.float32 else {"names": names, "first_name": first_name}),
    )  # fmt: skip


def prepare_rows(rows: Tensor, scratch: Scratch, bound: int | None = None, skipped: int = 0) -> None:
    """Begin what an update needs to know of the rows alone, while the forward and backward pass run.

    On a GPU that is their sorting, on a stream of its own; the next `update_rows` or `sum_rows` with this scratch and
    these rows waits for it there. On the CPU there is nothing to prepare.

    Args:
        rows: (N,), int32 or int64, contiguous; what they hold must not change before the update.
        scratch: of the table.
        bound, skipped: as in `Entries`.

    Example:
        >>> prepare_rows(torch.tensor([2, 0, 2]), Scratch())
    """
    if rows.is_cuda and len(rows) and choose(rows.device) == "gpu":
        implementation("row_update", rows.device).prepare_rows(rows, scratch, bound, skipped)


def sort_entries(rows: Tensor, bound: int | None = None, *, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Sort rows, those of equal rows in the order of the entries: (N,) rising rows, and the entry that each came from.

    Args:
        rows: (N,), int32 or int64.
        bound: as in `Entries`.
        spare: multiprocessors that a kernel of another stream holds for long: the blocks of the sort wait for one
            another, and begin once all of them have a multiprocessor.

    Example:
        >>> [part.tolist() for part in sort_entries(torch.tensor([7, 2, 7]))]
        [[2, 7, 7], [1, 0, 2]]
    """
    if choose(rows.device) == "gpu":
        found, order = implementation("row_update", rows.device).sort_entries(rows, Scratch(), bound, spare=spare)
        return found, order
    return torch.sort(rows, stable=True)


def prepare_overlapped(device: torch.device, scratch: Scratch, reads: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Run a block beside the forward and backward pass, where a GPU runs `prepare_rows`; elsewhere in place.

    What it makes is there after the next update with this scratch has begun, or after `join_rows`.

    Args:
        device: of the table.
        scratch: of the table.
        reads: tensors that the block reads.

    Example:
        >>> with prepare_overlapped(torch.device("cpu"), Scratch(), []):
        ...     pass
    """
    if device.type != "cuda" or choose(device) != "gpu":
        return nullcontext()
    block: AbstractContextManager[None] = implementation("row_update", device).aside(device, scratch, reads)
    return block


def join_rows(device: torch.device, scratch: Scratch) -> None:
    """Let the current stream wait for what `prepare_rows` began, without an update.

    Args:
        device: of the rows.
        scratch: of the table.

    Example:
        >>> join_rows(torch.device("cpu"), Scratch())
    """
    if scratch.ready is not None:
        implementation("row_update", device).join_rows(device, scratch)


def sum_rows(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: Scratch | None = None
) -> tuple[Tensor, Tensor]:
    """Sum gradients by row: the distinct rows in rising order, (U,), int64, and their sums, (U, dim), float32.

    Args:
        entries: gradients; rows outside first_row <= row < first_row + num_rows are left out.
        dim: D.
        first_row: what is subtracted from the entries' rows.
        num_rows: R.
        scratch: kept from call to call; None makes its own.

    Example:
        >>> rows, sums = sum_rows(Entries(torch.tensor([7, 2, 7]), torch.tensor([1.0, 2.0, 4.0])), 1, num_rows=8)
        >>> rows.tolist(), sums.tolist()
        ([2, 7], [[2.0], [5.0]])
    """
    module = implementation("row_update", entries.rows.device)
    rows, sums = module.sum_rows(entries, dim, first_row=first_row, num_rows=num_rows, scratch=scratch or Scratch())
    return rows, sums


def norm_squared(
    entries: Entries, dim: int, *, first_row: int = 0, num_rows: int, scratch: Scratch | None = None
) -> Tensor:
    """Return the sum of squares of gradients that were summed by row; 0-dim, float64. Nothing waits for a GPU.

    Arguments as of `sum_rows`. A GPU takes memory for as many rows as there may be: min(N, num_rows).

    Example:
        >>> norm_squared(Entries(torch.tensor([7, 2, 7]), torch.tensor([1.0, 3.0, 3.0])), 1, num_rows=8).item()
        25.0
    """
    module, scratch = implementation("row_update", entries.rows.device), scratch or Scratch()
    if choose(entries.rows.device) == "gpu":
        sums = module.all_sums(entries, dim, first_row=first_row, num_rows=num_rows, scratch=scratch)
    else:
        sums = module.sum_rows(entries, dim, first_row=first_row, num_rows=num_rows, scratch=scratch)[1]
    norm: Tensor = torch.linalg.vector_norm(sums, dtype=torch.float64)
    return norm.square()


def initial_state(rule: AnyOptimizer | None) -> dict[str, float]:
    """Return the names of a rule's state and the value each begins with.

    Example:
        >>> from viviane.config import Adam
        >>> initial_state(Adam(update="lazy_global"))
        {'m': 0.0, 'v': 0.0, 'last_step': 0.0}
    """
    return {} if rule is None else rule_of(rule).initial()


def state_shape(name: str, weight: Tensor, rule: AnyOptimizer) -> tuple[int, ...]:
    """Return the shape of a state of a table (R, D): (R, D), or (R,) where a row has one number."""
    return (weight.shape[0],) if name in rule_of(rule).per_row else tuple(weight.shape)


def state_row_bytes(rule: AnyOptimizer | None, dim: int) -> int:
    """Return the bytes of optimizer state that belong to one row of `dim` numbers.

    Example:
        >>> from viviane.config import AdaGrad, Adam
        >>> state_row_bytes(Adam(), 16), state_row_bytes(AdaGrad(row_wise=True), 16), state_row_bytes(None, 16)
        (128, 4, 0)
    """
    if rule is None:
        return 0
    row = torch.empty(1, dim, device="meta")
    return 4 * sum(math.prod(state_shape(name, row, rule)) for name in initial_state(rule))


def check_table(weight: Tensor) -> None:
    """Refuse what is not a table: contiguous (R, D) of a type that kernels know."""
    if weight.dim() != 2 or not weight.is_contiguous() or weight.dtype not in WEIGHT_DTYPES:
        raise VivianeError(
            "a table must be a contiguous matrix (R, D)",
            value=f"{tuple(weight.shape)} of {weight.dtype}",
            allowed="float32, float16, bfloat16",
        )
