"""The products of cross layers with what their tiles meet, on Hopper: CUDA C++ beside Triton, the same bits of both.

    python benchmarks/product_gpu.py [--small]

Each kernel is captured in a CUDA graph and replayed. The floor is the larger of 790 TFLOP/s, measured with a large
bf16 product, and the tiles' bytes at 4.25 TB/s, a device copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dense_gpu import BANDWIDTH, CROSSES, FLOPS, RANK, SMALL, time_us
from record import record
from viviane.ops.cross_layers import gpu as triton
from viviane.ops.cuda_parts import product

WIDTH = 27 * 128  # MLPerf's DLRM-DCNv2
SIZES = (256,) if SMALL else (16_384, 8192, 4096, 2048, 1024)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def kernels(size: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], int]]:
    """Return by name what Triton and CUDA C++ compute, and how many matrices (size, WIDTH) they read or write."""
    u, down, up = draw(size, RANK), draw(WIDTH, RANK, scale=RANK**-0.5), draw(RANK, WIDTH, scale=RANK**-0.5)
    bias, one, other = draw(WIDTH), draw(size, WIDTH), draw(size + 1, WIDTH)[1:].contiguous()
    grads, ys = draw(CROSSES - 1, size, WIDTH), draw(CROSSES, size, WIDTH)
    out, more = torch.empty_like(one), torch.empty_like(one)

    def forward() -> Tensor:
        product.multiply(product.FORWARD, u, down, [one, other, more, out], bias=bias)
        return out

    def backward() -> Tensor:
        product.multiply(product.BACKWARD, u, up, [one, other, more, out])
        return out

    def last() -> Tensor:
        product.multiply(product.LAST, u, up, [one, grads, ys, out], layers=CROSSES)
        return out

    return {
        "forward": (lambda: triton.fused_cross_forward(u, down, bias, one, other, more, triton.FORWARD), forward, 4),
        "backward": (lambda: triton.fused_cross_backward(u, up, one, other, out, triton.BACKWARD)[0], backward, 4),
        "gradient of x_0": (
            lambda: triton.fused_cross_last(u, up, one, grads, ys, triton.LAST), last, 2 * CROSSES + 1
        ),
    }  # fmt: skip


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no Hopper GPU here: nothing measured")
        return 0
    for size in SIZES:
        for name, (theirs, ours, passes) in kernels(size).items():
            if not torch.equal(theirs().clone(), ours()):
                print(f"{name}, {size} rows: other bits than Triton's", file=sys.stderr)
                return 1
            floor = max(2.0 * size * RANK * WIDTH / FLOPS, 2.0 * passes * size * WIDTH / BANDWIDTH) * 1e6
            low, median, high = (float(one) for one in np.percentile(time_us(ours), [20, 50, 80]))
            record(
                bench="product_gpu", case=f"cross layers, {name}, bf16", metric="time", value=median, unit="us",
                better="lower", floor=floor, peer="Triton, tiles of 128 x 128",
                peer_value=float(np.median(time_us(theirs))), spread=(low, high),
                shape={"batch": size, "width": WIDTH, "rank": RANK},
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
