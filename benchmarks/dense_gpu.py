"""The dense part of DLRM and DCN v2 on a GPU: each piece and the whole, beside plain PyTorch and torch.compile.

    python benchmarks/dense_gpu.py [--small] [--autotune]

Every figure is a forward and backward pass (bf16 autocast, float32 weights) captured in a CUDA graph and replayed:
time of the device, median of many replays. Peers compute the same from the same inputs, captured the same way.
Floors are arithmetic alone: 790 TFLOP/s, measured with a large bf16 product; bytes at 4.25 TB/s, a device copy.

--autotune adds torch.compile's mode "max-autotune", which takes minutes to compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from record import record
from viviane.config import SGD
from viviane.nn import binary_cross_entropy, build_layer
from viviane.optim import build_dense_optimizer

SMALL = "--small" in sys.argv
REPEATS = 8 if SMALL else 60
FLOPS, BANDWIDTH = 790e12, 4.25e12
S, DIM, NUM_DENSE = 26, 128, 13
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
CROSSES, RANK = 3, 512


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record a step in a CUDA graph, after it ran on another stream, as capture asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def time_us(step: Callable[[], object]) -> np.ndarray:
    """Return the microseconds of each replay, with the device never waiting for the host."""
    graph = captured(step)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda._sleep(4_000_000)
    events[0].record()
    for i in range(REPEATS):
        graph.replay()
        events[i + 1].record()
    torch.cuda.synchronize()
    return np.array([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)])


class PlainInteraction(nn.Module):
    """The interaction as a PyTorch user writes it."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(S + 1, S + 1, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        z = torch.cat([dense.unsqueeze(1), embeddings], 1)
        dots = torch.bmm(z, z.transpose(1, 2))
        pairs = dots[:, cast(Tensor, self.rows), cast(Tensor, self.columns)]
        return torch.cat([dense, pairs, dense.new_zeros(len(dense), 1)], 1)


class PlainCross(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(n, RANK, bias=False) for _ in range(CROSSES))
        self.up = nn.ModuleList(nn.Linear(RANK, n) for _ in range(CROSSES))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x


def plain_mlp(k: int, widths: Sequence[int], last_relu: bool) -> nn.Sequential:
    steps: list[nn.Module] = []
    for n in widths:
        steps += [nn.Linear(k, n), nn.ReLU()]
        k = n
    return nn.Sequential(*steps if last_relu else steps[:-1])


