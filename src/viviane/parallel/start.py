"""From torchrun's environment to a group of processes: one script for one process and for many."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from viviane.core.errors import ConfigError
from viviane.core.logging import get_logger
from viviane.parallel.group import Group, exchange_options
from viviane.parallel.watch import Watch

_log = get_logger("parallel")
_SLACK = 2  # collectives may take twice the time after which the watch ends a job
_started: list[Group] = []


def join_processes(device: str = "auto", timeout_s: float = 600.0) -> Group:
    """Return the group that this process trains in: all that torchrun started, or this one alone.

    On GPUs each process takes the one of its LOCAL_RANK and exchanges over NCCL; on a CPU over Gloo. The group is
    made once; later calls return it. Where torch.distributed was initialised already, its processes are taken.

    Args:
        device: "auto", "cpu", "cuda".
        timeout_s: seconds without a sign of life from a process that end the job.

    Raises:
        ConfigError: more processes than GPUs on this machine, or a device "cuda:1" for all of them.

    Example:
        >>> join_processes("cpu").size
        1
    """
    if _started and _started[0].is_current:
        return _started[0]
    if dist.is_available() and dist.is_initialized():
        group = Group.world()
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        group = _start(_local_device(device), timeout_s)
    else:
        return Group()
    _started[:] = [group]
    return group


def num_restarts() -> int:
    """Return how often torchrun has restarted this job's processes (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _local_device(device: str) -> torch.device:
    """Return this process's device, and make its GPU the current one."""
    wanted = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != "cuda":
        raise ConfigError(
            "one GPU for all processes", where="solver.device", value=device, allowed="auto, cpu, cuda",
            fix="set 'cuda': every process takes the GPU of its number",
        )  # fmt: skip
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        processes = os.environ.get("LOCAL_WORLD_SIZE", str(local + 1))
        raise ConfigError(
            "more processes than GPUs on this machine", value=processes, allowed=str(count),
            fix=f"start it with: torchrun --nproc-per-node {count} ..." if count else "set solver.device to 'cpu'",
        )  # fmt: skip
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _start(device: torch.device, timeout_s: float) -> Group:
    limit = timedelta(seconds=_SLACK * timeout_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Processes that are restarted meet the same store: its old keys would lead them to addresses of the dead.
    prefix = f"viviane/{num_restarts()}"
    store = _connect(is_host=rank == 0 and not _has_agent(), limit=limit)
    meeting = PrefixStore(f"{prefix}/groups", store)
    kind = "nccl" if device.type == "cuda" else "gloo"
    own = device if kind == "nccl" else None
    dist.init_process_group(
        kind,
        store=meeting,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=own,
        pg_options=exchange_options(kind, limit),
    )
    control = dist.new_group(backend="gloo", timeout=limit) if kind == "nccl" else None
    # A connection of its own: the main thread may hold the first one for as long as it waits.
    watch = Watch(PrefixStore(f"{prefix}/watch", _connect(is_host=False, limit=limit)), rank, size, timeout_s)
    group = Group(dist.group.WORLD, control, watch, PrefixStore(f"{prefix}/made", store))
    atexit.register(_stop, group, watch)
    _log.info("rank %d of %d on %s", rank, size, device)
    return group


def _has_agent() -> bool:
    """Whether torchrun itself keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(*, is_host: bool, limit: timedelta) -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=is_host, timeout=limit, wait_for_workers=False)


def _stop(group: Group, watch: Watch) -> None:
    watch.close()
    # After a failure another process may never answer, and taking the groups down would wait for it.
    if dist.is_initialized() and watch.failure is None:
        group.let_go()
        gc.collect()  # what was forgotten in a cycle of references holds connections, too
        dist.destroy_process_group()
