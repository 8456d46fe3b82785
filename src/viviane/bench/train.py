"""Benchmarks of training steps, with batches in memory and from files, against the same model in other libraries.

Each library runs in a separate process, as in `viviane.bench.embedding`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from viviane.bench.embedding import LeftOut, check_memory, not_imported
from viviane.bench.timing import copy_bandwidth, measure
from viviane.bench.train_libraries import FROM_FILES, OURS, TRAIN_LIBRARIES, Training
from viviane.bench.workload import NUM_BATCHES, Draw, step_bytes
from viviane.core import machine
from viviane.core.errors import ConfigError, suggest
from viviane.embedding.module_parts import dense_parameters

_PRODUCT: Final = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class TrainFigure:
    """One library's training step.

    Args:
        library: its name in `TRAIN_LIBRARIES`.
        batch: B.
        ms, median_ms, high_ms: best, median and 80th percentile.
        first_ms: the first step, including compilation.
        samples_per_second: rate, from `ms`.
    """

    library: str
    batch: int
    ms: float
    median_ms: float
    high_ms: float
    first_ms: float
    samples_per_second: float


@dataclass(frozen=True)
class Floor:
    """The lower bound of a step on this machine: memory traffic of the tables plus matrix products of the dense layers.

    Args:
        copy_gb_per_second, tflops: rates of a large copy and a large product, measured in the same run.
        num_bytes: bytes of lookup, backward and update; see `step_bytes`.
        flops: operations of the dense layers' products, forward and backward.
    """

    copy_gb_per_second: float
    tflops: float
    num_bytes: float
    flops: float

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.num_bytes / self.copy_gb_per_second / 1e6 + self.flops / self.tflops / 1e9


@dataclass(frozen=True)
class TrainComparison:
    """All measurements on this machine."""

    trainings: tuple[Training, ...]
    floors: tuple[Floor, ...]
    figures: tuple[TrainFigure, ...]
    left_out: tuple[LeftOut, ...]

    def times_faster(self, one: TrainFigure) -> float | None:
        """Return the speedup of this package over this result; None if this package was not measured."""
        for own in self.figures:
            if (own.library, own.batch) == (OURS, one.batch):
                return one.ms / own.ms
        return None

    def share_of_floor(self, one: TrainFigure) -> float:
        """Return the floor as a fraction of the measured time."""
        at = next(i for i, training in enumerate(self.trainings) if training.batch == one.batch)
        return self.floors[at].ms / one.ms

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        first = self.trainings[0]
        tables = first.tables
        return {
            "bench": "train",
            "machine": machine.describe(),
            "device": str(tables.device),
            "threads": torch.get_num_threads(),
            "versions": machine.versions("viviane", "torch", "deepctr-torch", "numba", "triton"),
            "model": first.model,
            "optimizer": tables.rule,
            "precision": first.precision,
            "tables": {"num": len(tables.rows), "rows": sum(tables.rows), "dim": tables.dim},
            "ids": first.ids,
            "exponent": first.exponent if first.ids == "power-law" else None,
            "floors": [
                {"batch": training.batch, **asdict(floor), "ms": floor.ms}
                for training, floor in zip(self.trainings, self.floors, strict=True)
            ],
            "figures": [
                {
                    **asdict(one),
                    "share_of_floor": self.share_of_floor(one),
                    "ours_is_faster_by": self.times_faster(one),
                }
                for one in self.figures
            ],
            "left_out": [asdict(one) for one in self.left_out],
        }


def choose_train_libraries(peers: str, model: str) -> list[str]:
    """Return this package and the peers: "auto" (torch, and DeepCTR-Torch if it has the model), "none", or names."""
    if peers == "auto":
        named = [name for name in ("torch", "deepctr") if model in TRAIN_LIBRARIES[name].models]
    else:
        named = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    for name in named:
        if name not in TRAIN_LIBRARIES:
            raise ConfigError("unknown peer", where="--peers", value=name, fix=suggest(name, TRAIN_LIBRARIES))
    return list(dict.fromkeys([OURS, FROM_FILES, *named]))


def compare_training(
    trainings: Sequence[Training],
    names: Sequence[str],
    *,
    seconds: float = 2.0,
    heard: Callable[[TrainFigure | LeftOut], object] = lambda _: None,
) -> TrainComparison:
    """Measure libraries one after another.

    Args:
        trainings: one model with several batch sizes.
        names: names in `TRAIN_LIBRARIES`.
        seconds: time per measurement.
        heard: called with each result when it is available.
    """
    check_memory(trainings[0].tables)
    found: list[TrainFigure | LeftOut] = []
    with _process() as process:
        floors = process.submit(measure_floors, list(trainings)).result()
    for name in names:
        for training in trainings:
            with _process() as process:
                try:
                    one = process.submit(measure_training, name, training, seconds).result()
                except BrokenProcessPool:
                    one = LeftOut(name, None, "its process was killed, perhaps out of memory", None)
            found.append(one)
            heard(one)
            if isinstance(one, LeftOut):
                break
    figures = tuple(one for one in found if isinstance(one, TrainFigure))
    left_out = tuple(one for one in found if isinstance(one, LeftOut))
    return TrainComparison(tuple(trainings), tuple(floors), figures, left_out)


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def measure_training(name: str, training: Training, seconds: float) -> TrainFigure | LeftOut:
    """Measure one library in this process."""
    library, device = TRAIN_LIBRARIES[name], training.tables.device
    absent = not_imported(name, library.modules, library.install)
    if absent is not None:
        return absent
    for what, known in ((training.model, library.models), (training.tables.rule, library.rules)):
        if what not in known:
            return LeftOut(name, what, f"does not support {what} here", None)
    try:
        times = measure(library.build(training), NUM_BATCHES, device, seconds)
    except torch.cuda.OutOfMemoryError:
        return LeftOut(name, training.tables.rule, "out of memory", None)
    return TrainFigure(
        name, training.batch, times.best_ms, times.median_ms, times.high_ms, times.first_ms,
        training.batch / times.best_ms * 1e3,
    )  # fmt: skip


def measure_floors(trainings: list[Training]) -> list[Floor]:
    """Return the floor of each training, from this machine's copy bandwidth and product rate."""
    device = trainings[0].tables.device
    copied, product = copy_bandwidth(device), product_tflops(device, trainings[0].precision)
    weights = dense_parameters(trainings[0].build().module).values()
    per_row = 6.0 * sum(one.numel() for one in weights if one.dim() == 2)
    if trainings[0].model == "dlrm":  # pairs of vectors: half of a product of all vectors, three times
        per_row += 3.0 * (len(trainings[0].tables.rows) + 1) ** 2 * trainings[0].tables.dim
    floors = []
    for training in trainings:
        load = Draw(training.batch, training.ids, training.exponent).load(training.tables)
        floors.append(Floor(copied, product, step_bytes(training.tables, load), per_row * training.batch))
    return floors


def product_tflops(device: torch.device, precision: str) -> float:
    """Return the rate of large matrix products in torch, in TFLOP/s.

    Example:
        >>> product_tflops(torch.device("cpu"), "fp32") > 0
        True
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = _PRODUCT[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(kind) for _ in range(2))
    return 2 * size**3 / measure(lambda _: a @ b, 1, device, 0.3).best_ms / 1e9
