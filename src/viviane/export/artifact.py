"""Loading and running an exported model: columns, batches or raw rows in, predictions out.

Shapes: B rows, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, ExportError, suggest
from viviane.core.json_files import read_json_object
from viviane.core.locations import AnyPath, location
from viviane.core.remote.cache import local_copy
from viviane.data import Dataset
from viviane.export.checks import check_limit, check_sizes, check_weights, compare_weights, input_tensor, limits_of
from viviane.export.forms import Runner, form_module
from viviane.export.manifest import (
    FORMS,
    PARITY_FILE,
    TABLES_FILE,
    ExportManifest,
    FormName,
    read_manifest,
    verify_files,
)
from viviane.export.outside import read_model_tables
from viviane.export.parity import Reference, compare
from viviane.export.program import BATCH, DATA_KINDS, Program, ProgramInput, batch_tensors, data_inputs, freeze
from viviane.export.tables import FrozenTables
from viviane.model import Model
from viviane.model.prediction import as_batches
from viviane.model.saving import ETL_FILE
from viviane.schema import SCHEMA_FILE, Schema
from viviane.training.checkpoint.tensor_files import read_tensors

_READ_ROWS = 8192


class Artifact:
    """An exported model.

    `predict` is thread-safe; `update` must not run concurrently with predictions.

    Args:
        folder: the folder of the artifact.
        manifest: its manifest.
        form: the form that runs.
        run: the opened form.
        constants: inputs that are not part of a batch: tables outside the form.
    """

    def __init__(
        self, folder: Path, manifest: ExportManifest, form: FormName, run: Runner, constants: Mapping[str, Tensor]
    ) -> None:
        self.folder, self.manifest, self.form = folder, manifest, form
        self.schema = Schema.load(folder)
        self.etl: Path | None = folder / ETL_FILE if (folder / ETL_FILE).exists() else None
        self.device = torch.device(manifest.forms[form].requires.device)
        self._run, self._constants = run, dict(constants)
        self._limits = {one.name: limits_of(one, manifest.limits) for one in manifest.inputs}

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """The inputs that `run` accepts, in order, without tables outside the form."""
        return tuple(one for one in self.manifest.inputs if one.kind != "table")

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the output columns."""
        return self.manifest.labels

    @property
    def parity(self) -> dict[str, Any]:
        """The parity report: how each form was compared with the model."""
        return read_json_object(self.folder / PARITY_FILE, error=ExportError)

    def predict(self, rows: Any, *, raw: bool = False) -> NDArray[np.float32]:
        """Return a prediction for each row and label, (rows, L), as `Model.predict` does.

        Args:
            rows: a Dataset, a Batch, columns by name, an Arrow table or a pandas frame; labels may be missing.
            raw: rows are raw; the artifact's ETL transforms them.

        Raises:
            KeyRangeError, DataError, SchemaError: a row is invalid for the model.
            ConfigError: the inputs of the artifact are vectors, or `raw` is set without an ETL.
        """
        if isinstance(rows, Dataset) and not raw:
            with rows.reader(_READ_ROWS) as reader:
                parts = [self.run_batch(batch).cpu().numpy() for batch in reader]
        else:
            parts = [self.run_batch(batch).cpu().numpy() for batch in as_batches(rows, self.schema, self.etl, raw=raw)]
        return np.concatenate(parts) if parts else np.empty((0, len(self.labels)), dtype=np.float32)

    __call__ = predict

    def run_batch(self, batch: Batch) -> Tensor:
        """Return predictions for a batch, (B, L), float32, on the artifact's device: for servers.

        Raises:
            KeyRangeError, DataError: a key or a bag is invalid for the tables.
            ConfigError: the inputs of the artifact are vectors.
        """
        if self.manifest.dense_only:
            raise ConfigError(
                "a dense-only artifact needs vectors, not rows",
                where=str(self.folder),
                fix="call run() with its inputs by name",
            )
        tensors = batch_tensors(batch.to(self.device), self.inputs)
        return self._checked(dict(zip([one.name for one in self.inputs], tensors, strict=True)), batch.origin)

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return predictions for the form's own inputs by name, (B, L), float32.

        Args:
            inputs: arrays or tensors, see `inputs`.

        Raises:
            DataError: a name, type or size differs from the input.
            KeyRangeError: a key is out of range in a table with "raise".
        """
        known = {one.name: one for one in self.inputs}
        for name in inputs:
            if name not in known:
                raise DataError("unknown input of the artifact", value=name, fix=suggest(name, known))
        missing = [name for name in known if name not in inputs]
        if missing:
            raise DataError("an input is missing", value=missing[0])
        tensors = {name: input_tensor(one, inputs[name]).to(self.device) for name, one in known.items()}
        check_sizes(known, tensors)
        return self._checked(tensors, "")

    def _checked(self, tensors: Mapping[str, Tensor], origin: str) -> Tensor:
        size = next(len(tensors[one.name]) for one in self.inputs if one.shape[:1] == (BATCH,))
        if not size:
            return torch.empty(0, len(self.labels), device=self.device)
        for one in self.inputs:
            if one.kind == "weights":
                check_weights(one, tensors[one.name])
            for place, limit in self._limits[one.name]:
                check_limit(one, tensors, place, limit, origin)
        named = {**self._constants, **tensors}
        given = [named[one.name] for one in self.manifest.inputs]
        try:
            found = self._run(given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the form's library: the program is not what was exported
            lines = str(error).strip().splitlines()
            raise ExportError(
                "the artifact's program failed", where=str(self.folder), value=lines[-1][:200] if lines else "",
                fix="export the model again",
            ) from error  # fmt: skip
        if found.shape != (size, len(self.labels)):
            raise ExportError(
                "the artifact's program returns another shape", where=str(self.folder), value=tuple(found.shape),
                allowed=f"({size}, {len(self.labels)})", fix="export the model again",
            )  # fmt: skip
        return found

    def update(self, model: Model | str | AnyPath, *, module: nn.Module | None = None) -> None:
        """Replace the weights by those of another training of the same model, and compare with the model again.

        Args:
            model: a compiled or saved model with the same graph, columns and table sizes as the exported one.
            module: required for a folder whose model was built from a torch module.

        Raises:
            ExportError: the model differs, the form's weights cannot be replaced, or the results differ from the
                model; in the last case the artifact refuses to predict from then on.
        """
        if self.manifest.table_dtype == "int8":
            raise ExportError("the weights of an artifact with 8-bit tables cannot be replaced", where=str(self.folder),
                              fix="export the new model")  # fmt: skip
        loaded = model if isinstance(model, Model) else Model.load(model, device=str(self.device), module=module)
        if loaded.schema.difference(self.schema):
            raise ExportError("the columns of the model differ", value=loaded.schema.difference(self.schema)[0])
        with loaded.trainer.averaged():
            frozen: FrozenTables = {}
            program = self._frozen(loaded, frozen)
            constants = (
                {name: tensor for one in program.collections() for name, tensor in one.move_outside().items()}
                if self.manifest.tables != "inside"
                else {}
            )
            program.inputs = self.manifest.inputs
            _check_constants(self._constants, constants)
            compare_weights(self.manifest.weights, program.state_dict())
            self._run.update(program.state_dict())
            self._constants = {name: tensor.clone() for name, tensor in constants.items()}
            reference = Reference(
                loaded.module,
                loaded.trainer.objective,
                loaded.schema,
                self.manifest.precision,
                loaded.trainer.device,
                program,
                self._constants,
                frozen,
            )
            try:
                compare(self.form, self._run, reference.cases(), (), self.manifest.precision)
            except ExportError:
                self._run = _Refused(self.folder)
                raise

    def _frozen(self, model: Model, frozen: FrozenTables) -> Program:
        return freeze(
            model.module,
            model.trainer.objective,
            model.schema,
            kernels=False,
            precision=self.manifest.precision,
            dense_only=self.manifest.dense_only,
            frozen=frozen,
        )

    def __repr__(self) -> str:
        return f"Artifact({self.manifest.model!r}, {self.form!r}, {self.manifest.precision}, {self.device})"


class _Refused:
    """Replaces the runner after a failed update: refuses to predict."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, tensors: Any) -> Tensor:
        raise ExportError("an update of the artifact failed", where=str(self._folder), fix="load it again")

    def update(self, weights: Mapping[str, Tensor]) -> None:
        self(None)


