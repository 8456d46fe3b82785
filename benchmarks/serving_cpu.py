"""Inference sessions on one CPU thread, beside PyTorch, TorchScript, ONNX Runtime and OpenVINO with equal weights.

    python benchmarks/serving_cpu.py [--small] [--only TEXT] [--peers NAMES]

What is timed is `session.predict(batch)` with ids and numbers in memory, and the same of each peer, whose network is
plain PyTorch with all tables in one `nn.Embedding` and the session's weights; every peer is exported from it. Rounds
alternate, each of a fraction of a second, and the figure is the median round in processor time of the one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import viviane as vv
from record import record
from viviane.batch import Batch, Layout
from viviane.serving import InferenceSession

SMALL = "--small" in sys.argv
SIZES = (1, 64, 1024)
Predict = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model: its recipe, and the tables that it has."""

    name: str
    recipe: Any
    tables: int
    rows: int
    dense: int = 13
    tables_dominate: bool = False


CASES = (
    Case("DLRM", vv.zoo.DLRM(dim=16, bottom_mlp=[256, 64], top_mlp=[256, 128]), 26, 100_000),
    Case("DCN v2", vv.zoo.DCNv2(dim=16, deep_mlp=[400, 400], num_cross_layers=3), 26, 100_000),
    Case("DeepFM", vv.zoo.DeepFM(dim=16, deep_mlp=[400, 400]), 26, 100_000),
    Case("Wide & Deep, 100 wide tables", vv.zoo.WideDeep(dim=64, deep_mlp=[16]), 100, 20_000, tables_dominate=True),
)


