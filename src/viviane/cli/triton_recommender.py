"""A recommender behind Triton: cleaning, retrieval and ranking as one model of its Python backend.

The stages stay in one process, since what passes between them, rows and hundreds of candidates of each, would cost more
to copy than to compute. Answers are those of `ServedRecommender`, which Viviane's own server asks, too.

Only Triton's backend makes a `TritonPythonModel`; `triton_python_backend_utils` exists there alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from viviane.cli.served_recommender import ServedRecommender
from viviane.core.errors import expect
from viviane.core.json_files import parse_json
from viviane.serving.server.recommending import RecommendRequest
from viviane.serving.server.tensors import BYTES, TensorSpec, columns_of_tensors, input_specs
from viviane.serving.triton import PythonModel
from viviane.serving.triton.python_model import failure, split_excess, tensors_of_request
from viviane.serving.triton.repository import SESSION_FILE, FolderPart

_MODULE: Final = "viviane.cli.triton_recommender"


def triton_model(name: str, path: str | Path, device: str) -> PythonModel:
    """Describe a saved recommender for `write_repository`."""
    recommender = ServedRecommender(path, "cpu")
    outputs = [TensorSpec("items", "INT64", (-1, -1)), TensorSpec("scores", "FP32", (-1, -1))]
    if recommender.has_values:
        outputs.append(TensorSpec("values", BYTES, (-1, -1)))
    inputs = tuple(input_specs(recommender.inputs))
    return PythonModel(name, Path(path), _MODULE, inputs, tuple(outputs), device)


class TritonPythonModel:
    """A recommender as Triton's Python backend calls it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the recommender."""
        self._backend: Any = importlib.import_module("triton_python_backend_utils")
        folder = Path(args["model_repository"]) / args["model_version"]
        part = FolderPart.from_json_file(folder / SESSION_FILE)
        device = "cpu" if args["model_instance_kind"] == "CPU" else f"cuda:{args['model_instance_device_id']}"
        self._max_queued = part.max_queued
        self._recommender = ServedRecommender(folder / part.path, device)
        self._inputs = self._recommender.inputs
        self._max_rows = int(parse_json(args["model_config"], where="model_config of Triton")["max_batch_size"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests; each is computed alone, and fails alone."""
        taken, refused = split_excess(self._backend, requests, self._max_queued)
        return [*(self._answer(request) for request in taken), *refused]

    def _answer(self, request: Any) -> Any:
        try:
            columns, count = columns_of_tensors(tensors_of_request(request), self._inputs, self._max_rows)
            given = parse_json(request.parameters() or "{}", where="parameters of the request")
            expect("parameters of the request", given, dict)
            asked = RecommendRequest.of({**given, "instances": _rows(columns, count)})
            found = self._recommender.recommend(asked.rows, asked.k, keep_seen=asked.keep_seen)
        except Exception as error:  # this request is refused; the others are answered
            return failure(self._backend, error)
        tensors = answer_tensors(found, asked.k, with_values=self._recommender.has_values)
        return self._backend.InferenceResponse([self._backend.Tensor(name, one) for name, one in tensors.items()])


def _rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return columns as rows; not-a-number is a missing value."""
    plain = {name: values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
             for name, values in columns.items()}  # fmt: skip
    return [{name: _given(values[i]) for name, values in plain.items()} for i in range(count)]


def _given(value: Any) -> Any:
    return None if isinstance(value, float) and np.isnan(value) else value


def answer_tensors(answers: Sequence[Mapping[str, Any]], k: int, *, with_values: bool) -> dict[str, Any]:
    """Return recommendations as tensors (rows, k): where a row has fewer, -1, NaN and the empty text.

    Example:
        >>> answer_tensors([{"items": [5], "scores": [0.5]}], 2, with_values=False)["items"].tolist()
        [[5, -1]]
    """
    items, scores = np.full((len(answers), k), -1, np.int64), np.full((len(answers), k), np.nan, np.float32)
    values = np.full((len(answers), k), b"", object)
    for row, answer in enumerate(answers):
        items[row, : len(answer["items"])], scores[row, : len(answer["scores"])] = answer["items"], answer["scores"]
        for place, value in enumerate(answer.get("values", ())):
            values[row, place] = b"" if value is None else str(value).encode()
    return {"items": items, "scores": scores} | ({"values": values} if with_values else {})
