"""`hugectr2onnx.converter`: conversion of a trained model's files to one ONNX file, compared with the model.

Shapes: B rows, D dense values, S slots of a sparse input, N the maximum keys of a slot.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from viviane.batch import Bag, Batch, Layout
from viviane.compat.hugectr.argument_types import typed
from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.serving import InferenceModel
from viviane.compat.hugectr.serving_params import InferenceParams
from viviane.core.errors import ConfigError
from viviane.embedding.module_parts import collections_of
from viviane.export.forms import Trace, form_module
from viviane.export.forms.onnx import load, save
from viviane.export.machine import Requirements
from viviane.export.parity import Case, compare
from viviane.export.program import BATCH, Program, ProgramInput, freeze
from viviane.training.evaluation import evaluating

_ROWS: Final = (1, 7, 64)


@typed
def convert(
    onnx_model_path: str,
    graph_config: str,
    dense_model: str,
    convert_embedding: bool = False,
    sparse_models: Sequence[str] | None = None,
    ntp_file: str | None = None,
    graph_name: str = "hugectr",
) -> None:
    """Write a trained model as ONNX.

    Inputs are those of HugeCTR: dense, (B, D), float32, also where D is 0; with `convert_embedding` the keys of each
    sparse input, (B, S, N), int64, else the vectors of each embedding, (B, S, width), float32. Unknown keys yield
    zeros. The outputs are the labels, (B, label_dim). A mean divides by N, as in HugeCTR's converter.

    Args:
        onnx_model_path: the file to write.
        graph_config: JSON of the graph, from graph_to_json.
        dense_model: file of the dense weights.
        convert_embedding: also store the tables in the file.
        sparse_models: folders of the tables, in order.
        ntp_file: running statistics of batch normalization.
        graph_name: name of the model.

    Raises:
        ConfigError: the tables are requested but not given.
        ExportError: an operator cannot be converted, or the file differs from the model.
        MissingExtraError: onnx is not installed.
    """
    form_module("onnx").check()
    if convert_embedding and not sparse_models:
        raise ConfigError("convert_embedding needs the tables", where="convert", fix="pass sparse_models")
    params = InferenceParams(
        graph_name, 64, dense_model_file=dense_model, i64_input_key=True, non_trainable_params_file=ntp_file or "",
        sparse_model_files=list(sparse_models or []) if convert_embedding else [],
    )  # fmt: skip
    model = InferenceModel(graph_config, params)
    program = _Converted(model, with_tables=convert_embedding)
    cases = [_case(model, program, rows) for rows in _ROWS]
    path = Path(onnx_model_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as work:
        file = Path(work) / path.name
        save(Trace(program, tuple(cases[-1].tensors), "cpu"), file)
        files = tuple(one.name for one in sorted(Path(work).iterdir()))
        parity = compare("onnx", load(Path(work), files, Requirements(), None), cases, (), "fp32")
        for name in reversed(files):  # the weights first, so that they exist when the model is opened
            os.replace(Path(work) / name, path.parent / name)  # noqa: PTH105
    far = f"at most {parity.max_difference:.3g} from the model"
    say(f"[HUGECTR2ONNX][INFO]: The model is saved at {onnx_model_path}, {far}")


class _Converted(Program):
    """A program with the inputs and outputs of HugeCTR's converter."""

    def __init__(self, model: InferenceModel, *, with_tables: bool) -> None:
        whole, given = model.viviane, model.graph.given
        inner = freeze(
            whole.module, whole.trainer.objective, whole.schema, kernels=False, dense_only=not with_tables, frozen={}
        )
        inputs = [ProgramInput(name=given.dense_name, kind="dense", dtype="float32", shape=(BATCH, given.dense_dim))]
        if with_tables:
            self.groups = _groups(model)
            inputs += [
                ProgramInput(name=name, kind="values", dtype="int64",
                             shape=(BATCH, len(slots), max(slot.nnz for slot in slots)))
                for name, slots in self.groups.items()
            ]  # fmt: skip
        else:
            self.groups = {}
            inputs += [one.model_copy(update={"name": one.name.partition("/")[2]})
                       for one in inner.inputs if one.kind == "vectors"]  # fmt: skip
        nn.Module.__init__(self)
        self.inner, self.module, self.precision = inner, inner.module, "fp32"
        self.inputs = tuple(inputs)
        self.outputs = tuple(given.labels)
        self._widths = list(given.labels.values())

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """Return the predictions of each label, (B, label_dim)."""
        named = {one.name: tensor for one, tensor in zip(self.inputs, tensors, strict=True)}
        known: dict[str, Tensor] = {}
        for one, tensor in zip(self.inputs, tensors, strict=True):
            if one.kind == "dense":
                known["dense"] = tensor
            elif one.kind == "vectors":
                known[f"vectors/{one.name}"] = tensor
        size = tensors[0].shape[0]
        for name, slots in self.groups.items():
            keys = named[name]
            for i, slot in enumerate(slots):
                known[f"values/{slot.column}"] = keys[:, i].reshape(-1)
                known[f"lengths/{slot.column}"] = torch.full((size,), keys.shape[2], dtype=torch.int64)
        missing = [one for one in self.inner.inputs if one.name not in known]
        for one in missing:  # keys, if the inputs are vectors: only their number of rows is used
            known[one.name] = torch.zeros(0 if one.kind == "values" else size, dtype=torch.int64)
        predictions: Tensor = self.inner(*(known[one.name] for one in self.inner.inputs))
        return predictions if len(self._widths) == 1 else torch.split(predictions, self._widths, 1)