class Peer(nn.Module):
    """The network of a case in plain PyTorch, with the weights of a session's module: dense (B, N), ids (B, F)."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        super().__init__()
        w = {name: value.detach().float() for name, value in module.state_dict().items()}
        self.kind = type(case.recipe).__name__
        self.table = joined(w, "emb", case)
        self.register_buffer("starts", torch.arange(case.tables, dtype=torch.int64) * case.rows)
        first = next((name for name in ("wide_weights", "first_weights") if f"{name}.c0.weight" in w), None)
        self.first = nn.Identity() if first is None else joined(w, first, case)
        self.bottom, self.top, self.deep = (chain(w, name) for name in ("bottom", "top", "deep"))
        logit = next(name for name in ("logit", "deep_logit") if f"{name}.weight" in w)
        self.logit = linear(w[f"{logit}.weight"], w[f"{logit}.bias"])
        wide = next((name for name in ("wide_dense", "first_dense") if f"{name}.weight" in w), None)
        self.wide = nn.Identity() if wide is None else linear(w[f"{wide}.weight"], w[f"{wide}.bias"])
        crosses = [k for k in sorted(w) if k.startswith("cross.weights.")]
        self.cross = nn.ModuleList(linear(w[k], w[k.replace("weights", "biases")]) for k in crosses)
        self.vectors = nn.Parameter(w.get("dense_vectors.weight", torch.zeros(0)), requires_grad=False)
        lower = torch.tril_indices(case.tables + 1, case.tables + 1, -1)
        self.register_buffer("lower", lower[0] * (case.tables + 1) + lower[1])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        rows = ids + self.starts
        e = self.table(rows)
        if self.kind == "DLRM":
            x = self.bottom(dense)
            z = torch.cat([x.unsqueeze(1), e], 1)
            pairs = torch.bmm(z, z.transpose(1, 2)).flatten(1)[:, self.lower]
            return torch.sigmoid(self.logit(self.top(torch.cat([x, pairs], 1))))
        if self.kind == "DCNv2":
            x0 = torch.cat([e.flatten(1), dense], 1)
            x = x0
            for layer in self.cross:
                x = x0 * layer(x) + x
            return torch.sigmoid(self.logit(torch.cat([x, self.deep(x0)], 1)))
        wide = self.first(rows).sum((1, 2)).unsqueeze(1) + self.wide(dense)
        if self.kind == "WideDeep":
            return torch.sigmoid(wide + self.logit(self.deep(torch.cat([e.flatten(1), dense], 1))))
        fields = torch.cat([e, dense.unsqueeze(2) * self.vectors], 1)
        pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(wide + pairs + self.logit(self.deep(fields.flatten(1))))


def joined(w: dict[str, Tensor], name: str, case: Case) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.cat([w[f"{name}.c{i}.weight"] for i in range(case.tables)]))


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return layer


def chain(w: dict[str, Tensor], name: str) -> nn.Sequential:
    keys = sorted(key for key in w if key.startswith(f"{name}.layers.") and key.endswith("weight"))
    return nn.Sequential(*(one for k in keys for one in (linear(w[k], w[k.replace("weight", "bias")]), nn.ReLU())))


def peers(module: Peer, wanted: Sequence[str], folder: Path) -> dict[str, Callable[[Tensor, Tensor], Predict]]:
    """Return what makes a prediction of each peer that is installed; every peer is made once."""
    found: dict[str, Callable[[Tensor, Tensor], Predict]] = {}

    def of_torch(network: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Predict]:
        def make(dense: Tensor, ids: Tensor) -> Predict:
            def predict() -> np.ndarray:
                with torch.inference_mode():
                    return network(dense, ids).numpy()

            return predict

        return make

    example = (torch.zeros(64, 13), torch.zeros(64, len(module.starts), dtype=torch.int64))
    if "eager" in wanted:
        found["PyTorch eager"] = of_torch(module)
    if "script" in wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            frozen = torch.jit.freeze(torch.jit.trace(module, example))
        found["TorchScript"] = of_torch(frozen)
    if "compile" in wanted:
        found["torch.compile"] = of_torch(torch.compile(module, dynamic=False))
    if {"onnx", "openvino"} & set(wanted):
        file = folder / "model.onnx"
        export_onnx(module, example, file)
    if "onnx" in wanted:
        found["ONNX Runtime"] = onnx_runtime(file)
    if "openvino" in wanted:
        found["OpenVINO"] = openvino(file)
    return found


def export_onnx(module: Peer, example: tuple[Tensor, Tensor], file: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    torch.onnx.export(
        module, example, str(file), input_names=["dense", "ids"], output_names=["scores"],
        dynamic_shapes=({0: rows}, {0: rows}), dynamo=True, external_data=True, verbose=False,
    )  # fmt: skip


def onnx_runtime(file: Path) -> Callable[[Tensor, Tensor], Predict]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def make(dense: Tensor, ids: Tensor) -> Predict:
        given = {"dense": dense.numpy(), "ids": ids.numpy()}
        return lambda: session.run(None, given)[0]

    return make


def openvino(file: Path) -> Callable[[Tensor, Tensor], Predict]:
    import openvino as ov

    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = core.compile_model(core.read_model(file), "CPU", settings)
    request = compiled.create_infer_request()

    def make(dense: Tensor, ids: Tensor) -> Predict:
        given = {"dense": dense.numpy(), "ids": ids.numpy()}
        return lambda: next(iter(request.infer(given, share_inputs=True).values()))

    return make


def schema_of(case: Case) -> vv.Schema:
    return vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": f"x{i}"} for i in range(case.dense)],
        categorical=[{"name": f"c{i}", "num_ids": case.rows} for i in range(case.tables)],
    )


def milliseconds(predict: Predict, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        predict()
    return (time.process_time() - start) / repeats * 1e3


def compare(case: Case, wanted: Sequence[str], rounds: int) -> None:
    schema = schema_of(case)
    with TemporaryDirectory() as folder:
        model = vv.Model(vv.Solver(device="cpu", num_threads=1), schema)
        model.add(case.recipe)
        model.compile(vv.SGD())
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # untrained logits are too small to tell models apart
            for parameter in model.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
        model.save(Path(folder) / "model")
        session = InferenceSession(Path(folder) / "model", device="cpu")
        module = Peer(case, model.module).eval()
        made = peers(module, wanted, Path(folder))
        for size in SIZES:
            dense = torch.rand(size, case.dense, generator=generator)
            ids = torch.randint(3, case.rows, (size, case.tables), generator=generator)
            batch = Batch(Layout.of(schema), torch.zeros(size, 0), dense, ids.to(torch.int32))
            truth = model.predict(batch)[:, 0]
            ways: dict[str, Predict] = {"viviane": lambda b=batch: session.predict(b)}
            ways |= {name: make(dense, ids) for name, make in made.items()}
            for name, predict in ways.items():
                np.testing.assert_allclose(np.ravel(predict()), truth, atol=1e-5, err_msg=name)
            measure(case, size, ways, rounds)


def measure(case: Case, size: int, ways: dict[str, Predict], rounds: int) -> None:
    repeats = {name: max(3, round((30 if SMALL else 120) / milliseconds(predict, 3))) for name, predict in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, predict in ways.items():
            times[name].append(milliseconds(predict, repeats[name]))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{case.name}, batch {size}: " + ", ".join(f"{k} {v * 1e3:.0f} us" for k, v in median.items()), flush=True)
    best = min((name for name in median if name != "viviane"), key=lambda name: median[name])
    pairs = [b / a for a, b in zip(times["viviane"], times[best], strict=True)]
    quantiles = statistics.quantiles(pairs, n=5)
    goal = 1.5 if case.tables_dominate and size == SIZES[-1] else 1.0
    record(
        bench="serving_cpu", case=f"{case.name}, batch {size}", metric="times as fast as the best peer",
        value=median[best] / median["viviane"], unit="x", better="higher", goal=goal,
        peer=f"{best}, us a request", peer_value=median[best] * 1e3, spread=(quantiles[0], quantiles[3]),
        shape={"tables": case.tables, "rows": case.rows, "microseconds": round(median["viviane"] * 1e3, 1)},
    )  # fmt: skip


def installed() -> list[str]:
    """Return the peers that are installed here; torch.compile needs a C++ compiler."""
    names = {"onnx": "onnxruntime", "openvino": "openvino"}
    found = [name for name, module in names.items() if importlib.util.find_spec(module) is not None]
    compiles = shutil.which("g++") is not None and not SMALL
    return ["eager", "script", *(["compile"] if compiles else []), *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short rounds, without torch.compile")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--peers", default=",".join(installed()), help="eager, script, compile, onnx, openvino")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if options.only in case.name:
            compare(case, options.peers.split(","), 3 if SMALL else 7)


if __name__ == "__main__":
    main()
