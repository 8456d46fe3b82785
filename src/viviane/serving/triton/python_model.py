"""What Triton's Python backend runs: a session behind Triton's own batching.

Only Triton's backend imports this module; `triton_python_backend_utils` exists there alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from viviane.core.errors import VivianeError
from viviane.serving.errors import RowsError
from viviane.serving.server.example_rows import example_rows
from viviane.serving.server.status import describe
from viviane.serving.server.tensors import BYTES, DATATYPES, Tensor, columns_of_tensors
from viviane.serving.server.together import Prediction, kind_of, predict_together
from viviane.serving.session import InferenceSession
from viviane.serving.triton.cleaning import Cleaner
from viviane.serving.triton.repository import SESSION_FILE, ModelPart

_DATATYPES = {np.dtype(kind): name for name, kind in DATATYPES.items()}


class TritonPythonModel:
    """A model as Triton's Python backend calls it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the session."""
        self._backend: Any = importlib.import_module("triton_python_backend_utils")
        folder = Path(args["model_repository"]) / args["model_version"]
        self._part = ModelPart.from_json_file(folder / SESSION_FILE)
        self._max_rows = int(json.loads(args["model_config"])["max_batch_size"])
        device = "cpu" if args["model_instance_kind"] == "CPU" else f"cuda:{args['model_instance_device_id']}"
        settings = self._part.session.model_copy(update={"device": device, "instances": 1})
        self._cleaner: Cleaner | None = None
        self._session: InferenceSession | None = None
        warm_up: Callable[[Any], Any]
        if self._part.role == "clean":
            self._cleaner = Cleaner(folder / self._part.path)
            self._inputs, warm_up = self._cleaner.inputs, self._cleaner.tensors
        else:
            self._session = InferenceSession.from_settings(folder / self._part.path, settings)
            self._inputs, warm_up = self._session.inputs, self._session.try_predict
        with contextlib.suppress(VivianeError):  # a made-up row need not be one that the model accepts
            warm_up(example_rows(self._inputs, 1))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests that Triton gives together."""
        taken, refused = split_excess(self._backend, requests, self._part.max_queued)
        return [*self._answers(taken), *refused]

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        rows: dict[int, tuple[Any, int]] = {}
        for place, request in enumerate(requests):
            try:
                rows[place] = columns_of_tensors(tensors_of_request(request), self._inputs, self._max_rows)
            except Exception as error:  # this request is refused; the others are answered
                responses[place] = failure(self._backend, error)
        if self._cleaner is not None:
            for place, (columns, _) in rows.items():
                responses[place] = self._cleaned(self._cleaner, columns)
        elif self._session is not None:
            self._predict(self._session, rows, responses)
        return responses

    def finalize(self) -> None:
        """Free the weights."""
        if self._session is not None:
            self._session.close()

    def _predict(self, session: InferenceSession, rows: dict[int, tuple[Any, int]], responses: list[Any]) -> None:
        together: dict[Any, list[int]] = defaultdict(list)
        for place, (columns, _) in rows.items():
            together[kind_of(columns) if session.rows_are_independent else place].append(place)
        for places in together.values():
            try:
                predictions = predict_together(session, [rows[place] for place in places])
            except Exception as error:
                predictions = [Prediction(None, (), error)] * len(places)
            for place, prediction in zip(places, predictions, strict=True):
                responses[place] = self._response(session, prediction)

    def _cleaned(self, cleaner: Cleaner, columns: Any) -> Any:
        try:
            tensors = cleaner.tensors(columns)
        except Exception as error:
            return failure(self._backend, error)
        return self._backend.InferenceResponse([self._backend.Tensor(name, values) for name, values in tensors.items()])

    def _response(self, session: InferenceSession, prediction: Prediction) -> Any:
        if prediction.error is not None:
            return failure(self._backend, prediction.error)
        if prediction.problems:
            return failure(self._backend, RowsError.of(prediction.problems))
        scores = prediction.scores
        assert scores is not None
        named = scores if isinstance(scores, dict) else {session.outputs[0].name: scores}
        return self._backend.InferenceResponse(
            [self._backend.Tensor(name, np.ascontiguousarray(np.reshape(one, (-1, 1)))) for name, one in named.items()]
        )


def split_excess(backend: Any, requests: Sequence[Any], most: int) -> tuple[Sequence[Any], list[Any]]:
    """Return the first requests, which are taken, and a refusal for each later one; `most` 0: all are taken.

    Triton gives all that wait together, in the order in which they came.
    """
    if not most or len(requests) <= most:
        return requests, []
    words = f"{len(requests)} requests wait, of which {most} are taken (max_queued): send it again later"
    kinds = backend.TritonError
    return requests[:most], [
        backend.InferenceResponse([], kinds(words, kinds.UNAVAILABLE)) for _ in range(len(requests) - most)
    ]


def tensors_of_request(request: Any) -> list[Tensor]:
    """Return the tensors of a request as Triton's Python backend gives it."""
    found = []
    for tensor in request.inputs():
        values = tensor.as_numpy()
        if values.dtype == object:
            texts = pa.array(values.reshape(-1).tolist(), pa.binary())
            found.append(Tensor(tensor.name(), BYTES, values.shape, texts))
        else:
            found.append(Tensor(tensor.name(), _DATATYPES[values.dtype], values.shape, values.reshape(-1)))
    return found


def failure(backend: Any, error: BaseException) -> Any:
    """Return an error as the response of `backend`, which is `triton_python_backend_utils`."""
    kinds = backend.TritonError
    code = kinds.INVALID_ARG if isinstance(error, VivianeError) else kinds.INTERNAL
    return backend.InferenceResponse([], kinds(str(describe(error)["error"]), code))
