"""What `viviane doctor` reports: machine, libraries, extras, and whether a small training run works here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from viviane.core import machine
from viviane.ops import dispatch

# What each extra of pyproject.toml is for; False if it is planned.
EXTRAS: Final[dict[str, tuple[str, bool]]] = {
    "etl": ("cleaning raw logs on one machine: viviane etl, prediction on raw rows", True),
    "tracking": ("TensorBoard files in the run folder", True),
    "spark": ("cleaning raw logs on a cluster", True),
    "serving": ("serving over HTTP and gRPC: viviane serve, viviane load-test", True),
    "retrieval": ("approximate nearest neighbours: viviane index, viviane recommend", True),
    "redis": ("rows of served models in Redis or Valkey", True),
    "rocksdb": ("rows on disk, for training and serving", True),
    "kafka": ("training on a Kafka topic", True),
    "hdfs": ("data, models and checkpoints in HDFS by URL", True),
    "onnx": ("export to ONNX", True),
    "sklearn": ("estimators with scikit-learn's contract: CTRClassifier", True),
    "tune": ("search for settings: viviane tune", True),
    "yaml": ("settings in YAML beside JSON", True),
    "hub": ("models on the Hugging Face Hub", True),
    "mlflow": ("runs in MLflow", True),
    "wandb": ("runs in Weights & Biases", True),
    "keras": ("embedding layers for Keras 3", True),
    "jax": ("the same on JAX", True),
    "tensorflow": ("the same on TensorFlow, and scripts for the Sparse Operation Kit", True),
    "docs": ("building this documentation", True),
    "dev": ("tests and linters", True),
}
_FREE_DISK_BYTES: Final = 2 * machine.GIB


@dataclass(frozen=True)
class Check:
    """One thing that was tried: whether it works, what was seen, and what to do where it does not."""

    name: str
    ok: bool
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Extra:
    """An extra: what it is for, and which of its libraries are not installed."""

    extra: str
    purpose: str
    available: bool
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Operation:
    """Which implementation an operation would use on a device, and why."""

    name: str
    device: str
    implementation: str
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The whole report; `healthy` is False if a check failed."""

    versions: dict[str, str | None]
    machine: dict[str, Any]
    threads: dict[str, int]
    extras: tuple[Extra, ...]
    operations: tuple[Operation, ...]
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether every check succeeded."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for --json."""
        return {"healthy": self.healthy, **asdict(self)}


def diagnose() -> Diagnosis:
    """Look at this machine and try what training needs; takes about a second."""
    total, available = machine.memory_bytes()
    return Diagnosis(
        versions={"python": platform.python_version(), **machine.versions("viviane", *_requirements(None))},
        machine={
            "system": platform.platform(),
            "cpu": asdict(machine.cpu()),
            "memory_bytes": total,
            "memory_available_bytes": available,
            "gpus": [asdict(gpu) for gpu in machine.gpus()],
            "cuda": torch.version.cuda,
            "temporary_folder": tempfile.gettempdir(),
            "temporary_free_bytes": machine.free_disk_bytes(tempfile.gettempdir()),
        },
        threads={"torch": torch.get_num_threads(), "torch_between_operations": torch.get_num_interop_threads()},
        extras=tuple(extras()),
        operations=tuple(operations()),
        checks=tuple(_attempt(name, check) for name, check in CHECKS.items()),
    )


def extras() -> list[Extra]:
    """Return every extra, with the libraries that are missing here."""
    found = []
    for extra, (purpose, available) in EXTRAS.items():
        installed = machine.versions(*_requirements(extra))
        missing = tuple(name for name, version in installed.items() if version is None)
        found.append(Extra(extra, purpose, available, missing))
    return found


def operations() -> list[Operation]:
    """Return the implementation that each operation uses on each device of this machine."""
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(len(machine.gpus())))]
    return [
        Operation(name, str(device), dispatch.choose(device), dispatch.reason(device, name))
        for name in dispatch.operations()
        for device in devices
    ]


