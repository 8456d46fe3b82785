"""Runs a function in several processes that exchange over Gloo, or over NCCL with a GPU for each."""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from viviane.parallel import Group


def _entry(rank, size, folder, function, arguments, backend, environment):
    os.environ.clear()  # a forked process has that of the server's start
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, device_id=device)
    try:
        function(*arguments)
        dist.barrier()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others wait for this one in a collective: they are ended by the parent
    Group.let_go()  # NCCL waits for the CUDA graphs that trainers hold
    gc.collect()
    dist.destroy_process_group()


def run(size, function, *arguments, backend="gloo"):
    """Call function(*arguments) in `size` processes; the first error of any of them is raised here.

    On CPUs they are forked from a server that imports once what takes each of them seconds; it runs nothing else.
    """
    method = "spawn" if backend == "nccl" or sys.platform == "win32" else "forkserver"
    multiprocessing.set_forkserver_preload(["tests.preloaded"])  # found by the working directory, the root
    with tempfile.TemporaryDirectory() as folder:
        everything = (size, folder, function, arguments, backend, dict(os.environ))
        try:
            mp.start_processes(_entry, everything, nprocs=size, start_method=method)
        except Exception:
            errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
            raise AssertionError("\n".join(errors) or "a process ended silently") from None
