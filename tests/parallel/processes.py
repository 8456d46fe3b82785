"""Runs a function in several processes that exchange over Gloo."""

import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank, size, folder, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        function(*arguments)
        dist.barrier()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others wait for this one in a collective: they are ended by the parent
    dist.destroy_process_group()


def run(size, function, *arguments):
    """Call function(*arguments) in `size` processes; the first error of any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_entry, (size, folder, function, arguments), nprocs=size)
        except Exception:
            errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
            raise AssertionError("\n".join(errors) or "a process ended without a word") from None
