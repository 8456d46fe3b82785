"""Common parts of all forms: a program with example inputs, traced on demand; and the interface of an opened form."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from viviane.core.errors import ExportError, MachineError, VivianeError
from viviane.export.program import Program
from viviane.ops.dispatch import use_implementation

_ARCHIVE_BYTES: Final = 64 << 10
"""Room for the graph and the names of an archive."""


class Runner(Protocol):
    """An opened form."""

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return predictions (B, L) for the program's inputs in order."""

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights; names and shapes have been compared with the manifest.

        Raises:
            ExportError: the form's weights cannot be replaced.
        """


@dataclass(frozen=True)
class Trace:
    """A program to export, with example inputs.

    Args:
        program: of standard operators, or with operators of `viviane.export.operators`.
        example: example inputs; no two of its sizes are equal.
        device: "cpu" or "cuda".
        cpu: "native", or an instruction level such as "x86-64-v3", for compiled forms.
    """

    program: Program
    example: tuple[Tensor, ...]
    device: str
    cpu: str = "native"

    @cached_property
    def exported(self) -> torch.export.ExportedProgram:
        """The program, traced by torch.export.

        Raises:
            ExportError: it cannot be traced for batches of any size; gives the reason.
        """
        sizes = {size: torch.export.Dim(f"size_{i}") for i, size in enumerate(self.program.sizes())}
        shapes = tuple(
            {d: sizes[s] for d, s in enumerate(one.shape) if isinstance(s, str)} for one in self.program.inputs
        )
        try:
            with quiet(), torch.no_grad(), use_implementation("reference"):
                return torch.export.export(self.program, self.example, dynamic_shapes={"tensors": shapes}, strict=False)
        except VivianeError:
            raise
        except Exception as error:
            raise untraceable(self.program, error) from error

    def used_inputs(self) -> set[str]:
        """Return the names of inputs that affect the result of the traced program."""
        graph = self.exported.graph
        waiting, live = [graph.output_node()], set()
        while waiting:
            node = waiting.pop()
            if node not in live:
                live.add(node)
                waiting.extend(node.all_input_nodes)
        known = {node.name for node in live}
        given = self.exported.graph_signature.user_inputs
        return {one.name for one, node in zip(self.program.inputs, given, strict=True) if str(node) in known}


def untraceable(program: Program, error: Exception) -> ExportError:
    """Return the error for a module that cannot be traced."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return ExportError(
        "the module cannot be traced for a batch of any size",
        where=type(program.module).__name__,
        value=f"{type(error).__name__}: {' '.join(lines[:4])[:600]}",
        fix="use only tensor operations in forward: no .item(), no loop or branch on values of the batch",
    )


def check_space(trace: Trace, folder: Path) -> None:
    """Check that the weights of a program can be written; torch ends the process when its archive cannot be completed.

    Raises:
        MachineError: the disk, or the process's limit of file sizes, is too small.
    """
    size = sum(one.nbytes for one in trace.program.state_dict().values()) + _ARCHIVE_BYTES
    free = shutil.disk_usage(folder).free
    if free < size:
        raise MachineError(
            "the disk is full", where=str(folder), value=f"{free:,} bytes are free, {size:,} are needed",
            fix="free disk space, or choose another folder",
        )  # fmt: skip
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and limit < size:
            raise MachineError(
                "a file would exceed the limit of the process (ulimit -f)", where=str(folder),
                value=f"the limit is {limit:,} bytes, {size:,} are needed", fix="raise the limit: ulimit -f unlimited",
            )  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of torch's exporters about themselves."""
    names = ("torch.export", "torch.onnx", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [one.level for one in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for one in loggers:
                one.setLevel(logging.ERROR)
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)


@contextmanager
def silent() -> Iterator[None]:
    """Suppress what compiled code writes to stderr, such as its stack if it refuses a key."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
