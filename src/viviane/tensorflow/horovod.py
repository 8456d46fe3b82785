"""The calls of Horovod that SOK's scripts make, over torch.distributed, for machines without Horovod."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from viviane.core.errors import ConfigError
from viviane.tensorflow.arguments import listed
from viviane.tensorflow.host_calls import plain_python, tensorflow
from viviane.tensorflow.processes import group
from viviane.tensorflow.table_variable import has_table
from viviane.tensorflow.variables import filter_variables

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
_TORCH: Final = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}
Compression: Final = SimpleNamespace(none="none", fp16="fp16")
"""Accepted and without effect: numbers travel as they are."""


def init(*_: Any, **__: Any) -> None:
    """Join the processes that torchrun started."""
    group()


def is_initialized() -> bool:
    """Return True: processes are joined at the first call of any kind."""
    return True


def rank() -> int:
    """Return this process's number."""
    return group().rank


def size() -> int:
    """Return the number of processes."""
    return group().size


def local_rank() -> int:
    """Return this process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shutdown() -> None:
    """Do nothing: the processes part at their end."""


def barrier(*_: Any, **__: Any) -> None:
    """Wait for the other processes."""
    if size() > 1:
        dist.barrier()


def join(*_: Any, **__: Any) -> int:
    """Wait for the other processes; return the number of the last."""
    barrier()
    return size() - 1


@plain_python
def allreduce(tensor: Any, average: Any = None, *_: Any, op: Any = None, name: Any = None, **__: Any) -> Any:
    """Return the mean (sum, smallest, largest) of a tensor over the processes.

    Args:
        tensor: a tensor, an array or a tf.IndexedSlices.
        average: False for the sum, Horovod's older way to say it.
        op: Average (default), Sum, Min, Max.
        name: no effect.

    Raises:
        ConfigError: another operation.
    """
    del name
    kind = (Sum if average is False else Average) if op is None else op
    if kind not in _TORCH:
        raise ConfigError("no such operation", value=str(kind), allowed="Average, Sum, Min, Max")
    tensor = tensorflow().convert_to_tensor(tensor)

    def reduce(array: Any) -> Any:
        whole = torch.from_numpy(np.array(array))
        dist.all_reduce(whole, _TORCH[kind])
        return (whole / size() if kind == Average else whole).numpy().astype(array.dtype)

    return tensor if size() == 1 else _on_host(reduce, tensor, tensor.shape)


@plain_python
def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """Return `allreduce` of each."""
    return [allreduce(one, *args, **options) for one in listed("tensors", tensors)]


@plain_python
def allgather(tensor: Any, name: Any = None, **_: Any) -> Any:
    """Return the rows of all processes, one below the other."""
    del name
    tensor = tensorflow().convert_to_tensor(tensor)

    def gather(array: Any) -> Any:
        return np.concatenate(allgather_object(np.array(array)))

    return tensor if size() == 1 else _on_host(gather, tensor, [None, *tensor.shape[1:]])


@plain_python
def broadcast(tensor: Any, root_rank: int = 0, name: Any = None, **_: Any) -> Any:
    """Return the tensor of one process in all."""
    del name
    tensor = tensorflow().convert_to_tensor(tensor)

    def send(array: Any) -> Any:
        whole = torch.from_numpy(np.array(array))
        dist.broadcast(whole, root_rank)
        return whole.numpy()

    return tensor if size() == 1 else _on_host(send, tensor, tensor.shape)


def _on_host(function: Any, tensor: Any, shape: Any) -> Any:
    out = tensorflow().numpy_function(function, [tensor], tensor.dtype)
    out.set_shape(shape)
    return out


def broadcast_object(obj: Any, root_rank: int = 0, **_: Any) -> Any:
    """Return the object of one process in all."""
    box: list[Any] = [obj]
    if size() > 1:
        dist.broadcast_object_list(box, root_rank)
    return box[0]


def allgather_object(obj: Any, **_: Any) -> list[Any]:
    """Return the objects of all processes."""
    gathered: list[Any] = [obj] * size()
    if size() > 1:
        dist.all_gather_object(gathered, obj)
    return gathered


def broadcast_variables(variables: Any, root_rank: int = 0, **_: Any) -> None:
    """Give the dense variables of one process to all; tables are shared anyway."""
    given = variables() if callable(variables) else variables  # an optimizer of Keras 3 has a list, others a method
    dense = filter_variables(listed("variables", given))[1]
    if size() == 1:
        return
    for variable in dense:
        whole = torch.from_numpy(np.array(variable.numpy()))
        dist.broadcast(whole, root_rank)
        variable.assign(whole.numpy())


class DistributedGradientTape:
    """A tape whose gradients of dense variables are means over the processes; those of tables stay.

    Args:
        gradtape: tf.GradientTape.
        op: of `allreduce`.
        options: of Horovod's, without effect here.
    """

    def __init__(self, gradtape: Any, *_: Any, op: Any = Average, **options: Any) -> None:
        del options
        self._tape, self._op = gradtape, op

    def __getattr__(self, name: str) -> Any:
        """Pass all else on to the tape."""
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        """Record."""
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        """Stop recording."""
        return self._tape.__exit__(*error)

    @plain_python
    def gradient(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """Return the gradients in the structure of the sources."""
        tf = tensorflow()
        own = self._tape.gradient(target, sources, *args, **options)
        if size() == 1:
            return own
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(own), strict=True)
        means = [g if g is None or has_table(one) else allreduce(g, op=self._op) for one, g in pairs]
        return tf.nest.pack_sequence_as(own, means)


def modules() -> dict[str, ModuleType]:
    """Return what `import horovod`, `horovod.tensorflow` and `horovod.tensorflow.keras` find."""
    parent = ModuleType("horovod")
    own = sys.modules[__name__]
    parent.tensorflow = own  # type: ignore[attr-defined]
    keras = ModuleType("horovod.tensorflow.keras")
    keras.__dict__.update({name: one for name, one in vars(own).items() if not name.startswith("_")})
    return {"horovod": parent, "horovod.tensorflow": own, "horovod.tensorflow.keras": keras}
