"""The processes that train together, and what they exchange.

Shapes: n processes; splits count elements of a flat tensor for each of them.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from viviane.core.errors import ConfigError, ProcessError, VivianeError
from viviane.core.ranges import timed_as
from viviane.core.renamed import renamed_method
from viviane.parallel.watch import Watch

E = TypeVar("E", bound=BaseException)


def exchange_options(backend: str, timeout: timedelta | None = None) -> Any:
    """Return the options of a group for tensors: its kernels on a GPU, of few blocks, go before those that wait.

    Without that an exchange that could run beside a large kernel begins when its last block has found a place.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


_before_end: list[weakref.WeakMethod[Callable[[], None]]] = []


_MOST_ELEMENTS = 1 << 40
"""Of a tensor that another process sends: beyond any memory."""


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuse sizes of tensors that other processes announce and none can have, before memory is allocated for them.

    Args:
        sizes: in elements, by rank.

    Raises:
        ProcessError: a size is negative or too large; names the rank.

    Example:
        >>> check_sizes([3, 0])
    """
    for rank, size in enumerate(sizes):
        if not 0 <= size <= _MOST_ELEMENTS:
            raise ProcessError(
                "another process announced a tensor of a size that cannot be", where=f"rank {rank}", value=size,
                allowed=f"0 to {_MOST_ELEMENTS}", fix="run the same version and the same settings in all processes",
            )  # fmt: skip


class Group:
    """Processes 0 to n - 1, of which this one is `rank`; a group of one exchanges nothing.

    All processes call the same methods in the same order. Tensors of the CPU go over the control group.

    Args:
        process_group: of torch.distributed, for tensors on the device; None: this process alone.
        control: a group over the CPU for sizes, so that a GPU is not made to wait; None takes process_group.
        watch: reports failures of other ranks.
        store: of the job, for `make_once`.

    Example:
        >>> alone = Group()
        >>> alone.rank, alone.size, alone.all_to_all(torch.arange(3), [3], [3]).tolist()
        (0, 1, [0, 1, 2])
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        control: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
        store: Store | None = None,
    ) -> None:
        self._store = store
        self._made: Counter[str] = Counter()
        self._group = process_group
        self._control = control or process_group
        self._beside: dist.ProcessGroup | None = None
        self._known: BaseException | None = None
        self.watch = watch
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)

    @classmethod
    def world(cls) -> Group:
        """Return the group of all processes of torch.distributed, or of this one alone where it is not initialised."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        world = dist.group.WORLD
        assert world is not None
        if dist.get_backend(world) == "gloo":
            return cls(world)
        return cls(world, dist.new_group(backend="gloo"))

    def for_thread(self) -> Group:
        """Make a group of the same processes for another thread, over the CPU; all of them call it together."""
        if self._group is None:
            return Group()
        # The time that other ranks need is unknown; a process that dies ends its connections.
        return Group(dist.new_group(backend="gloo", timeout=timedelta(days=7)))

    @property
    def is_current(self) -> bool:
        """Whether it is of all processes of torch.distributed as it is initialised now."""
        return dist.is_initialized() and self._group is dist.group.WORLD

    @staticmethod
    def before_end(let_go: Callable[[], None]) -> None:
        """Register a method that releases objects which hold communicators, such as CUDA graphs with collectives.

        NCCL takes a connection down only when no graph holds it any more, and waits for that for ever.

        Args:
            let_go: a bound method; its object is not kept for it.
        """
        own = weakref.WeakMethod(let_go)
        _before_end[:] = [one for one in _before_end if one() is not None and one != own] + [own]

    @staticmethod
    def let_go() -> None:
        """Call the methods of `before_end`: to be done before `torch.distributed.destroy_process_group`.

        They are those of all groups: torch takes all connections of a process down together.
        """
        for reference in _before_end:
            method = reference()
            if method is not None:
                method()
        _before_end.clear()

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed for tensors on the device; None in a process alone."""
        return self._group

    def _for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else self._group

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Let the watch know that this process waits for the others, and name the one that is lost."""
        watch = self.watch
        if watch is None:
            yield
            return
        watch.enter()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # a peer is gone: Gloo raises either
            raise watch.lost(error) from error
        finally:
            watch.leave()

    # Tensors ------------------------------------------------------------------------------------------------

    @timed_as("exchange")
    def all_to_all(self, given: Tensor, given_splits: Sequence[int], taken_splits: Sequence[int]) -> Tensor:
        """Send each process its part of a flat tensor, and return the parts they sent, in order of rank.

        Args:
            given: (sum of given_splits,), contiguous.
            given_splits: elements for each process.
            taken_splits: elements from each process.
        """
        return self.start_all_to_all(given, given_splits, taken_splits)()

    def start_all_to_all(
        self, given: Tensor, given_splits: Sequence[int], taken_splits: Sequence[int], *, beside: bool = False
    ) -> Callable[[], Tensor]:
        """Begin an `all_to_all`; the function that is returned waits for it: on a GPU its stream does, not the host.

        Args:
            given, given_splits, taken_splits: as of `all_to_all`.
            beside: whether to use the second group; see `open_second_group`.
        """
        if self._group is None:
            return lambda: given
        check_sizes(taken_splits)
        taken = torch.empty(sum(taken_splits), dtype=given.dtype, device=given.device)
        with self._call():
            work = dist.all_to_all_single(
                taken, given, list(taken_splits), list(given_splits), async_op=True,
                group=self._beside if beside else self._for(given),
            )  # fmt: skip

        held = [given]  # its memory is another's only after the wait

        def wait() -> Tensor:
            with self._call():
                work.wait()
            held.clear()
            return taken

        return wait

    @timed_as("exchange")
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place; all of them get the same bits."""
        if self._group is not None:
            with self._call():
                dist.all_reduce(tensor, group=self._for(tensor))
        return tensor

    def open_second_group(self) -> None:
        """Make a second group, whose calls may be in any order relative to those of the embedding exchange."""
        if self._group is not None and self._beside is None:
            kind = dist.get_backend(self._group)
            self._beside = dist.new_group(backend=kind, pg_options=exchange_options(kind))

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a tensor in place, beside the other exchanges; the function that is returned waits for it.

        All processes have called `open_second_group` before.
        """
        if self._group is None:
            return lambda: None
        assert self._beside is not None
        return self._start_sum(tensor, self._beside)

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a tensor in place, in order with the embedding exchange; the function returned waits for it."""
        return (lambda: None) if self._group is None else self._start_sum(tensor, self._for(tensor))

    def _start_sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
        with self._call():
            work = dist.all_reduce(tensor, group=group, async_op=True)

        def wait() -> None:
            with self._call():
                work.wait()

        return wait

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Give all processes the tensor of one, in place."""
        if self._group is not None:
            with self._call():
                dist.broadcast(tensor, group_src=source, group=self._for(tensor))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor, in order of rank; of one type, and (N,) with an N of its own."""
        if self._group is None:
            return [tensor]
        counts = [one[0] for one in self.gather_numbers([len(tensor)])]
        check_sizes(counts)
        parts = [torch.empty(count, dtype=tensor.dtype, device=tensor.device) for count in counts]
        for rank, part in enumerate(parts):
            if rank == self.rank:
                part.copy_(tensor)
            self.broadcast(part, rank)
        return parts

    # Numbers and words --------------------------------------------------------------------------------------

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every process, in order of rank; a list of one length everywhere."""
        if self._group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with self._call():
            dist.all_gather(every, mine, group=self._control)
        return [one.tolist() for one in every]

    def gather_data(self, data: Any) -> list[Any]:
        """Return plain data (as JSON holds it) of every process, in order of rank."""
        text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.gather(text)]

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Run a function on rank 0 alone, and return its result, plain data, on every process.

        Raises:
            VivianeError: the function failed; the same words on every process.
        """
        if self._group is None:
            return make()
        result: Any = None
        failure: VivianeError | None = None
        if self.rank == 0:
            try:
                result = make()
            except VivianeError as error:
                failure = error
        answer = self.gather_data([result, None if failure is None else str(failure)])[0]
        if failure is not None:
            raise self.mark_reported(failure)
        if answer[1] is not None:
            raise self.mark_reported(ProcessError(f"rank 0: {answer[1]}"))
        return answer[0]

    def make_once(self, name: str, make: Callable[[], None]) -> None:
        """Run a function on rank 0; other ranks that call this wait until it has finished there.

        Unlike `from_first` it is no exchange: rank 0 may call it alone.

        Args:
            name: of what is made; the n-th call with a name waits for rank 0's n-th call with it.
            make: the function.

        Raises:
            VivianeError: the function failed on rank 0; the same words on every rank.

        Example:
            >>> Group().make_once("x", lambda: print("made"))
            made
        """
        if self._store is None:
            make()
            return
        self._made[name] += 1
        key = f"{name}/{self._made[name]}"
        if self.rank == 0:
            try:
                make()
            except VivianeError as error:
                self._store.set(key, f"rank 0: {error}")
                raise
            self._store.set(key, "")
            return
        with self._call():
            self._store.wait([key])
        if failure := self._store.get(key).decode():
            raise ProcessError(failure)

    def agree(self, what: str, number: int) -> None:
        """Refuse to continue where processes differ in a number.

        Raises:
            ConfigError: naming the processes' numbers.
        """
        numbers = [one[0] for one in self.gather_numbers([number])]
        if len(set(numbers)) > 1:
            raise ConfigError(f"the processes differ in {what}", value=", ".join(map(str, numbers)))

    def at_step(self, step: int) -> None:
        """Note which training step begins, for messages."""
        if self.watch is not None:
            self.watch.step = step

    def mark_reported(self, error: E) -> E:
        """Note that every process raises such an error now: `report` need not notify them."""
        self._known = error
        return error

    all_know = renamed_method("all_know", "mark_reported")
    open_beside = renamed_method("open_beside", "open_second_group")

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this one fails, so that they end instead of waiting for it."""
        if self.watch is not None and error is not self._known and not isinstance(error, ProcessError):
            self.watch.report(error)