class Dense(nn.Module):
    """The dense part: bottom MLP, interaction or cross layers, top MLP, loss."""

    def __init__(self, kind: str, plain: bool) -> None:
        super().__init__()
        self.kind, self.plain = kind, plain
        width = (S + 1) * DIM
        top = DIM + S * (S + 1) // 2 + 1 if kind == "DLRM" else width
        if plain:
            self.bottom, self.top = plain_mlp(NUM_DENSE, BOTTOM, True), plain_mlp(top, TOP, False)
            self.middle: nn.Module = PlainInteraction() if kind == "DLRM" else PlainCross(width)
        else:
            acts = ["relu"] * (len(TOP) - 1) + ["none"]
            self.bottom = build_layer("MLP", {"num_outputs": BOTTOM}, [(NUM_DENSE,)])
            self.top = build_layer("MLP", {"num_outputs": TOP, "activations": acts}, [(top,)])
            crosses = {"num_layers": CROSSES, "projection_dim": RANK}
            self.middle = (
                build_layer("Interaction", {}, [(DIM,), (S, DIM)])
                if kind == "DLRM"
                else build_layer("MultiCross", crosses, [(width,)])
            )

    def forward(self, dense: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = self.bottom(dense)
            if self.kind == "DLRM":
                x = self.middle(x, embeddings)
            else:
                x = self.middle(torch.cat([x, embeddings.flatten(1)], 1))
            logits = self.top(x)
        if self.plain:
            return F.binary_cross_entropy_with_logits(logits.float(), labels)
        return binary_cross_entropy(logits, labels)


def flop_of(model: nn.Module, size: int) -> float:
    """Return the products' operations, forward and backward; the first layer has no gradient of its input."""
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    flop = 6.0 * weights * size - 2.0 * NUM_DENSE * BOTTOM[0] * size
    return flop + 6.0 * (S + 1) ** 2 * DIM * size * (cast(Dense, model).kind == "DLRM")


def inputs(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(size)
    embeddings = torch.randn(size, S, DIM, device="cuda").mul_(0.1).to(dtype).requires_grad_()
    return torch.randn(size, NUM_DENSE, device="cuda"), embeddings, torch.rand(size, 1, device="cuda").round_()


def training_step(
    model: Callable[..., Tensor], weights: Sequence[Tensor], given: Sequence[Tensor]
) -> Callable[[], object]:
    leaves = [*weights, *(one for one in given if one.requires_grad)]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(*given).backward()

    return step


def keep(case: str, metric: str, times: np.ndarray, **others: Any) -> None:
    low, median, high = (float(value) for value in np.percentile(times, [20, 50, 80]))
    record(
        bench="dense_gpu",
        case=case,
        metric=metric,
        value=median,
        unit="us",
        better="lower",
        spread=(low, high),
        **others,
    )


def measure_model(kind: str, size: int, dtype: torch.dtype, modes: Sequence[str], goal: float | None) -> None:
    """Record the whole dense part beside plain PyTorch, and that compiled."""
    given, ours, plain = inputs(size, dtype), Dense(kind, False).cuda(), Dense(kind, True).cuda()
    shape = {"batch": size, "embeddings": str(dtype).removeprefix("torch.")}
    floor = flop_of(plain, size) / FLOPS * 1e6
    case = f"dense part of {kind}, forward + backward"
    mine = time_us(training_step(ours, list(ours.parameters()), given))
    peers: dict[str, Callable[..., Tensor]] = {"plain PyTorch": plain}
    for mode in modes:
        torch.compiler.reset()
        name = "torch.compile" if mode == "default" else f"torch.compile, {mode}"
        peers[name] = torch.compile(plain, mode=None if mode == "default" else mode)
    for name, peer in peers.items():
        theirs = float(np.median(time_us(training_step(peer, list(plain.parameters()), given))))
        keep(case, f"beside {name}", mine, shape=shape, floor=floor, goal=goal, peer=name, peer_value=theirs)
    print(f"    {floor / float(np.median(mine)) * 100:.0f}% of the arithmetic floor", flush=True)
    if dtype == torch.bfloat16:
        optimizer = build_dense_optimizer(SGD(), ours.parameters(), lr=1e-6)
        training_step(ours, list(ours.parameters()), given)()
        keep(f"dense part of {kind}", "SGD of its weights", time_us(optimizer.step), shape=shape)


def measure_piece(name: str, size: int, fused: nn.Module, plain: nn.Module, given: list[Tensor], moved: float) -> None:
    """Record one layer beside plain PyTorch; `moved`: the bytes it must read and write."""

    def run(layer: nn.Module) -> Callable[[], object]:
        def total(*values: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                out = layer(*values)
            return cast(Tensor, (out * seed).sum()) if out.dim() == 0 else _Backward.apply(out, seed)

        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            out = layer(*given)
        seed = torch.randn_like(out)
        return training_step(total, list(layer.parameters()), given)

    weights = sum(p.numel() for p in plain.parameters() if p.dim() == 2)
    floor = max(6.0 * weights * size / FLOPS, moved / BANDWIDTH) * 1e6
    theirs = float(np.median(time_us(run(plain))))
    compiled = float(np.median(time_us(run(cast(nn.Module, torch.compile(plain))))))
    mine = time_us(run(fused))
    for peer, value in (("plain PyTorch", theirs), ("torch.compile", compiled)):
        keep(
            name,
            f"forward + backward beside {peer}",
            mine,
            shape={"batch": size},
            floor=floor,
            peer=peer,
            peer_value=value,
        )


class _Backward(torch.autograd.Function):
    """A number whose gradient is given: starts a backward pass without any work of its own."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        return out.view(-1)[0].float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.1).to(torch.bfloat16).requires_grad_()


def measure_pieces(size: int, cross_size: int) -> None:
    pair, out = (S + 1) * DIM * 2.0 * size, 480 * 2.0 * size
    layer = build_layer("Interaction", {}, [(DIM,), (S, DIM)])
    given = [bf16(size, DIM), bf16(size, S, DIM)]
    measure_piece("interaction 27 x 128", size, layer, PlainInteraction().cuda(), given, 3 * pair + 2 * out)
    for name, k, widths, last in (("bottom MLP", NUM_DENSE, BOTTOM, True), ("top MLP", 480, TOP, False)):
        acts = ["relu"] * (len(widths) - 1) + ["relu" if last else "none"]
        layer = build_layer("MLP", {"num_outputs": widths, "activations": acts}, [(k,)]).cuda()
        x = bf16(size, k) if k == 480 else torch.randn(size, k, device="cuda")
        # Each activation is written once, and read by the next layer, its weights' gradient and its mask; so is its
        # gradient, without the mask.
        moved = 2.0 * size * (7 * sum(widths) + (3 * k if k == 480 else 4 * k))
        measure_piece(name, size, layer, plain_mlp(k, widths, last).cuda(), [x], moved)
    n = (S + 1) * DIM
    layer = build_layer("MultiCross", {"num_layers": CROSSES, "projection_dim": RANK}, [(n,)]).cuda()
    measure_piece("3 cross layers of rank 512", cross_size, layer, PlainCross(n).cuda(), [bf16(cross_size, n)], 0)


def measure_loss(size: int) -> None:
    labels = torch.rand(size, device="cuda").round_()
    logits = torch.randn(size, device="cuda").requires_grad_()
    theirs = time_us(training_step(lambda z: F.binary_cross_entropy_with_logits(z, labels), [], [logits]))
    mine = time_us(training_step(lambda z: binary_cross_entropy(z, labels), [], [logits]))
    keep("binary cross-entropy", "forward + backward", mine, shape={"batch": size}, peer="plain PyTorch",
         peer_value=float(np.median(theirs)))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the dense layers on a GPU.")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that they run, keeps no figures")
    parser.add_argument("--autotune", action="store_true", help="add torch.compile's max-autotune: minutes more")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    large, small = (512, 256) if SMALL else (65536, 8192)
    measure_model("DLRM", large, torch.bfloat16, ["default"], 2000)
    measure_model("DLRM", large, torch.float32, ["default"], None)
    modes = ["default", *(["max-autotune-no-cudagraphs"] if arguments.autotune else [])]
    measure_model("DLRM", small, torch.bfloat16, modes, 350)
    measure_model("DCN v2", 2 * small, torch.bfloat16, ["default"], None)
    measure_model("DCN v2", small, torch.bfloat16, modes, None)
    measure_pieces(large, small)
    measure_loss(large)
    return 0


if __name__ == "__main__":
    sys.exit(main())
