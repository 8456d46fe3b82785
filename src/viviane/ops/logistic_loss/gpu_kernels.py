"""The Triton kernel of binary cross-entropy."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size", "negative", "positive", "smoothing"])
def logistic_loss_kernel(
    logits,
    labels,
    weight,
    divisor,
    slope,
    partial,
    size,
    negative,
    positive,
    smoothing,
    block: tl.constexpr,
):
    """Write each row's gradient, and the sum of a block's losses."""
    r = tl.program_id(0) * block + tl.arange(0, block)
    here = r < size
    z = tl.load(logits + r, mask=here, other=0.0).to(tl.float32)
    y = tl.load(labels + r, mask=here, other=0.0).to(tl.float32)
    share = negative + (positive - negative) * y
    if weight is None:
        share = share / size
    else:
        share = share * tl.load(weight + r, mask=here, other=0.0).to(tl.float32) / tl.load(divisor)
    share = tl.where(here, share, 0.0)
    target = y * (1 - smoothing) + smoothing * 0.5
    # e^-|z| cannot overflow: the sigmoid follows from it, and log(1 + e^z) = max(z, 0) + log(1 + e^-|z|).
    small = tl.exp(-tl.abs(z))
    # Kahan's log(1 + small): what rounding 1 + small takes away, the quotient gives back.
    one_more = 1 + small
    lost = one_more == 1
    log_one_more = tl.where(lost, small, tl.log(one_more) * small / tl.where(lost, 1.0, one_more - 1))
    # log(1 + e^z) - t z with z's share gathered first: a right answer's loss is small beside z.
    loss = z * (tl.where(z >= 0, 1.0, 0.0) - target) + log_one_more
    rest = small / one_more  # sigmoid(-|z|)
    tl.store(slope + r, share * tl.where(z >= 0, (1 - target) - rest, rest - target), mask=here)
    tl.store(partial + tl.program_id(0), tl.sum(share * loss, 0))
