"""Export of a trained model: trace it, write its forms, compare them with the model, publish the folder atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from viviane.core.errors import ConfigError, DataError, ExportError, suggest
from viviane.core.files import replace_folder, write_json_atomic
from viviane.core.locations import AnyPath, location
from viviane.core.remote.published import published_location
from viviane.embedding.int8_tables import int8_tables
from viviane.embedding.module_parts import collections_of
from viviane.export.forms import Trace, form_module
from viviane.export.manifest import (
    FORMS,
    PARITY_FILE,
    TABLES_FILE,
    ExportManifest,
    Form,
    FormName,
    OutsideTable,
    TableKind,
    TablesPlace,
    write_manifest,
)
from viviane.export.parity import FormParity, Reference, compare, report
from viviane.export.program import PrecisionName, Program, freeze
from viviane.export.samples import column_keys, key_limits, make_batch
from viviane.export.tables import FixedPart, FrozenTables
from viviane.model import Model
from viviane.model.saving import ETL_FILE
from viviane.training.checkpoint.manifest import TensorEntry
from viviane.training.checkpoint.tensor_files import write_tensors

_EXAMPLE_ROWS: Final = 6
_PIECE: Final = 1 << 22


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export; see `export`."""

    precision: PrecisionName
    dense_only: bool
    tables: TablesPlace
    operators: Literal["viviane", "torch"]
    cpu: str
    table_dtype: TableKind = "model"


def export(
    model: Model | str | AnyPath,
    to: Sequence[str] | str,
    output: str | AnyPath,
    *,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    dense_only: bool = False,
    tables: Literal["inside", "beside", "model"] = "inside",
    table_dtype: TableKind = "model",
    operators: Literal["viviane", "torch"] = "viviane",
    cpu: str = "native",
    device: str = "cpu",
    module: nn.Module | None = None,
) -> Path | AnyPath:
    """Export a trained model in forms that run without it; each is compared with the model before anything is written.

    Args:
        model: a compiled model, or the folder of a saved one.
        to: "torch-export", "aoti", "onnx", "torchscript", or several of them.
        output: the output folder; an older export is replaced when the new one is complete.
        precision: precision of dense layers; "auto": that of the model. Tables keep their type.
        dense_only: the inputs are the vectors of the embeddings, which a parameter server looks up.
        tables: "inside" the forms; "beside": in one file next to them, which forms share and loading memory-maps;
            "model": fixed tables are read from the saved model's folder when the artifact is loaded, and dynamic ones
            are in the file next to the forms.
        table_dtype: "model": tables keep their type; "int8": 8 bits a number with a scale and an offset of each row, as
            `InferenceSession(table_dtype="int8")` has them; the forms are compared with such a model. For saved models
            whose tables are of fixed size and inside the forms.
        operators: lookups of "torch-export": "viviane", with this package's kernels, needs `import viviane.export` to
            run; "torch", with standard operators, does not. Other forms always use standard operators.
        cpu: for "aoti": "native", or a level such as "x86-64-v3", which runs on more processors.
        device: for a folder: "cpu" or "cuda". A model in memory is exported for its device.
        module: for a folder whose model was built from a torch module, a module of the same shapes.

    Returns:
        the output folder.

    Raises:
        ConfigError: an option is unknown, or the output folder contains something else.
        ExportError: the model cannot be traced, an artifact differs from it, or a compiler is missing.
        MissingExtraError: a library of a form is not installed.

    Example:
        >>> import tempfile, viviane as vv
        >>> schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "city", "num_ids": 9}])
        >>> model = vv.Model(vv.Solver(device="cpu"), schema)
        >>> model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8])); model.compile()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = export(model, "torch-export", f"{folder}/exported")
        ...     artifact = vv.export.load(f"{folder}/exported")
        ...     artifact.predict({"city": [3, 4]}).shape
        (2, 1)
    """
    forms = _forms(to)
    _choose("precision", precision, ("auto", "fp32", "bf16", "fp16"))
    _choose("tables", tables, ("inside", "beside", "model"))
    _choose("operators", operators, ("viviane", "torch"))
    _choose("table_dtype", table_dtype, ("model", "int8"))
    if table_dtype == "int8":
        _check_int8(
            in_memory=isinstance(model, Model), of_module=module is not None, tables=tables, dense_only=dense_only
        )
    _check_output(output)
    for name in forms:
        form_module(name).check()
    if isinstance(model, Model):
        if tables == "model":
            raise ConfigError("tables='model' needs a saved model", fix="save the model and export the folder")
        loaded = model
    else:
        loaded = Model.load(model, device=device, module=module)
    if tables != "inside" and dense_only:
        raise ConfigError("a dense-only export has no tables", value=tables, fix="remove tables")
    options = ExportOptions(_precision(loaded, precision), dense_only, tables, operators, cpu, table_dtype)
    with loaded.trainer.averaged(), int8_tables(loaded.module) if table_dtype == "int8" else nullcontext():
        return _Export(loaded, options).write(forms, output)


