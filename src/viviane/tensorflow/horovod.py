"""The calls of Horovod that SOK's scripts make, over torch.distributed, for machines without Horovod."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from viviane.core.errors import ConfigError
from viviane.tensorflow.arguments import listed
from viviane.tensorflow.host_calls import host_call, plain_python, tensorflow
from viviane.tensorflow.processes import group
from viviane.tensorflow.table_variable import has_table
from viviane.tensorflow.variables import filter_variables

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
_TORCH: Final = {
    Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}  # fmt: skip
compression: Final = ModuleType("horovod.tensorflow.compression")
"""Accepted and without effect: numbers travel as they are."""
compression.NoneCompressor, compression.FP16Compressor = "none", "fp16"  # type: ignore[attr-defined]
Compression: Final = SimpleNamespace(none="none", fp16="fp16")
compression.Compression = Compression  # type: ignore[attr-defined]


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


def cross_rank() -> int:
    """Return this machine's number."""
    return int(os.environ.get("GROUP_RANK", "0"))


def cross_size() -> int:
    """Return the number of machines."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_homogeneous() -> bool:
    """Return True: torchrun starts as many processes on each machine."""
    return True


def gloo_built() -> bool:
    """Return True: numbers travel over Gloo."""
    return True


def _without() -> bool:
    """Return False: numbers do not travel over this library."""
    return False


gloo_enabled = gloo_built
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = (
    _without
)


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
def allreduce(
    tensor: Any,
    average: Any = None,
    *_: Any,
    op: Any = None,
    name: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    **__: Any,
) -> Any:
    """Return the mean (sum, product, smallest, largest) of a tensor over the processes.

    Args:
        tensor: a tensor, an array or a tf.IndexedSlices, which becomes one with the slices of all processes.
        average: False for the sum, Horovod's older way to say it.
        op: Average (default), Sum, Min, Max, Product.
        name: no effect.
        prescale_factor, postscale_factor: what the tensor, and the result, are multiplied by.
        process_set: None: all processes.

    Raises:
        ConfigError: another operation, or slices with one that is not a mean or a sum.
    """
    del name
    tf = tensorflow()
    kind = (Sum if average is False else Average) if op is None else op
    if kind not in _TORCH:
        raise ConfigError("no such operation", value=str(kind), allowed="Average, Sum, Min, Max, Product")
    _check_all(process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, kind, prescale_factor * postscale_factor)
    tensor = tf.convert_to_tensor(tensor)

    def reduce(array: Any) -> Any:
        whole = torch.from_numpy(np.array(array))
        dist.all_reduce(whole, _TORCH[kind])
        return (whole / size() if kind == Average else whole).numpy().astype(array.dtype)

    out = _scaled(tensor, prescale_factor)
    return _scaled(out if size() == 1 else _on_host(reduce, out, out.shape), postscale_factor)


def _scaled(tensor: Any, factor: Any) -> Any:
    tf = tensorflow()
    return tensor if isinstance(factor, int | float) and factor == 1 else tensor * tf.cast(factor, tensor.dtype)


def _allreduce_slices(slices: Any, kind: str, factor: Any) -> Any:
    """Return a tf.IndexedSlices with the slices of all processes, for their sum or mean."""
    tf = tensorflow()
    if kind not in (Average, Sum):
        raise ConfigError("slices have no such operation", value=kind, allowed="Average, Sum",
                          fix="pass tf.convert_to_tensor(slices)")  # fmt: skip
    if size() > 1:
        values = _scaled(allgather(slices.values), 1 / size() if kind == Average else 1.0)
        slices = tf.IndexedSlices(values, allgather(slices.indices), slices.dense_shape)
    return tf.IndexedSlices(_scaled(slices.values, factor), slices.indices, slices.dense_shape)


def _check_all(process_set: Any) -> None:
    if process_set is not None:
        raise ConfigError("all processes talk together here", value="process_set", fix="leave process_set out")


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


@plain_python
def alltoall(tensor: Any, splits: Any = None, name: Any = None, **_: Any) -> Any:
    """Send the first rows to the first process, and so on; return what all processes sent to this one.

    Args:
        tensor: (N, ...).
        splits: the number of rows for each process; None: as many for each. With it the numbers of rows that came
            are returned, too.
        name: no effect.

    Raises:
        ConfigError: rows cannot be dealt so.
    """
    del name
    tf = tensorflow()
    tensor = tf.convert_to_tensor(tensor)
    given = tf.fill((size(),), tf.shape(tensor)[0] // size()) if splits is None else splits

    def exchange(array: Any, counts: Any) -> Any:
        if len(counts) != size() or counts.sum() != len(array):
            raise ConfigError("splits do not fit", where="alltoall", value=counts.tolist(),
                              allowed=f"{size()} numbers, {len(array)} in all")  # fmt: skip
        parts = np.split(np.array(array), np.cumsum(counts)[:-1])
        mine = [one[rank()] for one in allgather_object(parts)]
        return np.concatenate(mine), np.array([len(one) for one in mine], np.int32)

    rows, counts = host_call(exchange, [tensor, given], [tensor.dtype, tf.int32])
    rows.set_shape([None, *tensor.shape[1:]])
    counts.set_shape([size()])
    return rows if splits is None else (rows, counts)


@plain_python
def reducescatter(tensor: Any, op: Any = Average, name: Any = None, **options: Any) -> Any:
    """Return this process's rows of `allreduce`; the first processes have one more where they do not come out even."""
    tf = tensorflow()
    tensor = allreduce(tensor, op=op, name=name, **options)
    each, rest = tf.shape(tensor)[0] // size(), tf.shape(tensor)[0] % size()
    start = rank() * each + tf.minimum(rank(), rest)
    return tensor[start : start + each + tf.cast(rank() < rest, tf.int32)]


_AS_NUMBERS: Final = {"bool": "uint8", "bfloat16": "float32"}
"""Types that torch does not take from NumPy, or does not send, and those that travel for them."""


def _on_host(function: Any, tensor: Any, shape: Any) -> Any:
    tf = tensorflow()
    kind = tf.as_dtype(_AS_NUMBERS.get(tensor.dtype.name, tensor.dtype))
    out = host_call(function, [tf.cast(tensor, kind)], kind)
    out.set_shape(shape)
    return tf.cast(out, tensor.dtype)


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


@plain_python
def broadcast_variables(variables: Any, root_rank: int = 0, **_: Any) -> None:
    """Give the dense variables of one process to all, inside of tf.function too; tables are shared anyway."""
    given = variables() if callable(variables) else variables  # an optimizer of Keras 3 has a list, others a method
    dense = filter_variables(listed("variables", given))[1]
    if size() == 1:
        return
    for variable in dense:
        variable.assign(broadcast(variable, root_rank))


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
