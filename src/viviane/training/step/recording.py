"""Record the dense part of a training step on a CPU: the operators that torch's dispatcher runs, as one function.

A `Recorder` notes every operator of forward, loss and backward of one step, and `DenseProgram` runs the same operators
in the same order without modules and autograd. Lookups are not part of it: they run in each step, and the program takes
their vectors and gives their gradients back.

Layers with native kernels that the dispatcher does not see run them in functions marked as `native_operator`; each is
one operation of the program. A step is refused if it runs other kernels outside of lookups, or what depends on the
values of a batch: reads of single values, shapes that depend on values, and tensors of unknown origin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from viviane.batch import Batch
from viviane.embedding import EmbeddingCollection

_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_CLONE = (torch.ops.aten.new_empty_strided.default, torch.ops.aten.copy_.default)
_INDEX = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_DIRECT = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.addcmul.default: torch.addcmul,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.as_strided.default: torch.as_strided,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.copy_.default: Tensor.copy_,
    torch.ops.aten.dot.default: torch.dot,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.relu_.default: torch.relu_,
    torch.ops.aten.select.int: torch.select,
    torch.ops.aten.sigmoid.default: torch.sigmoid,
    torch.ops.aten.stack.default: torch.stack,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.sum.default: torch.sum,
    torch.ops.aten.sum.dim_IntList: torch.sum,
    torch.ops.aten.t.default: torch.t,
    torch.ops.aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.aten.view.default: Tensor.view,
}
"""Functions that call the same operator with the same arguments and take less time to read them."""
_YIELD = "yield"

Program = Callable[[list[Any]], Generator[Any, None, None]]


@dataclass(frozen=True)
class _Name:
    """A value of the program, in the place of its tensor."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass
class _Operation:
    """One line of the program: `outputs = target(*arguments, **options)`."""

    target: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str | None, ...] = ()
    is_tuple: bool = False

    def reads(self) -> set[str]:
        """Names of the values that it reads or writes in place."""
        names = {one.text for one in tree_leaves((self.arguments, self.options)) if isinstance(one, _Name)}
        return names | {self.target} if isinstance(self.target, str) and self.target != _YIELD else names


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of one step. Use it as a context around forward, and again around backward.

    Args:
        inputs: tensors of the batch, by name.
        constants: tensors that stay the same objects in all steps, by name: weights and buffers.
        collections: the embedding collections of the module.

    Attributes:
        reason: why the step cannot be replayed; None if it can.
        lookups: the collections that were called, in order.
        flats: the vectors of each, as they were before the layers.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor], collections: Iterable[EmbeddingCollection]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self.lookups: list[EmbeddingCollection] = []
        self.mask_names: list[tuple[str, ...]] = []
        self.inputs = list(inputs)
        self.constants = dict(constants)
        self.operations: list[_Operation] = []
        self.first_of_backward = 0
        self._collections = list(collections)
        self._names: dict[int, str] = {}
        self._places: dict[Any, str] = {}
        self._kept: list[Tensor] = []  # keeps ids and addresses unique
        self._num_paused = 0
        self._handed_over: set[int] = set()
        self._batch: Batch | None = None
        self._hooks = ExitStack()
        self._thread = get_ident()
        self._loss = ""
        for name, tensor in (*inputs.items(), *constants.items()):
            self._bind(tensor, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which torch asks: to keep its compiler out it would load it; no recorded step is compiled."""
        return False

    # What is recorded ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "profiler":
            self._try(self._note, func, args, kwargs, out)
        return out

    def _try(self, note: Callable[..., None], func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation that has run, unless it belongs to a lookup; the eager step continues in any case."""
        if not self._num_paused and self.reason is None:
            try:
                note(func, args, kwargs, out)
            except Exception as error:
                self.refuse(f"{func} could not be recorded: {type(error).__name__}: {error}")

    def refuse(self, reason: str) -> None:
        """Note why the step cannot be replayed; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if any(tag in func.tags for tag in _VALUES) and not _indexes_by_numbers(func, args):
            self.refuse(f"{func} reads values of a tensor, or its result's shape depends on them")
        elif func in _ALIASES and self._name_of(args[0]) is not None:
            self._bind(out, str(self._name_of(args[0])))
        elif func is _SET:
            self._note_view(args)
        else:
            self._note_operation(func, args, kwargs, out)

    def _note_view(self, args: tuple[Any, ...]) -> None:
        """Note `set_` on an empty tensor as a view of the tensor whose memory it takes."""
        own, storage, offset, size, stride = args
        base = next((one for one in self._kept if one.untyped_storage().data_ptr() == storage.data_ptr()), None)
        if base is None or own.data_ptr() == 0:
            self.refuse("a tensor takes the memory of one that is not part of the step")
            return
        name = f"v{len(self._kept)}"
        self.operations.append(_Operation(
            torch.ops.aten.as_strided.default, (_Name(self._names[id(base)]), list(size), list(stride), offset), {},
            (name,),
        ))  # fmt: skip
        self._bind(own, name)

    def _note_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        unknown = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and self._name_of(one) is None]
        if unknown or tree_any(lambda one: isinstance(one, torch.UntypedStorage), (args, kwargs)):
            what = f", {tuple(unknown[0].shape)} of {unknown[0].dtype}" if unknown else ""
            self.refuse(f"{func} reads a tensor that is neither a weight, a buffer, nor of the batch's columns{what}")
            return
        arguments, options = tree_map(
            lambda one: _Name(str(self._name_of(one))) if isinstance(one, Tensor) else one, (args, kwargs)
        )
        names: list[str | None] = []
        results = list(out) if isinstance(out, list | tuple) else [out]
        for one in results:
            if not isinstance(one, Tensor) or id(one) in self._names:  # written in place
                names.append(None)
                continue
            names.append(f"v{len(self._kept)}")
            self._bind(one, f"v{len(self._kept)}")
        is_tuple = isinstance(out, list | tuple)
        self.operations.append(_Operation(func, arguments, options, tuple(names), is_tuple))

    def _bind(self, tensor: Tensor, name: str) -> None:
        self._kept.append(tensor)
        self._names[id(tensor)] = name
        if tensor.numel():
            self._places[_place(tensor)] = name

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor; autograd gives saved tensors back as other objects over the same memory."""
        name = self._names.get(id(tensor))
        if name is None and tensor.layout is torch.strided and tensor.numel():
            name = self._places.get(_place(tensor))
        return name

    # Native kernels -----------------------------------------------------------------------------------------

    def before_kernel(self) -> None:
        """Refuse a kernel that belongs neither to a lookup nor to a native operator."""
        if not self._num_paused:
            self.refuse("a layer runs a kernel that torch's dispatcher does not see")

    def run_operator(self, operator: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a native operator and note it, but not what it is made of."""
        self._num_paused += 1
        try:
            out = operator(*args)
        finally:
            self._num_paused -= 1
        self._try(self._note_operation, operator, args, {}, out)
        return out

    # Lookups ------------------------------------------------------------------------------------------------

    def watch(self, batch: Batch) -> None:
        """Note lookups of a batch from now on, until `close`."""
        from viviane.ops.native.kernels import listening_to_kernels  # loads Numba, as the first lookup has done

        self._batch = batch
        self._hooks.enter_context(listening_to_kernels(self))
        for collection in self._collections:
            before = collection.register_forward_pre_hook(self._before_lookup, with_kwargs=True)
            after = collection.register_forward_hook(self._after_lookup)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def _before_lookup(self, collection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != self._thread:  # another thread predicts
            return
        self._num_paused += 1
        if len(args) != 1 or kwargs or args[0] is not self._batch or collection in self.lookups:
            self.refuse("a collection looks something else up than the batch, or the batch twice")

    def _after_lookup(self, collection: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() != self._thread:
            return
        self._num_paused -= 1
        assert isinstance(collection, EmbeddingCollection)
        number = len(self.lookups)
        self.lookups.append(collection)
        self.mask_names.append(tuple(output.masks))
        self._bind(output.flat, f"flat{number}")
        for i, mask in enumerate(output.masks.values()):
            self._bind(mask, f"mask{number}_{i}")
        node = output.flat.grad_fn
        if node is None:
            return

        def before(gradients: tuple[Tensor, ...]) -> None:
            self._num_paused += 1
            if self.reason is not None:
                return
            name = self._name_of(gradients[0])
            if name is None or number in self._handed_over:
                self.refuse("the gradient of a lookup is not part of the step")
                return
            self._handed_over.add(number)
            self.operations.append(_Operation(f"take{number}", (_Name(name),)))

        def after(*_: object) -> None:
            self._num_paused -= 1

        self._hooks.callback(node.register_prehook(before).remove)
        self._hooks.callback(node.register_hook(after).remove)

    # The program --------------------------------------------------------------------------------------------

    def end_forward(self, loss: Tensor) -> None:
        """Note the loss; what follows is backward."""
        name = self._name_of(loss)
        if name is None:
            self.refuse("the loss is not computed by operators of the step")
        self._loss, self.first_of_backward = str(name), len(self.operations)

    def program(self, gradients: Sequence[Tensor | None]) -> DenseProgram | None:
        """Return what was recorded, if it can be replayed.

        Args:
            gradients: of the dense parameters, as backward left them.
        """
        names = [None if one is None else self._name_of(one) for one in gradients]
        if any(one is not None and name is None for one, name in zip(gradients, names, strict=True)):
            self.refuse("the gradient of a weight is not computed by operators of the step")
        if self.reason is not None:
            return None
        try:
            return self._compiled(names)
        except Exception as error:
            self.refuse(f"the step could not be recorded: {type(error).__name__}: {error}")
            return None

    def _compiled(self, names: Sequence[str | None]) -> DenseProgram:
        """Return the program whose last results have these names."""
        operations = [*self.operations]
        operations.insert(self.first_of_backward, _Operation(_YIELD, (_Name(self._loss),)))
        results = self._without_copies(operations, [None if name is None else _Name(name) for name in names])
        operations = _without_unread(operations, results)
        every = [f"take{i}" for i in sorted(self._handed_over)]
        every = [f"flat{i}" for i in range(len(self.lookups))] + every
        every += [f"mask{i}_{j}" for i, masks in enumerate(self.mask_names) for j in range(len(masks))]
        run = compile_program([*self.inputs, *every], self.constants, operations, results)
        return DenseProgram(run, self.lookups, self.mask_names, sorted(self._handed_over))

    def _without_copies(self, operations: list[_Operation], results: list[_Name | None]) -> list[_Name | None]:
        """Leave out copies that autograd made of gradients only because the recorder held them, too."""
        tensors = {self._names[id(one)]: one for one in self._kept}
        for i, result in enumerate(results):
            at = next((n for n, one in enumerate(operations) if result and one.outputs == (result.text,)), None)
            if result is None or at is None or at + 1 >= len(operations):
                continue
            made, copied = operations[at : at + 2]
            if (made.target, copied.target) != _CLONE or copied.arguments[0] != result:
                continue
            source = copied.arguments[1]
            own, given = tensors[result.text], tensors[source.text]
            memory, later = given.untyped_storage(), operations[at + 2 :]
            places = {
                tensors[name].untyped_storage().data_ptr() for one in later if _writes(one) for name in one.reads()
            }
            read = any(result.text in one.reads() for one in later)
            whole = memory.nbytes() == given.numel() * given.element_size()  # no columns of something larger
            is_equal = own.stride() == given.stride() and own.dtype == given.dtype
            if whole and is_equal and not read and memory.data_ptr() not in places:
                del operations[at : at + 2]
                results[i] = source
        return results


@dataclass(frozen=True)
class DenseProgram:
    """The dense part of a step as one function.

    Args:
        run: takes a list of tensors and empties it; yields the loss, then the gradients of the dense parameters.
        lookups: the collections whose vectors it takes.
        mask_names: the masks that it takes of each.
        trained: which of them take gradients.
    """

    run: Program
    lookups: Sequence[EmbeddingCollection]
    mask_names: Sequence[tuple[str, ...]]
    trained: Sequence[int]

    def start(self, batch: Batch, inputs: list[Any]) -> Generator[Any, None, None]:
        """Look a batch up, and return the program, which waits before its first operator.

        Args:
            batch: the batch.
            inputs: its tensors, in the order of the recorder's inputs.
        """
        masks: list[Tensor] = []
        takes: list[Any] = []
        for collection, names in zip(self.lookups, self.mask_names, strict=True):
            flat, found, take = collection.look_up_with_masks(batch)
            inputs.append(flat)
            takes.append(take)
            masks += [found[name] for name in names]
        inputs += [takes[i] for i in self.trained]
        inputs += masks
        return self.run(inputs)


def compile_program(
    inputs: Sequence[str], constants: Mapping[str, Tensor], operations: Sequence[_Operation], results: Sequence[Any]
) -> Program:
    """Return the operations as a Python function, which lets values go after their last use."""
    scope: dict[str, Any] = dict(constants)
    last: dict[str, int] = {}
    for i, one in enumerate(operations):
        last |= dict.fromkeys([*one.reads(), *(name for name in one.outputs if name)], i)
    kept = {one.text for one in results if one is not None} | set(constants)

    def text(value: Any) -> str:
        if isinstance(value, _Name):
            return value.text
        if isinstance(value, list | tuple) and tree_any(lambda one: isinstance(one, _Name), value):
            return "[" + ", ".join(map(text, value)) + "]"
        name = f"k{len(scope)}"
        scope[name] = value
        return name

    lines = [f"[{', '.join(inputs)}] = inputs", "inputs.clear()"] if inputs else []
    unread = [name for name in inputs if name not in last and name not in kept]
    lines += [f"{' = '.join(unread)} = None"] if unread else []
    for i, one in enumerate(operations):
        arguments = [text(part) for part in one.arguments]
        arguments += [f"{name}={text(part)}" for name, part in one.options.items()]
        if one.target == _YIELD:
            lines.append(f"yield {arguments[0]}")
        else:
            target = one.target if isinstance(one.target, str) else f"f{i}"
            if target is not one.target:
                plain = getattr(one.target, "_op", one.target)  # a native operator has no `_op`
                scope[target] = _DIRECT.get(one.target, plain)
            call = f"{target}({', '.join(arguments)})"
            outputs = [name or "_" for name in one.outputs]
            if any(one.outputs):
                call = f"{'[' + ', '.join(outputs) + ']' if one.is_tuple else outputs[0]} = {call}"
            lines.append(call)
        ended = [name for name in last if last[name] == i and name not in kept]
        if ended:
            lines.append(f"{' = '.join(sorted(ended))} = None")
    lines.append(f"yield [{', '.join('None' if one is None else one.text for one in results)}]")
    body = "\n    ".join(lines)
    exec(compile(f"def program(inputs):\n    {body}\n", "<recorded training step>", "exec"), scope)
    found: Program = scope["program"]
    return found


def _without_unread(operations: Sequence[_Operation], results: Sequence[_Name | None]) -> list[_Operation]:
    """Leave out empty tensors that nothing reads."""
    read = {one.text for one in results if one is not None}.union(*(one.reads() for one in operations))
    return [one for one in operations if one.target not in _EMPTY or read.intersection(one.outputs)]


def _indexes_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator indexes by numbers: only masks give results whose shape depends on values."""
    masks = (torch.bool, torch.uint8)
    return func in _INDEX and not any(one is not None and one.dtype in masks for one in args[1])


def _writes(operation: _Operation) -> bool:
    """Whether an operator writes one of its arguments in place."""
    schema = getattr(operation.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