def _check_int8(*, in_memory: bool, of_module: bool, tables: str, dense_only: bool) -> None:
    """Refuse what 8-bit tables do not go with."""
    reason, fix = None, 'set table_dtype="model"'
    if in_memory:
        reason, fix = "a model in memory keeps the tables that it trains", "save the model, and export the folder"
    elif of_module:
        reason = "a torch module may read its tables in other ways than by lookups"
    elif dense_only:
        reason = "a dense-only export has no tables"
    elif tables != "inside":
        reason, fix = f"tables {tables!r} are shared with float32 readers", 'set tables="inside"'
    if reason is not None:
        raise ConfigError(f"8-bit tables are not possible here: {reason}", where="table_dtype", value="int8", fix=fix)


def _choose(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {what}", value=value, allowed=", ".join(allowed), fix=suggest(str(value), allowed))


def _forms(to: Sequence[str] | str) -> tuple[FormName, ...]:
    names = [to] if isinstance(to, str) else list(to)
    for name in names:
        _choose("form", name, FORMS)
    if not names:
        raise ConfigError("an export needs at least one form", allowed=", ".join(FORMS))
    return tuple(name for name in FORMS if name in names)


def _precision(model: Model, precision: str) -> PrecisionName:
    own = model.trainer.precision
    name = precision if precision != "auto" else "fp32" if own is None else own.name
    # TF32 is a mode of GPU matrix products, which the caller of the artifact enables.
    return "fp32" if name == "tf32" else name  # type: ignore[return-value]


def _check_output(output: str | AnyPath) -> None:
    there = published_location(output)
    taken = there.exists() and (not there.is_dir() or any(True for _ in there.iterdir()))
    if taken and not (there / PARITY_FILE).exists():
        raise ConfigError(
            "this is not an exported model, so it is not replaced", where=str(output), fix="choose another folder"
        )


class _Export:
    """One export of one model."""

    def __init__(self, model: Model, options: ExportOptions) -> None:
        self.model, self.options = model, options
        self.device = model.trainer.device
        self.collections = collections_of(model.module)
        self.frozen: FrozenTables = {}
        whole = self.freeze(kernels=False, whole=True)
        self.weights_sha256 = weights_digest(whole.state_dict())
        self.constants: dict[str, Tensor] = {}
        if options.tables != "inside":
            for collection in whole.collections():
                self.constants |= collection.move_outside()
        self.program = self.freeze(kernels=False)
        self.reference = Reference(
            model.module,
            model.trainer.objective,
            model.schema,
            options.precision,
            self.device,
            self.program,
            self.constants,
            self.frozen,
        )

    def freeze(self, *, kernels: bool, whole: bool = False) -> Program:
        """Return a program; `whole`: with tables inside, regardless of the options."""
        return freeze(
            self.model.module,
            self.model.trainer.objective,
            self.model.schema,
            kernels=kernels,
            precision=self.options.precision,
            dense_only=self.options.dense_only and not whole,
            tables_outside=self.options.tables != "inside" and not whole,
            frozen=self.frozen,
        )

    def write(self, forms: Sequence[FormName], output: str | AnyPath) -> Path | AnyPath:
        """Write all forms, compare them, and publish the folder."""
        if self.model.etl is not None and not self.model.etl.exists():
            raise DataError("the ETL of the model's data no longer exists", where=str(self.model.etl), fix="restore it")
        traces = self._traces(forms)
        cases = self.reference.cases()
        limits = () if self.options.dense_only else self._limits()
        refusals = self.reference.refusals(limits, cases[-1]) if self.device.type == "cpu" else []
        with replace_folder(output) as work:
            written: dict[FormName, Form] = {}
            parity: dict[FormName, FormParity] = {}
            for name in forms:
                files, needs = form_module(name).write(traces[name], work)
                written[name] = Form(files=files, requires=needs)
                run = form_module(name).load(work, files, needs, None)
                parity[name] = compare(name, run, cases, refusals, self.options.precision)
                del run
            manifest = self._manifest(written, limits)
            self._write_rest(work, manifest, parity)
            write_manifest(work, manifest)
        return location(output)

    def _traces(self, forms: Sequence[FormName]) -> dict[FormName, Trace]:
        """Trace with and without this package's operators, as forms need it; unused inputs are dropped first."""
        kernels = self.options.operators == "viviane" and not self.options.dense_only
        kinds = {name: form_module(name).KERNELS and kernels for name in forms}
        programs = {kind: self.freeze(kernels=True) if kind else self.program for kind in set(kinds.values())}
        first = next(iter(programs))
        traces = {first: self._trace(programs[first])}
        try:
            used = traces[first].used_inputs()
        except ExportError:
            if forms != ("torchscript",):  # which may support modules that torch.export does not; all inputs stay then
                raise
        else:
            if len(used) < len(self.program.inputs):
                self.program.drop_unused(used)
                traces = {}
        for kind, program in programs.items():
            program.inputs = self.program.inputs
            if kind not in traces:
                traces[kind] = self._trace(program)
        return {name: traces[kind] for name, kind in kinds.items()}

    def _trace(self, program: Program) -> Trace:
        keys = column_keys(self.model.schema, self.collections)
        for seed in range(1000):
            batch = make_batch(self.model.schema, keys, _EXAMPLE_ROWS, "usual", seed, odd_keys=False)
            # Sizes of 0 and 1 would be treated as constants.
            if all(len(bag.values) > 1 for bag in batch.bags.values()):
                break
        tensors = self.reference.case(batch, "usual").tensors
        return Trace(program, tuple(tensors), self.device.type, self.options.cpu)

    def _limits(self) -> Any:
        used = {column for one in self.program.inputs for column in one.columns}
        return tuple(one for one in key_limits(self.model.schema, self.collections) if one.column in used)

    def _manifest(self, forms: Mapping[FormName, Form], limits: Any) -> ExportManifest:
        return ExportManifest(
            viviane=version("viviane"),
            torch=torch.__version__,
            model=self.model.name,
            weights_sha256=self.weights_sha256,
            weights={name: TensorEntry.of(one) for name, one in self.program.state_dict().items()},
            labels=tuple(label.name for label in self.model.schema.labels),
            precision=self.options.precision,
            table_dtype=self.options.table_dtype,
            dense_only=self.options.dense_only,
            tables=self.options.tables,
            inputs=self.program.inputs,
            outside=self._outside(),
            limits=limits,
            forms=dict(forms),
        )

    def _outside(self) -> tuple[OutsideTable, ...]:
        """Return the inputs that are read from the model's folder: fixed tables, unless they are next to the forms."""
        if self.options.tables != "model":
            return ()
        found = []
        for collection in self.program.collections():
            for part in collection.parts:
                if isinstance(part, FixedPart):
                    tables = tuple(
                        (name, base, collection.tables[name].num_rows)  # type: ignore[union-attr]
                        for name, base in part.bases.items()
                    )
                    found.append(
                        OutsideTable(input=part.input_name("weight"), collection=collection.name, tables=tables)
                    )
        return tuple(found)

    def _write_rest(self, work: Path, manifest: ExportManifest, parity: Mapping[FormName, FormParity]) -> None:
        from_model = {one.input for one in manifest.outside}
        beside = {
            one.name: self.constants[one.name]
            for one in manifest.inputs
            if one.kind == "table" and one.name not in from_model
        }
        if beside:
            write_tensors(work / TABLES_FILE, beside)
        self.model.schema.save(work)
        if self.model.etl is not None:
            (work / ETL_FILE).write_bytes(self.model.etl.read_bytes())
        write_json_atomic(work / PARITY_FILE, report(manifest, parity))


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, types, shapes and bytes."""
    seal = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        seal.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.view(-1)
        for start in range(0, len(flat), _PIECE):
            seal.update(flat[start : start + _PIECE].cpu().view(torch.uint8).numpy().data)
    return seal.hexdigest()
