"""The processes that train together: those that torchrun started."""

from __future__ import annotations

from viviane.core.errors import ConfigError, expect
from viviane.parallel.group import Group
from viviane.parallel.start import join_processes


def group() -> Group:
    """Return the processes; this one alone without torchrun."""
    return join_processes("cpu")


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Join the processes of the job.

    Args:
        comm_tool: "horovod" or "torch"; tables talk over torch.distributed in both cases.
        use_legacy_optimizer: either value: the wrapper takes optimizers of Keras 3 and of tf_keras.
    """
    set_comm_tool(comm_tool)
    del use_legacy_optimizer
    group()


def set_comm_tool(comm_tool: str) -> None:
    """Name the library that dense gradients are averaged with; tables do not need it.

    Raises:
        ConfigError: an unknown one.
    """
    expect("comm_tool", comm_tool, str)
    if comm_tool not in ("horovod", "torch"):
        raise ConfigError("no such communication tool", value=comm_tool, allowed="'horovod', 'torch'")


def rank() -> int:
    """Return this process's number."""
    return group().rank


def size() -> int:
    """Return the number of processes."""
    return group().size


def num_gpus() -> int:
    """Return the number of processes, SOK's word for it."""
    return size()
