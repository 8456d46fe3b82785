"""The Triton kernel of probabilities."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size", "shift"])
def probabilities_kernel(logits, out, flag, records, size, shift, block: tl.constexpr):
    """Write a block of probabilities; the first program sets the flag."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    z = tl.load(logits + n, mask=n < size, other=0.0).to(tl.float32) - shift
    # e^-|z| cannot overflow; sigmoid(-|z|) = small / (1 + small).
    small = tl.exp(-tl.abs(z))
    tl.store(out + n, tl.where(z >= 0, 1.0, small) / (1.0 + small), mask=n < size)
    if flag is not None:  # noqa: SIM102 - the one is a question for the compiler, the other for each program
        if tl.program_id(0) == 0:
            found = tl.zeros((), dtype=tl.int32)
            if records is not None:
                for i in tl.static_range(len(records)):
                    found += (tl.load(records[i]) != 0).to(tl.int32)
            tl.store(flag, found.to(tl.int64))
