"""What all forms share: a program with an example of its inputs, traced when it is requested; and what runs a form."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from viviane.core.errors import ExportError, VivianeError
from viviane.export.program import Program
from viviane.ops.dispatch import use_implementation


class Runner(Protocol):
    """An opened form."""

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return predictions (B, L) for the program's inputs in order."""

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights; names and shapes were compared with the manifest.

        Raises:
            ExportError: the form's weights cannot be replaced.
        """


@dataclass(frozen=True)
class Trace:
    """A program on its way to a file.

    Args:
        program: of plain operators, or with operators of `viviane.export.operators`.
        example: inputs for it; no two of its sizes are equal.
        device: "cpu" or "cuda".
        cpu: "native", or a level of instructions such as "x86-64-v3", for what is compiled.
    """

    program: Program
    example: tuple[Tensor, ...]
    device: str
    cpu: str = "native"

    @cached_property
    def exported(self) -> torch.export.ExportedProgram:
        """The program as torch.export traces it.

        Raises:
            ExportError: it cannot be traced for batches of any size; says why.
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
        """Return the names of inputs that the traced program's result depends on."""
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
    """Return the error of a module that cannot be traced."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return ExportError(
        "the module cannot be traced for a batch of any size",
        where=type(program.module).__name__,
        value=f"{type(error).__name__}: {' '.join(lines[:4])[:600]}",
        fix="let its forward use tensor operations alone: no .item(), no loop or branch on values of the batch",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back warnings that torch's own exporters give about themselves."""
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
    """Keep back what compiled code writes to the process's error output, such as its stack where it refuses a key."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
