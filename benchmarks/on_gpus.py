"""Everything that only GPUs can show, in one go: the tests that need them, then the benchmarks.

    python benchmarks/on_gpus.py [--list] [--only TEXT,TEXT] [--seconds 540] [--logs FOLDER]

Stages run one after another, the ones with a GPU each in `torchrun` where the machine has several; a stage that no GPU
is there for is left out by name. What a stage prints goes to a file of the folder of logs; its last lines are shown
where it fails. --seconds ends the whole in time: a stage that would not finish by its usual length is not begun.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "-m pytest -q -W ignore -p no:cacheprovider --show-capture=no"
ONE_GPU = (
    "tests/ops/gpu tests/embedding tests/nn/test_layers_cuda.py tests/etl/test_gpu_engine.py "
    "tests/training/test_gpu.py tests/training/test_captured_step.py tests/training/test_feed_gpu.py "
    "tests/training/test_controls.py tests/training/test_recorded_models.py tests/training/test_random_runs.py "
    "tests/parallel/test_sharded_tiers.py tests/serving/test_session_cuda.py tests/export/test_export_cuda.py "
    "tests/keras_layers/test_gpu.py"
)
SEVERAL_GPUS = (
    "tests/parallel/test_exchange_gpu.py tests/training/test_captured_group_cuda.py "
    "tests/training/test_group_failure_cuda.py tests/training/test_group_tiers.py"
)


@dataclass(frozen=True)
class Stage:
    """A command of Python.

    Args:
        name: of the stage and of its log.
        arguments: of the interpreter, divided by blanks; {gpus} and {jobs} are filled in.
        seconds: its usual length on an H200 and 16 cores.
        gpus: how many it needs, at least.
        ranks: whether it runs under torchrun, one process a GPU, where there are several.
    """

    name: str
    arguments: str
    seconds: int
    gpus: int = 1
    ranks: bool = False

    def command(self, gpus: int) -> list[str]:
        """Return the command for a machine with so many GPUs."""
        jobs = max(1, min(14, (os.cpu_count() or 2) - 2))
        arguments = self.arguments.format(gpus=gpus, jobs=jobs).split()
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)] if self.ranks and gpus > 1 else []
        return [sys.executable, *launch, *arguments]


STAGES = (
    Stage("tests", f"{PYTEST} -n {{jobs}} {ONE_GPU}", 175),
    Stage("group-tests", f"{PYTEST} {SEVERAL_GPUS}", 200, gpus=2),
    Stage("check", "benchmarks/many_processes.py check", 60, gpus=2, ranks=True),
    Stage("recorded", "benchmarks/many_processes.py recorded", 60, gpus=2, ranks=True),
    Stage("train", "benchmarks/train_gpu.py --trace --files", 140),
    Stage("train-group", "benchmarks/train_group.py --trace --files", 210, gpus=2, ranks=True),
    Stage("embedding", "benchmarks/embedding_gpu.py", 50),
    Stage("graphs", "benchmarks/embedding_graphs.py", 20),
    Stage("hash", "benchmarks/hash_gpu.py", 40),
    Stage("tiers", "benchmarks/tiers_gpu.py", 300),
    Stage("largest", "benchmarks/largest_model.py", 90),
    Stage("dense", "benchmarks/dense_gpu.py", 60),
    Stage("serving", "benchmarks/serving_gpu.py", 60),
    Stage("cache", "benchmarks/device_cache_gpu.py", 90),
    Stage("product", "benchmarks/product_gpu.py", 15),
    Stage("feed", "benchmarks/feed_gpu.py", 75),
    Stage("etl", "benchmarks/etl_gpu.py", 60),
    Stage("speed", "benchmarks/many_processes.py speed", 60, gpus=2, ranks=True),
    Stage("exchange", "benchmarks/exchange_gpu.py", 90, ranks=True),
)


def run(stage: Stage, gpus: int, logs: Path) -> bool:
    """Run a stage, keep what it prints, say how it went."""
    log = logs / f"{stage.name}.log"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    # One thread a process: tests and ranks share the cores. Multicast over NVLink is not allowed on every host.
    settings = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", **os.environ, "PYTHONPATH": path}
    start = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            stage.command(gpus), cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    took = time.perf_counter() - start
    lines = log.read_text(errors="replace").splitlines()
    print(f"{stage.name}: {'passed' if done.returncode == 0 else f'FAILED, exit {done.returncode}'}, {took:.0f} s")
    print("\n".join(f"    {line[:200]}" for line in lines[-1 if done.returncode == 0 else -40 :]), flush=True)
    return done.returncode == 0


def main() -> int:
    names = ", ".join(stage.name for stage in STAGES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    parser.add_argument("--only", metavar="NAMES", help=f"stages, divided by commas: {names}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long the whole may take")
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"), help="folder of what the stages print")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [stage.name for stage in STAGES]
    if unknown := set(wanted) - {stage.name for stage in STAGES}:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {names}")
    gpus = torch.cuda.device_count()
    stages = [stage for stage in STAGES if stage.name in wanted]
    if options.list:
        print("\n".join(f"{s.name:12} {s.seconds:4} s  {' '.join(s.command(max(gpus, s.gpus))[1:])}" for s in stages))
        return 0
    if not gpus:
        parser.error("torch sees no GPU here, and every stage needs one")
    options.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    failed = []
    for stage in stages:
        if gpus < stage.gpus:
            print(f"{stage.name}: left out, it needs {stage.gpus} GPUs and {gpus} is there")
        elif time.monotonic() + stage.seconds > end:
            print(f"{stage.name}: left out, it takes some {stage.seconds} s and too little is left")
        elif not run(stage, gpus, options.logs):
            failed.append(stage.name)
    if failed:
        print(f"failed: {', '.join(failed)}; see {options.logs}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