def _requirements(extra: str | None) -> list[str]:
    """Return the distributions that the package, or one of its extras, asks for."""
    names = []
    for line in importlib.metadata.requires("viviane") or []:
        marker = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            names.append(re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0])
    return list(dict.fromkeys(names))


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # whatever is broken on this machine is the finding
        return Check(name, False, f"{type(error).__name__}: {error}", "see the message; VIVIANE_TRACEBACK=1 shows more")


def _check_python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, platform.python_version(), "" if ok else "install Python 3.11 or newer")


def _check_libraries() -> Check:
    missing = [name for name, version in machine.versions(*_requirements(None)).items() if version is None]
    if missing:
        return Check("libraries", False, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("libraries", True, "all that training needs is installed")


def _check_disk() -> Check:
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile() as file:
        file.write(b"viviane")
    free = machine.free_disk_bytes(folder)
    seen = f"{free / machine.GIB:.1f} GiB free in {folder}"
    fix = "" if free >= _FREE_DISK_BYTES else "free disk space, or set TMPDIR to a folder on a larger disk"
    return Check("temporary files", free >= _FREE_DISK_BYTES, seen, fix)


def _check_gpu() -> Check:
    gpus = machine.gpus()
    if gpus:
        return Check("gpu", True, f"{len(gpus)} visible to torch")
    if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        fix = "install torch's CUDA build for your driver, or hide the GPU: CUDA_VISIBLE_DEVICES="
        return Check("gpu", False, f"this machine has an NVIDIA GPU and torch ({build}) cannot use it", fix)
    return Check("gpu", True, "none here; training runs on the CPU")


def _check_graphs() -> Check:
    if not machine.gpus():
        return Check("cuda graphs", True, "no GPU here: training steps run one launch after another")
    device = torch.device("cuda", 0)
    if not dispatch.kernels_serve(device):
        fix = f"unset {dispatch.VARIABLE}"
        return Check("cuda graphs", True, f"{dispatch.VARIABLE} chooses plain torch: steps are not recorded", fix)
    one = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.add_(1)
    for _ in range(3):
        graph.replay()
    seen = "recorded and replayed; model.trainer.cuda_graph says why a model's steps are not"
    return Check("cuda graphs", one.item() == 3, seen, "" if one.item() == 3 else "report this, with --json")


def _check_peers() -> Check:
    count = len(machine.gpus())
    if count < 2:
        return Check("gpu to gpu", True, "fewer than two GPUs here")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        first, second = apart[0]
        seen = f"cuda:{first} does not reach the memory of cuda:{second}: several processes exchange over NCCL alone"
        return Check("gpu to gpu", True, seen)
    return Check("gpu to gpu", True, "all reach each other's memory: recorded steps of several processes write there")


def _check_training() -> Check:
    devices = ["cpu", *(["cuda:0"] if machine.gpus() else [])]
    seen = []
    for device in devices:
        losses = _train_three_steps(device)
        if not losses[0] > losses[1] > losses[2]:
            return Check("training", False, f"the loss does not fall on {device}: {losses}", "report this, with --json")
        seen.append(f"{device}: loss {losses[0]:.3f} -> {losses[2]:.3f}")
    return Check("training", True, "three steps in memory, " + "; ".join(seen))


def _train_three_steps(device: str) -> list[float]:
    """Learn on which side of 8 a key lies; an embedding and a linear layer do it in a few steps."""
    from viviane.batch import Bag
    from viviane.config import SGD
    from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

    tables = [TableConfig(name="key", num_rows=16, dim=4)]
    features = [FeatureConfig(name="key", table="key")]
    embedding = EmbeddingCollection(tables, features, SGD(), device=device, seed=0)
    keys = torch.arange(16, device=device)
    batch = {"key": Bag(keys, torch.arange(17, device=device))}
    labels = (keys >= 8).float()
    weight = torch.full((4,), 0.5, device=device)
    losses = []
    for _ in range(3):
        logits = embedding(batch).flat @ weight
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        embedding.step(1.0)
        losses.append(loss.item())
    return losses


CHECKS: Final[dict[str, Callable[[], Check]]] = {
    "python": _check_python,
    "libraries": _check_libraries,
    "temporary files": _check_disk,
    "gpu": _check_gpu,
    "cuda graphs": _check_graphs,
    "gpu to gpu": _check_peers,
    "training": _check_training,
}
