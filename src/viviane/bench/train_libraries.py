"""The training step of a model in several libraries behind one interface: train on batch i.

Batches are prepared in the format of each library outside the timed region; the library with the reader gets files.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from viviane.batch import Batch
from viviane.bench.plain_models import PLAIN, build_plain
from viviane.bench.samples import Samples, columns_of, criteo_schema
from viviane.bench.workload import NUM_BATCHES, RULES, Tables
from viviane.config import Solver
from viviane.data import Dataset, write_dataset
from viviane.model import Model
from viviane.training.feed import DeviceFeed
from viviane.zoo import ZOO

Step = Callable[[int], object]
_MOST_ROWS: Final = 1 << 21


@dataclass(frozen=True)
class Training:
    """A training workload.

    Args:
        model: name in the zoo, with its default layer sizes.
        tables: sizes, width and optimizer of the tables; the optimizer also updates the dense layers.
        batch: B.
        num_dense: number of dense columns.
        precision: precision of the dense layers.
        ids, exponent: distribution of ids.
    """

    model: str
    tables: Tables
    batch: int
    num_dense: int = 13
    precision: str = "fp32"
    ids: str = "power-law"
    exponent: float = 1.1

    @property
    def samples(self) -> Samples:
        """The rows, the same for every library."""
        return Samples(criteo_schema(self.tables.rows, self.num_dense), self.ids, self.exponent)

    def batches(self) -> list[Batch]:
        """Draw batches, on the device."""
        samples = self.samples
        return [samples.batch(self.batch).to(self.tables.device) for _ in range(NUM_BATCHES)]

    def write(self, folder: Path, batches: int = 8 * NUM_BATCHES) -> Dataset:
        """Write rows for this many batches, or 2 million rows: the drawn batches are repeated.

        The first epoch begins by waiting for its first shuffle window, so there should be many batches.
        """
        samples, drawn = self.samples, self.batch * NUM_BATCHES
        columns = columns_of(samples.schema, samples.batch(drawn))
        times = max(1, min(batches // NUM_BATCHES, _MOST_ROWS // drawn))
        return write_dataset(folder, samples.schema, [columns] * times, format="viviane")

    def build(self) -> Model:
        """Return this package's model, compiled."""
        tables = self.tables
        settings = {"lr": tables.lr, "batch_size": self.batch, "precision": self.precision}
        solver = Solver.from_dict({**settings, "device": str(tables.device)})
        model = Model(solver, self.samples.schema, name=self.model)
        model.add(ZOO[self.model](dim=tables.dim))
        model.compile(RULES[tables.rule])
        return model


@dataclass(frozen=True)
class TrainLibrary:
    """A library that may be measured.

    Args:
        title: description of what is measured.
        modules: modules to import, besides torch.
        install: install command.
        models, rules: supported models and optimizers.
        build: creates the step.
    """

    title: str
    modules: tuple[str, ...]
    install: str | None
    models: tuple[str, ...]
    rules: tuple[str, ...]
    build: Callable[[Training], Step]


def _own(training: Training) -> Step:
    step, batches = training.build().trainer.train_step, training.batches()
    return lambda i: step(batches[i])


def _own_from_files(training: Training) -> Step:
    model, folder = training.build(), Path(tempfile.mkdtemp(prefix="viviane-bench-"))
    feed = DeviceFeed.open(training.write(folder / "rows"), training.batch, training.tables.device, shuffle=True)
    batches = _endless(feed)

    def step(_: int) -> Tensor:
        return model.trainer.train_step(next(batches))

    weakref.finalize(step, shutil.rmtree, folder)
    return step


def _endless(feed: DeviceFeed) -> Iterator[Batch]:
    feed.read_on(sys.maxsize)
    while True:
        yield from feed


