"""ONNX with standard operators only, run by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from viviane.core.errors import ExportError
from viviane.core.optional import require
from viviane.export.forms.form import Runner, Trace, quiet
from viviane.export.machine import Requirements
from viviane.ops.dispatch import use_implementation

KERNELS = False
FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
OPSET: Final = 20
LARGE_BYTES: Final = 1 << 30
"""Weights beyond this go to a separate file: a protobuf message is limited to 2 GiB."""
_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def check() -> None:
    """Check that the libraries are installed.

    Raises:
        MissingExtraError: a library is missing; names the extra.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        require(library, extra="onnx", purpose="export to ONNX")


def write(trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
    """Convert the traced program.

    Raises:
        ExportError: an operator cannot be converted.
    """
    save(trace, folder / FILE)
    files = (FILE, DATA_FILE) if (folder / DATA_FILE).exists() else (FILE,)
    return files, Requirements(device=trace.device, libraries=("onnxruntime",))


def save(trace: Trace, file: Path) -> None:
    """Convert the traced program to one file; weights beyond `LARGE_BYTES` are stored next to it, in `<file>.data`.

    Raises:
        ExportError: an operator cannot be converted.
    """
    exported = trace.exported
    try:
        with quiet(), torch.no_grad(), use_implementation("reference"), contextlib.redirect_stdout(io.StringIO()):
            program: Any = torch.onnx.export(
                exported,
                trace.example,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                optimize=False,  # the exporter's rules drop terms of at most 1e-8, such as the eps of a norm
                input_names=[one.name for one in trace.program.inputs],
                output_names=list(trace.program.outputs),
            )
            large = sum(one.nbytes for one in trace.program.state_dict().values()) > LARGE_BYTES
            program.save(str(file), external_data=large)
    except Exception as error:
        text = str(error).strip()
        raise ExportError(
            "the model cannot be written as ONNX",
            value=f"{type(error).__name__}: {text[-1500:]}",
            fix="export another form",
        ) from error


def load(folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
    """Open an ONNX Runtime session.

    Raises:
        ExportError: ONNX Runtime refuses the model, or does not support the device.
        MissingExtraError: the library is not installed.
    """
    runtime = require("onnxruntime", extra="onnx", purpose="running an ONNX model")
    provider = _PROVIDERS[requires.device]
    if provider not in runtime.get_available_providers():
        raise ExportError(
            "this ONNX Runtime does not support the device",
            where=str(folder),
            value=provider,
            allowed=", ".join(runtime.get_available_providers()),
            fix="pip install onnxruntime-gpu",
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised, so they need not be printed
    _check_data(folder, files)
    try:
        return _Run(runtime.InferenceSession(str(folder / files[0]), options, providers=[provider]))
    except Exception as error:
        raise ExportError(
            "ONNX Runtime refuses the model",
            where=str(folder / files[0]),
            value=str(error),
            fix="its CPU kernels do not support bfloat16: export with precision 'fp32' or 'fp16', or another form"
            if "NOT_IMPLEMENTED" in str(error)
            else None,
        ) from error


def _check_data(folder: Path, files: tuple[str, ...]) -> None:
    """Refuse a model that refers to files outside its manifest."""
    onnx = require("onnx", extra="onnx", purpose="running an ONNX model")
    try:
        model = onnx.load(str(folder / files[0]), load_external_data=False)
    except Exception as error:
        raise ExportError("not a readable ONNX model", where=str(folder / files[0]), value=str(error)) from error
    for tensor in _tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value not in files[1:]:
                raise ExportError(
                    "the ONNX model reads a file that is not in the manifest",
                    where=str(folder / files[0]),
                    value=entry.value,
                )


def _tensors(message: Any) -> Iterator[Any]:
    """Yield every tensor inside a protobuf message, at any depth."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for one in value if _is_repeated(value) else [value]:
                yield from _tensors(one)


def _is_repeated(value: Any) -> bool:
    return not hasattr(value, "DESCRIPTOR")


class _Run:
    def __init__(self, session: Any) -> None:
        self._session = session
        self._names = [one.name for one in session.get_inputs()]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != len(self._names):
            raise ExportError("the program does not fit the manifest", value=f"{len(tensors)} inputs",
                              allowed=str(len(self._names)), fix="use another copy")  # fmt: skip
        given = {name: tensor.numpy(force=True) for name, tensor in zip(self._names, tensors, strict=True)}
        found = self._session.run(None, given)
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found, 1))

    def update(self, weights: Mapping[str, Tensor]) -> None:
        raise ExportError(
            "weights of an ONNX model cannot be replaced",
            where="form 'onnx'",
            fix="export the model again, or export it with tables='beside'",
        )
