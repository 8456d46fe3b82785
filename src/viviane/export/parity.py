"""Comparison of an artifact with its model, and the allowed differences.

Both round. How much a result may differ by rounding alone depends on the row. So the model is also computed in float64,
and an artifact may differ from the model in one row by

    base + FACTOR * max(noise, spread)
    noise  = max |model - float64|                       of the batches of one kind
    spread = max |float64 whose operations round otherwise - float64|        of this row

that is, by the model's own distance from the exact result times a small factor, or by what other roundings do to the
row: where large terms cancel, the model may happen to be nearly exact, which says nothing about another order of sums.
`base` covers what one run does not show. For 16-bit products the model in float32 replaces float64, since products
round to 8 or 11 bits, and spread is 0.

Shapes: B rows, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ExportError, VivianeError
from viviane.core.machine import describe, versions
from viviane.embedding.base import TableCollection
from viviane.embedding.module_parts import collections_of
from viviane.export.forms import Runner
from viviane.export.forms.form import silent
from viviane.export.manifest import ExportManifest, FormName, KeyLimit
from viviane.export.program import PrecisionName, Program, batch_tensors, freeze
from viviane.export.rounding import spread
from viviane.export.samples import SIZES, Sort, column_keys, make_batch, refused_batches
from viviane.export.tables import FrozenTables, GivenCollection, flat_vectors
from viviane.schema import Schema
from viviane.training.evaluation import evaluating
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision

FACTOR: Final = 8.0
BASE: Final[dict[PrecisionName, float]] = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}
REASON: Final[dict[PrecisionName, str]] = {
    "fp32": "float32 sums in another order differ in their last bits; FACTOR times the model's own distance from the "
    "same model in float64, of rows of the same kind, or how far other roundings move the row in float64, "
    "and 1e-6 of the largest prediction",
    "fp16": "products round to 11 bits, in another order; FACTOR times the distance of the fp16 model from the model "
    "in float32, and 1e-3 of the largest prediction",
    "bf16": "products round to 8 bits, in another order; FACTOR times the distance of the bf16 model from the model in "
    "float32, and 8e-3 of the largest prediction",
}
_ROUNDINGS: Final = 4  # runs with other roundings; one run may leave a row nearly exact
_KINDS: Final[tuple[Sort, ...]] = ("usual", "empty", "extreme")


@dataclass(frozen=True)
class Case:
    """A batch and the model's results for it.

    Args:
        sort: kind of the batch.
        tensors: inputs of the program.
        expected: the model's predictions, (B, L).
        exact: predictions in float64, or in float32 for 16-bit products.
        spread: how far other roundings move each exact prediction, (B, L), or 0 where it is unknown.
    """

    sort: Sort
    batch: Batch
    tensors: Sequence[Tensor]
    expected: NDArray[np.float32]
    exact: NDArray[np.float32]
    spread: NDArray[np.float64] | float = 0.0


class Reference:
    """The model that artifacts are compared with.

    Args:
        module: the module of the model.
        objective: computes predictions from logits.
        schema: the data's columns.
        precision: precision of the artifacts.
        device: device of the model.
        program: the exported program, with its inputs.
        constants: tensors of inputs that are not part of a batch, by name.
        frozen: see `viviane.export.program.freeze`.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        schema: Schema,
        precision: PrecisionName,
        device: torch.device,
        program: Program,
        constants: Mapping[str, Tensor],
        frozen: FrozenTables,
    ) -> None:
        self._module, self._objective, self._schema = module, objective, schema
        self._precision, self._device = precision, device
        self._program, self._constants, self._frozen = program, constants, frozen
        self._dense_only = any(isinstance(part, GivenCollection) for part in program.modules())
        self._exact = self._exact_program()

    def _exact_program(self) -> Program | None:
        if self._precision != "fp32":
            return None
        return freeze(
            self._module, self._objective, self._schema, kernels=False, dtype=torch.float64, frozen=self._frozen
        )

    def cases(self) -> list[Case]:
        """Return a case for each size and kind of batch.

        Raises:
            ExportError: the model refuses them.
        """
        keys = column_keys(self._schema, collections_of(self._module))
        found, seed = [], 0
        for size in SIZES:
            for sort in _KINDS:
                if (sort == "empty" and not self._schema.bags) or (sort == "extreme" and not self._schema.dense):
                    continue
                seed += 1
                batch = make_batch(self._schema, keys, size, sort, seed)
                try:
                    found.append(self.case(batch, sort))
                except VivianeError:
                    # A layer may use ids as numbers, and not accept every id.
                    found.append(self.case(make_batch(self._schema, keys, size, sort, seed, odd_keys=False), sort))
        return found

    def case(self, batch: Batch, sort: Sort) -> Case:
        """Return the model's results for a batch."""
        there = batch.to(self._device)
        expected, outputs = self._model(there, self._precision)
        tensors = self.tensors(there, outputs)
        if self._exact is None:
            exact = self._model(there, "fp32")[0]
            return Case(sort, there, tensors, expected, exact)
        exact = self._in_double(there)
        return Case(sort, there, tensors, expected, exact, self._spread(there, exact))

    def _spread(self, batch: Batch, exact: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return how far other roundings move each prediction, (B, L); 0 where a module requires float32."""
        try:
            return spread(lambda: self._program_in_double(batch), exact, _ROUNDINGS)
        except (RuntimeError, VivianeError):
            return np.zeros(exact.shape)

    def tensors(self, batch: Batch, outputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the program's inputs."""
        vectors: dict[str, Tensor] = {}
        for part in self._program.modules():
            if isinstance(part, GivenCollection):
                flat, mask = flat_vectors(outputs[part.name], part.shape)
                vectors[f"vectors/{part.name}"] = flat.float()
                if mask is not None:
                    vectors[f"mask/{part.name}"] = mask
        data = [one for one in self._program.inputs if one.kind not in ("vectors", "mask", "table")]
        named = dict(zip([one.name for one in data], batch_tensors(batch, data), strict=True))
        named |= {**vectors, **self._constants}
        return [named[one.name] for one in self._program.inputs]

    def _model(self, batch: Batch, precision: PrecisionName) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Return predictions, and the outputs of embedding collections by name."""
        outputs: dict[str, Any] = {}
        collections = collections_of(self._module)
        handles = [one.register_forward_hook(self._keep(name, outputs)) for name, one in collections.items()]
        try:
            with evaluating(self._module), Precision(precision).context(self._device):
                output = self._module(batch)
            return self._objective.predictions(output, batch.size).float().cpu().numpy(), outputs
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, name: str, outputs: dict[str, Any]) -> Callable[..., None]:
        def hook(module: TableCollection, inputs: Any, output: Any) -> None:
            if name in outputs and self._dense_only:
                raise ExportError(
                    "a collection is looked up twice, so its vectors cannot be a single input",
                    where=f"embedding {name!r}",
                    fix="export the complete model",
                )
            outputs[name] = output

        return hook

    def _in_double(self, batch: Batch) -> NDArray[np.float32]:
        try:
            return self._program_in_double(batch)
        except (RuntimeError, VivianeError):  # a custom module may require float32
            return self._model(batch, "fp32")[0]

    def _program_in_double(self, batch: Batch) -> NDArray[np.float32]:
        program = self._exact
        assert program is not None
        double = Batch(batch.layout, batch.labels, batch.dense.double(), batch.one_hot, batch.bags)
        with torch.no_grad():
            found: NDArray[np.float32] = program(*batch_tensors(double, program.inputs)).cpu().numpy()
        return found

    def refusals(self, limits: Sequence[KeyLimit], case: Case) -> list[tuple[KeyLimit, Sequence[Tensor]]]:
        """Return inputs that every form must refuse."""
        outputs = self._model(case.batch, self._precision)[1]
        return [(limit, self.tensors(batch, outputs)) for limit, batch in refused_batches(case.batch, limits)]


@dataclass(frozen=True)
class FormParity:
    """Result of the comparison of one form.

    Args:
        max_difference: maximum difference over all predictions.
        cases: one entry per batch.
    """

    max_difference: float
    cases: tuple[dict[str, Any], ...]
    refusals: int


def compare(
    form: FormName,
    run: Runner,
    cases: Sequence[Case],
    refusals: Sequence[tuple[KeyLimit, Sequence[Tensor]]],
    precision: PrecisionName,
) -> FormParity:
    """Run a form on all cases.

    Raises:
        ExportError: it differs from the model by more than rounding, or accepts a key that its table refuses.
    """
    noise = {sort: max((_noise(one) for one in cases if one.sort == sort), default=0.0) for sort in _KINDS}
    lines: list[dict[str, Any]] = []
    for case in cases:
        scale = max(1.0, float(np.abs(case.expected[np.isfinite(case.expected)]).max(initial=0.0)))
        rounding = np.maximum(noise[case.sort], np.broadcast_to(case.spread, case.expected.shape))
        allowed = BASE[precision] * scale + FACTOR * rounding
        gaps = _differences(form, run, case)
        wrong = ~(gaps <= allowed)
        if wrong.any():
            first = np.unravel_index(int(np.argmax(np.where(wrong, gaps, -1.0))), gaps.shape)
            raise ExportError(
                "the exported model differs from the model, so it is not written",
                where=f"form {form!r}, {len(case.expected)} {case.sort} rows, row {first[0]}",
                value=float(gaps[first]),
                allowed=f"at most {allowed[first]:.3g}",
                fix="export another form, and report this with the model's model.json",
            )
        lines.append(
            {
                "rows": len(case.expected),
                "kind": case.sort,
                "max_difference": float(gaps.max(initial=0.0)),
                "tolerance": float(allowed.min(initial=np.inf)),
                "largest_tolerance": float(allowed.max(initial=0.0)),
                "noise": noise[case.sort],
            }
        )
    for limit, tensors in refusals:
        try:
            with silent():
                run(tensors)
        except Exception:
            continue  # refused, as it has to be; each runtime raises an error of its own
        raise ExportError(
            "the exported model accepts a key that its table refuses, so it is not written",
            where=f"form {form!r}, column {limit.column!r}, table {limit.table!r}",
            value=limit.num_rows,
            allowed=f"0 <= key < {limit.num_rows}",
        )
    return FormParity(max(line["max_difference"] for line in lines), tuple(lines), len(refusals))


def _differences(form: FormName, run: Runner, case: Case) -> NDArray[np.float64]:
    try:
        found = run(case.tensors).float().cpu().numpy()
    except Exception as error:
        raise ExportError(
            "the exported model fails on rows that the model accepts, so it is not written",
            where=f"form {form!r}, {len(case.expected)} {case.sort} rows",
            value=f"{type(error).__name__}: {error}"[:800],
            fix="export another form",
        ) from error
    if found.shape != case.expected.shape:
        raise ExportError(
            "the shape of the exported model's predictions differs, so it is not written",
            where=f"form {form!r}",
            value=found.shape,
            allowed=str(case.expected.shape),
        )
    return _distances(found, case.expected)


def _distances(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the differences; equal infinities, and NaN in both, count as equal, and nothing else beside them."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(one.astype(np.float64) - other))
    return np.where(np.isfinite(gap), gap, np.inf)


def _noise(case: Case) -> float:
    """Return the model's largest distance from the exact result, over values that are finite in both."""
    finite = np.isfinite(case.expected) & np.isfinite(case.exact)
    gap = np.abs(case.expected.astype(np.float64) - case.exact)
    return float(gap[finite].max(initial=0.0))


def report(manifest: ExportManifest, forms: Mapping[FormName, FormParity]) -> dict[str, Any]:
    """Return the content of parity.json."""
    packages = ("viviane", "torch", "numpy", "onnx", "onnxscript", "onnxruntime")
    return {
        "format": "viviane-export-parity",
        "version": 1,
        "model": manifest.model,
        "weights_sha256": manifest.weights_sha256,
        "precision": manifest.precision,
        "tolerance_reason": REASON[manifest.precision],
        "tolerance_factor": FACTOR,
        "forms": {
            name: {"max_difference": one.max_difference, "refused_keys": one.refusals, "cases": list(one.cases)}
            for name, one in forms.items()
        },
        "versions": versions(*packages),
        "machine": describe(),
    }