def _plain(training: Training, *, compiled: bool = False) -> Step:
    tables = training.tables
    torch.manual_seed(0)
    zoo = ZOO[training.model](dim=tables.dim)
    model = build_plain(training.model, tables.rows, training.num_dense, zoo).to(tables.device)
    optimizers = _optimizers(model, tables)
    batches = [(batch.dense, batch.one_hot.t().long().contiguous(), batch.labels[:, 0]) for batch in training.batches()]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision)
    run: Any = torch.compile(model) if compiled else model

    def step(i: int) -> Tensor:
        dense, ids, labels = batches[i]
        with nullcontext() if kind is None else torch.autocast(tables.device.type, kind):
            logits = run(dense, ids)
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
        for one in optimizers:
            one.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
        return loss.detach()

    return step


def _optimizers(model: nn.Module, tables: Tables) -> list[torch.optim.Optimizer]:
    sparse = [bag.weight for bag in model.modules() if isinstance(bag, nn.EmbeddingBag)]
    known = {id(one) for one in sparse}
    dense = [one for one in model.parameters() if id(one) not in known]
    if tables.rule == "sgd":
        return [torch.optim.SGD(sparse, lr=tables.lr), torch.optim.SGD(dense, lr=tables.lr)]
    if tables.rule == "adagrad":
        return [torch.optim.Adagrad(sparse, lr=tables.lr), torch.optim.Adagrad(dense, lr=tables.lr)]
    return [torch.optim.SparseAdam(sparse, lr=tables.lr), torch.optim.Adam(dense, lr=tables.lr)]


def _compiled(training: Training) -> Step:
    return _plain(training, compiled=True)


def _deepctr(training: Training) -> Step:
    inputs: Any = importlib.import_module("deepctr_torch.inputs")
    models: Any = importlib.import_module("deepctr_torch.models")
    tables, zoo = training.tables, ZOO[training.model](dim=training.tables.dim)
    columns = [inputs.SparseFeat(f"c{n}", rows, embedding_dim=tables.dim) for n, rows in enumerate(tables.rows, 1)]
    columns += [inputs.DenseFeat(f"i{n}", 1) for n in range(1, training.num_dense + 1)]
    options: dict[str, Any] = {"dnn_hidden_units": zoo.to_dict()["deep_mlp"], "device": str(tables.device)}
    if training.model == "deepfm":
        model = models.DeepFM(columns, columns, **options)
    else:
        kind = "matrix" if training.model == "dcn_v2" else "vector"
        crosses = zoo.to_dict()["num_cross_layers"]
        model = models.DCN(columns, columns, cross_num=crosses, cross_parameterization=kind, **options)
    rules = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    optimizer = rules[tables.rule](model.parameters(), lr=tables.lr)
    batches = [(torch.cat([batch.one_hot.float(), batch.dense], 1), batch.labels[:, 0]) for batch in training.batches()]
    model.train()

    def step(i: int) -> object:
        x, labels = batches[i]
        loss = F.binary_cross_entropy(model(x).squeeze(1), labels) + model.get_regularization_loss().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


OURS: Final = "viviane"
FROM_FILES: Final = "viviane, reader"
_TORCH_RULES: Final = ("sgd", "adagrad", "adam")
TRAIN_LIBRARIES: Final[Mapping[str, TrainLibrary]] = {
    OURS: TrainLibrary("batches in memory", (), None, tuple(ZOO), tuple(RULES), _own),
    FROM_FILES: TrainLibrary("the same from files, shuffled", (), None, tuple(ZOO), tuple(RULES), _own_from_files),
    "torch": TrainLibrary(
        "nn.EmbeddingBag(sparse=True) for each table", (), None, tuple(PLAIN), _TORCH_RULES, _plain,
    ),
    "torch-compile": TrainLibrary(
        "the same under torch.compile", (), None, tuple(PLAIN), _TORCH_RULES, _compiled,
    ),
    "deepctr": TrainLibrary(
        "DeepCTR-Torch, in float32, its gradients are as large as the tables", ("deepctr_torch",),
        "pip install deepctr-torch", ("dcn", "dcn_v2", "deepfm"), _TORCH_RULES, _deepctr,
    ),
}  # fmt: skip
"""All libraries, this package first."""
