"""The calls of Horovod that SOK's scripts make, over torch.distributed, for machines without Horovod."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from viviane.core.errors import ConfigError
from viviane.tensorflow.arguments import listed
from viviane.tensorflow.processes import group
from viviane.tensorflow.variables import filter_variables, plain_python, tensorflow

Average: Final = "average"
Sum: Final = "sum"


def init(*_: Any, **__: Any) -> None:
    """Join the processes that torchrun started."""
    group()


def rank() -> int:
    """Return this process's number."""
    return group().rank


def size() -> int:
    """Return the number of processes."""
    return group().size


def local_rank() -> int:
    """Return this process's number on its machine."""
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))


local_size = size


def shutdown() -> None:
    """Do nothing: the processes part at their end."""


@plain_python
def allreduce(tensor: Any, op: str = Average, name: Any = None, **_: Any) -> Any:
    """Return the mean (or sum) of a tensor over the processes.

    Raises:
        ConfigError: another operation.
    """
    if op not in (Average, Sum):
        raise ConfigError("no such operation", value=str(op), allowed="Average, Sum")
    del name
    if size() == 1:
        return tensor
    tf = tensorflow()

    def reduce(array: Any) -> Any:
        whole = torch.from_numpy(np.array(array))
        dist.all_reduce(whole)
        return (whole / size() if op == Average else whole).numpy().astype(array.dtype)

    out = tf.numpy_function(reduce, [tensor], tensor.dtype)
    out.set_shape(tensor.shape)
    return out


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Give the dense variables of one process to all; tables are shared anyway."""
    _, dense = filter_variables(listed("variables", variables))
    if size() == 1:
        return
    for variable in dense:
        whole = torch.from_numpy(np.array(variable.numpy()))
        dist.broadcast(whole, root_rank)
        variable.assign(whole.numpy())


def modules() -> dict[str, ModuleType]:
    """Return what `import horovod.tensorflow` and `import horovod` find."""
    parent = ModuleType("horovod")
    own = sys.modules[__name__]
    parent.tensorflow = own  # type: ignore[attr-defined]
    return {"horovod": parent, "horovod.tensorflow": own}