def _case(model: InferenceModel, program: _Converted, rows: int) -> Case:
    """Return inputs with known and unknown keys, and the model's results."""
    draw = torch.Generator().manual_seed(rows)
    given, columns, whole = model.graph.given, model.columns, model.viviane
    dense = torch.randn(rows, given.dense_dim, generator=draw)
    keys = {}
    for name, slots in _groups(model).items():
        shape = (rows, len(slots), max(slot.nnz for slot in slots))
        known = _known_keys(model, [slot.column for slot in slots])
        keys[name] = known[torch.randint(len(known), shape, generator=draw)]
    ends = torch.arange(rows + 1)
    bags = {slot.column: Bag(keys[name][:, i].reshape(-1), ends * keys[name].shape[2])
            for name, slots in _groups(model).items() for i, slot in enumerate(slots)}  # fmt: skip
    batch = Batch(Layout.of(columns.model_schema()), torch.zeros(rows, 0), dense,
                  torch.zeros(rows, 0, dtype=torch.int64), bags)  # fmt: skip
    outputs: dict[str, Any] = {}
    collections = collections_of(whole.module)
    handles = [part.register_forward_hook(_keep(name, outputs)) for name, part in collections.items()]
    try:
        with evaluating(whole.module):
            expected = whole.trainer.objective.predictions(whole.module(batch), rows).numpy()
    finally:
        for handle in handles:
            handle.remove()
    tensors = []
    for one in program.inputs:
        if one.kind == "dense":
            tensors.append(dense)
        elif one.kind == "values":
            tensors.append(keys[one.name])
        else:
            tensors.append(outputs[one.name].flat.view(rows, *one.shape[1:]).float())
    return Case("usual", batch, tensors, np.asarray(expected), np.asarray(expected))


def _keep(name: str, outputs: dict[str, Any]) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, inputs, output: outputs.update({name: output})


def _groups(model: InferenceModel) -> dict[str, list[Any]]:
    return {group.top_name: [slot for slot in model.columns.slots if slot.group == group.top_name]
            for group in model.graph.given.sparse}  # fmt: skip


def _known_keys(model: InferenceModel, columns: Sequence[str]) -> Tensor:
    found = [torch.tensor([0, 2**40])]
    for collection in collections_of(model.viviane.module).values():
        for name, feature in collection.features.items():
            if name in columns:
                index = collection.parts()[0].dynamic_table(feature.table).index
                found.append(index.keys[index.rows_in_use()][:1000])
    return torch.cat(found)
