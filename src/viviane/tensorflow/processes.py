"""The processes that train together: those that torchrun started."""

from __future__ import annotations

import os
import sys
from typing import Final

from viviane.core.digits import number_in
from viviane.core.errors import ConfigError, expect
from viviane.parallel.group import Group
from viviane.parallel.start import join_processes

_OF_LAUNCHERS: Final = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which horovodrun and kinds of mpirun give the number of processes."""


def group() -> Group:
    """Return the processes; this one alone without torchrun.

    Raises:
        ConfigError: horovodrun or mpirun started several, each of which would train alone.
    """
    found = join_processes("cpu")
    if found.size == 1:
        for name in _OF_LAUNCHERS:
            count = number_in(os.environ.get(name, "1")) or 1
            if count > 1:
                raise ConfigError(
                    "several processes that torchrun did not start would train alone", where=name, value=count,
                    fix=f"torchrun --nproc-per-node={count} -m viviane sok script.py",
                )  # fmt: skip
    return found


def _check_eager() -> None:
    """Refuse graphs and sessions of TensorFlow 1, where TensorFlow was imported before.

    Raises:
        ConfigError: eager execution is off.
    """
    tf = sys.modules.get("tensorflow")
    if tf is not None and not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError(
            "graphs and sessions of TensorFlow 1 are not supported", value="eager execution is off",
            fix="leave tf.compat.v1.disable_eager_execution() and disable_v2_behavior() out, and make the step a "
            "tf.function with a tf.GradientTape",
        )  # fmt: skip


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Join the processes of the job.

    Args:
        comm_tool: "horovod" or "torch"; tables talk over torch.distributed in both cases.
        use_legacy_optimizer: either value: the wrapper takes optimizers of Keras 3 and of tf_keras.
    """
    set_comm_tool(comm_tool)
    _check_eager()
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