def load(
    folder: str | AnyPath,
    form: FormName | None = None,
    *,
    model: str | AnyPath | None = None,
    threads: int | None = None,
    checksum: str | None = None,
) -> Artifact:
    """Load an exported model, after verifying sizes and checksums of its files and the requirements of the machine.

    The forms are programs, and compiled forms contain machine code. Load only artifacts from trusted sources, or pass
    the checksum of the manifest that a trusted source gave you.

    Args:
        folder: an exported folder; it may be a URL.
        form: "torch-export", "aoti", "onnx" or "torchscript"; None: the first available one.
        model: the saved model with the tables, for an artifact that was exported with tables="model".
        threads: for "onnx", threads per call; for "aoti", concurrent calls. None: torch's threads, or 1 call.
        checksum: "sha256" of manifest.json, from a trusted source; any other manifest is refused.

    Raises:
        ExportError: a file is missing, truncated or altered, or the artifact needs another machine.
        ConfigError: the form does not exist, or `model` is missing.
    """
    path = local_copy(location(folder))
    manifest, seal = read_manifest(path)
    if checksum is not None and checksum != seal:
        raise ExportError("the artifact is not the expected one", where=str(path), value=seal, allowed=checksum)
    chosen = form if form is not None else next(name for name in FORMS if name in manifest.forms)
    if chosen not in manifest.forms:
        raise ConfigError("unknown form of the artifact", value=chosen, allowed=", ".join(manifest.forms))
    own = manifest.forms[chosen]
    own.requires.check(chosen, path)
    has_tables = any(one.kind == "table" for one in manifest.inputs)
    names = {*own.files, SCHEMA_FILE, PARITY_FILE, *({ETL_FILE, TABLES_FILE} & manifest.files.keys())}
    verify_files(path, manifest, names)
    _check_inputs(manifest, path)
    constants: dict[str, Tensor] = {}
    if has_tables:
        if TABLES_FILE in names:
            constants |= read_tensors(path / TABLES_FILE)
        if manifest.outside:
            constants |= read_model_tables(manifest, model, path)
        constants = _fitting(manifest, constants, own.requires.device, path)
    run = form_module(chosen).load(path, own.files, own.requires, threads)
    return Artifact(path, manifest, chosen, run, constants)


