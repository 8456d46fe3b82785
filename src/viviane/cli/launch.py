"""From one command to many processes: the same command line under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from viviane.core.errors import ConfigError
from viviane.core.machine import usable_cores

_OWN = ("--processes", "--gpus", "--max-restarts")


def launch(processes: int | None, gpus: int | None, max_restarts: int = 0) -> NoReturn:
    """Start this command line in several processes, in place of this one.

    Args:
        processes: on the CPU.
        gpus: one process for each of this many GPUs of this machine.
        max_restarts: how often all of them are restarted after one has died.

    Raises:
        ConfigError: both, or more GPUs than there are, or this process was itself started by torchrun.
    """
    if processes is not None and gpus is not None:
        raise ConfigError("either processes on the CPU, or one for each GPU", value=f"{processes} and {gpus}",
                          fix="give --processes or --gpus")  # fmt: skip
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("torchrun has started several processes already", value=os.environ.get("WORLD_SIZE"),
                          fix="leave --processes and --gpus out under torchrun")  # fmt: skip
    if gpus is not None:
        _check_gpus(gpus)
    count = processes or gpus or 1
    command = torchrun(count, [*without(sys.argv[1:], _OWN), "--set", f"solver.device={'cuda' if gpus else 'cpu'}"],
                       max_restarts)  # fmt: skip
    # torchrun would give each process one thread and warn; the cores are shared evenly instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def torchrun(count: int, arguments: Sequence[str], max_restarts: int = 0) -> list[str]:
    """Return the command that runs the command line in several processes of this machine.

    Example:
        >>> torchrun(2, ["train", "run.json"])[1:6]
        ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    """
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
        "--max-restarts", str(max_restarts), "-m", "viviane.cli.main", *arguments,
    ]  # fmt: skip


def without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return arguments without some options and their values.

    Example:
        >>> without(["train", "--gpus", "2", "--resume", "--processes=4"], ["--gpus", "--processes"])
        ['train', '--resume']
    """
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.split("=", 1)[0] not in names:
            kept.append(argument)
    return kept


def _check_gpus(gpus: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > count:
        fix = f"viviane {' '.join(without(sys.argv[1:], _OWN))} " + (f"--gpus {count}" if count else "--processes 2")
        raise ConfigError("more GPUs than this machine has", value=gpus, allowed=f"up to {count}", fix=f"run: {fix}")