def _check_inputs(manifest: ExportManifest, path: Path) -> None:
    """Refuse inputs that are made from columns other than those of the schema."""
    known = {one.name: one for one in data_inputs(Schema.load(path))}
    for one in manifest.inputs:
        if one.kind in DATA_KINDS and known.get(one.name) != one:
            raise ExportError("an input of the artifact is not one of its columns", where=str(path), value=one.name,
                              allowed=", ".join(known), fix="use another copy")  # fmt: skip


def _fitting(manifest: ExportManifest, found: Mapping[str, Tensor], device: str, path: Path) -> dict[str, Tensor]:
    """Return the tables of the inputs, on the device; refuse tables whose shape or type differs."""
    result = {}
    for one in manifest.inputs:
        if one.kind == "table":
            tensor = found.get(one.name)
            if tensor is None or tuple(tensor.shape) != one.shape or tensor.dtype != one.torch_dtype:
                given = "missing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ExportError(
                    "the shape or type of a table differs from the artifact",
                    where=f"{path}, {one.name}",
                    value=given,
                    allowed=f"{one.shape} of {one.dtype}",
                )
            result[one.name] = tensor.to(device)
    return result


def _check_constants(own: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name not in new or new[name].shape != tensor.shape or new[name].dtype != tensor.dtype:
            raise ExportError(
                "the shape or type of a table differs",
                where=name,
                allowed=str(tuple(tensor.shape)),
                value=str(tuple(new[name].shape)) if name in new else "missing",
                fix="export the model again",
            )
