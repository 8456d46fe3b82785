"""What the server does, whatever the protocol: answer, describe, load and unload."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import CheckpointNotFoundError, VivianeError, suggest
from viviane.core.logging import get_logger
from viviane.core.machine_errors import as_own_error
from viviane.serving.errors import ModelNotFoundError, RowProblem, RowsError
from viviane.serving.repository import ModelRepository
from viviane.serving.server.admission import Admission, Queue, overloaded
from viviane.serving.server.batcher import Batcher, Outcome, Work
from viviane.serving.server.example_rows import example_rows
from viviane.serving.server.metrics import ServerMetrics
from viviane.serving.server.recommend_queue import RecommendQueue
from viviane.serving.server.recommending import RecommendRequest, RowRecommender
from viviane.serving.server.settings import ServerSettings
from viviane.serving.server.status import RequestError, Status, invalid, status_of
from viviane.serving.server.tensors import Tensor, check_rows, columns_of_tensors, input_specs, output_specs
from viviane.serving.session import InferenceSession

T = TypeVar("T")

SERVER_NAME: Final = "viviane"
EXTENSIONS: Final = ("binary_tensor_data", "model_repository", "model_configuration", "statistics")
RECOMMEND: Final = "recommend"
"""The protocol of requests for recommendations, in metrics."""
_COMPUTING: Final = (
    ("http", "/v2/models/", "/infer"),
    ("json", "/v1/models/", ":predict"),
    (RECOMMEND, "/v1/recommenders/", ":recommend"),
)
_log = get_logger("serving.server")
_SMALL_BYTES: Final = 16 << 10
"""A request of up to this many bytes is parsed where it arrives; a longer one on a thread of its own."""


@dataclass(frozen=True)
class Answer:
    """Predictions of a request.

    Args:
        outputs: by name, (rows,), float32; NaN in refused rows.
        problems: of refused rows.
    """

    model: str
    version: int
    outputs: dict[str, NDArray[np.float32]]
    problems: tuple[RowProblem, ...] = ()


class Service:
    """Models behind a server.

    Args:
        repository: the loaded models; the service does not close it.
        settings: limits and batching.
        version: of this software, for the metadata.
        recommenders: that answer requests for recommendations, by name.
    """

    def __init__(
        self,
        repository: ModelRepository,
        settings: ServerSettings,
        version: str,
        recommenders: Mapping[str, RowRecommender] | None = None,
    ) -> None:
        self.repository, self.settings, self.version = repository, settings, version
        self.recommenders = dict(recommenders or {})
        self.metrics = ServerMetrics(self._queued, repository.tables)
        self.admission = Admission(settings.max_concurrent, settings.max_lag_ms)
        self._recommend_queues = {name: RecommendQueue(name, settings.recommend) for name in self.recommenders}
        self._batchers: dict[tuple[str, int], Batcher] = {}
        self._turn = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="viviane-parsing")
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="viviane-loading")

    # Answering --------------------------------------------------------------------------------------------

    def check_room(self, protocol: str, name: str, version: str | None = None, *, entered: bool = False) -> None:
        """Refuse a request for an overloaded model or recommender before it is parsed.

        Args:
            entered: it was taken in as it arrived; only the queue can be too full for it now.

        Raises:
            RequestError: with the status OVERLOADED.
        """
        queue = self._queue(protocol, name, version)
        if queue is not None and (queue.is_full() if entered else self.admission.refuses(queue)):
            self.metrics.failed(protocol, name, Status.OVERLOADED.grpc)
            raise overloaded(queue.queued)

    def refuses(self, path: bytes) -> bool:
        """Return whether a request is to be refused by its path alone, and count it if so.

        Beyond saturation a server has to spend next to nothing on the requests that it refuses.
        """
        return self._refuses(path)[0]

    def enter(self, path: bytes) -> Callable[[], None]:
        """Count a request that has arrived whole, by its path.

        Returns:
            What to call when it is answered, or its connection has ended.
        """
        asked = _asked(path)
        return _entered(None if asked is None else self._queue(*asked))

    def admit(self, path: bytes) -> Callable[[], None] | None:
        """Count a request that arrives whole, in the queue that it was not refused by; returns None where it was."""
        is_refused, queue = self._refuses(path)
        return None if is_refused else _entered(queue)

    def _refuses(self, path: bytes) -> tuple[bool, Queue | None]:
        asked = _asked(path)
        queue = None if asked is None else self._queue(*asked)
        if asked is None or queue is None or not self.admission.refuses(queue):
            return False, queue
        self.metrics.failed(asked[0], asked[1], Status.OVERLOADED.grpc)
        return True, queue

    def refuses_unread(self) -> bool:
        """Return whether a gRPC request is to be refused before its message is read, and count it if so.

        The message names the model. Where there is one model and one version, that is known before.
        """
        with self._turn:
            only = list(self._batchers.items()) if len(self._batchers) == 1 else []
        for (model, version), batcher in only:
            if self.admission.refuses(batcher) and self.repository.names() == {model: [version]}:
                self.metrics.failed("grpc", model, Status.OVERLOADED.grpc)
                return True
        return False

    def _queue(self, protocol: str, name: str, version: str | None) -> Queue | None:
        """Return where requests for a model or recommender wait; None if there is no such, which is answered later."""
        if protocol == RECOMMEND:
            return self._recommend_queues.get(name)
        try:
            return self._batcher(name, self.repository.get(name, version_number(version)))
        except (ModelNotFoundError, RequestError):
            return None

    async def parsed(self, num_bytes: int, parse: Callable[[], T]) -> T:
        """Run a parser: at once for a short request, beside the event loop for a long one."""
        if num_bytes <= _SMALL_BYTES:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse)

    async def infer_tensors(
        self, protocol: str, model: str, version: str | None, num_bytes: int, read: Callable[[], Sequence[Tensor]]
    ) -> Answer:
        """Answer a request of tensors; `read` parses them."""

        def columns(batcher: Batcher) -> tuple[Any, int]:
            return columns_of_tensors(read(), batcher.inputs, self.settings.max_rows)

        return await self._answer(protocol, model, version, num_bytes, columns, partial_rows=False)

    async def infer_rows(
        self, protocol: str, model: str, version: str | None, rows: list[Any], *, partial_rows: bool
    ) -> Answer:
        """Answer a request of rows, dicts from column to value."""

        def checked(_: Batcher) -> tuple[Any, int]:
            check_rows(len(rows), self.settings.max_rows)
            return rows, len(rows)

        return await self._answer(protocol, model, version, 0, checked, partial_rows=partial_rows)

    async def recommend(self, name: str, request: RecommendRequest) -> list[dict[str, Any]]:
        """Answer a request for recommendations.

        Raises:
            RequestError: no such recommender, too many rows, or too many requests in progress.
        """
        start, known = perf_counter(), name if name in self.recommenders else ""
        with self._counted(RECOMMEND, known):
            if not known:
                what = "no recommender of this name is loaded"
                raise RequestError(Status.NOT_FOUND, what, value=name[:200], fix=suggest(name, self.recommenders))
            check_rows(len(request.rows), self.settings.max_rows)
            recommend = self.recommenders[name].recommend
            call = partial(recommend, request.rows, request.k, keep_seen=request.keep_seen)
            found = await self._recommend_queues[name].run(call, len(request.rows))
        self.metrics.answered(RECOMMEND, name, len(found), perf_counter() - start, None)
        return found

    @contextlib.contextmanager
    def _counted(self, protocol: str, known: str) -> Iterator[None]:
        """Take a request in, and count how it failed.

        Args:
            known: the name of a loaded model; "" for others: a label for each name that a client makes up would let the
                metrics grow without bound.
        """
        try:
            with self.admission.entered():
                yield
        except BaseException as error:
            status = "cancelled" if isinstance(error, asyncio.CancelledError) else status_of(error).grpc
            self.metrics.failed(protocol, known, status)
            raise

    async def _answer(
        self,
        protocol: str,
        model: str,
        version: str | None,
        num_bytes: int,
        rows_of: Callable[[Batcher], tuple[Any, int]],
        *,
        partial_rows: bool,
    ) -> Answer:
        start = perf_counter()
        with (
            self._counted(protocol, model if model in self.repository.names() else ""),
            self.repository.lease(model, version_number(version)) as session,
        ):
            batcher = self._batcher(model, session)
            given, rows = await self.parsed(num_bytes, partial(rows_of, batcher))
            outcome = await self._predicted(batcher, given, rows)
            answer = _answer_of(model, batcher, outcome, partial_rows=partial_rows)
        self.metrics.answered(protocol, model, rows, perf_counter() - start, outcome)
        return answer

    async def _predicted(self, batcher: Batcher, rows: Any, count: int) -> Outcome:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def deliver(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def done(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the client left before the server ended
                loop.call_soon_threadsafe(deliver, outcome)

        work = Work(rows, count, done)
        batcher.submit(work)
        try:
            return await future
        except asyncio.CancelledError:
            work.cancelled = True
            raise

    def _batcher(self, model: str, session: InferenceSession) -> Batcher:
        with self._turn:
            found = self._batchers.get((model, session.version))
            if found is None or found.session is not session:
                found = self._batchers[model, session.version] = Batcher(session, self.settings.batching)
            return found

    def _queued(self) -> dict[tuple[str, str], int]:
        with self._turn:
            found = {(model, str(version)): one.queued for (model, version), one in self._batchers.items()}
        return found | {(name, ""): queue.queued for name, queue in self._recommend_queues.items()}

    def queued(self, name: str) -> int:
        """Return how many requests wait for a model, in all versions, or for a recommender."""
        return sum(count for (found, _), count in self._queued().items() if found == name)

    def recommend_queue(self, name: str) -> RecommendQueue:
        """Return where the requests of a recommender wait."""
        return self._recommend_queues[name]

    @property
    def under_way(self) -> int:
        """Requests that are being answered."""
        return self.admission.under_way

    # Describing -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether requests are taken: not while the server shuts down, and not before a model is loaded."""
        return not self.admission.draining and bool(self.repository.names() or self.recommenders)

    def is_ready(self, model: str, version: str | None) -> bool:
        """Whether a version of a model answers requests."""
        try:
            self.repository.get(model, version_number(version))
        except (ModelNotFoundError, RequestError):
            return False
        return not self.admission.draining

    def server_metadata(self) -> dict[str, Any]:
        """Return name, version and extensions."""
        return {"name": SERVER_NAME, "version": self.version, "extensions": list(EXTENSIONS)}

    def model_metadata(self, model: str, version: str | None) -> dict[str, Any]:
        """Return a model's versions, inputs and outputs.

        Raises:
            ModelNotFoundError: no such model or version is loaded.
        """
        session = self.repository.get(model, version_number(version))
        versions = [str(number) for number in self.repository.names().get(model, [session.version])]
        return {
            "name": model,
            "versions": versions if version is None else [str(session.version)],
            "platform": SERVER_NAME,
            "inputs": [_metadata(one) for one in input_specs(session.inputs) if not one.optional],
            "outputs": [_metadata(one) for one in output_specs(session.outputs)],
        }

    def columns(self, model: str, version: str | None) -> dict[str, Any]:
        """Return a model's columns as a person fills them in."""
        session = self.repository.get(model, version_number(version))
        return {
            "name": model,
            "version": str(session.version),
            "raw": session.takes_raw_rows,
            "inputs": [one.to_dict() for one in session.inputs],
            "outputs": [one.to_dict() for one in session.outputs],
        }

    def model_config(self, model: str, version: str | None) -> dict[str, Any]:
        """Return a model's configuration in the form of Triton's, which load generators read."""
        session = self.repository.get(model, version_number(version))
        batching = self.settings.batching
        return {
            "name": model,
            "platform": SERVER_NAME,
            "backend": SERVER_NAME,
            "max_batch_size": self.settings.max_rows,
            "input": [_config(one) for one in input_specs(session.inputs)],
            "output": [_config(one) for one in output_specs(session.outputs)],
            "instance_group": [{"name": model, "kind": "KIND_CPU" if session.device.type == "cpu" else "KIND_GPU",
                                "count": session.instances}],
            "dynamic_batching": {"max_queue_delay_microseconds": int(batching.max_delay_ms * 1000)},
        }  # fmt: skip

    def model_statistics(self, model: str, version: str | None) -> dict[str, Any]:
        """Return a version's counts and times in the form of Triton's."""
        session = self.repository.get(model, version_number(version))
        tables = {} if session.tables is None else {"parameter_server": session.tables.status()}
        return {"name": model, "version": str(session.version), **self.metrics.statistics(model), **tables}

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Return the state of every version; `ready`: of those that answer requests."""
        states = {"ready": "READY", "loading": "LOADING", "unloading": "UNLOADING", "failed": "UNAVAILABLE"}
        found = [one for one in self.repository.index() if not ready or one.state == "ready"]
        return [
            {"name": one.name, "version": str(one.version), "state": states[one.state], "reason": one.reason}
            for one in found
        ]

    # Loading ----------------------------------------------------------------------------------------------

    async def load(self, model: str, version: int | None = None) -> None:
        """Load a version of a model of the settings, or reload it.

        Args:
            version: None takes those that the settings name.

        Raises:
            RequestError: loading is not allowed, the settings name no such model, or it cannot be loaded: what was
                loaded stays.
        """
        self._check_control()
        entries = {entry.name: entry for entry in self.settings.inference.models}
        if model not in entries:
            fix = suggest(model, entries)
            raise RequestError(Status.NOT_FOUND, "no model of this name is loaded", value=model, fix=fix)
        entry = entries[model] if version is None else entries[model].model_copy(update={"versions": (version,)})
        await self._loaded(model, self.repository.add, entry)
        self._forget()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._loads, self.warm_up, model)

    async def unload(self, model: str, version: int | None = None) -> None:
        """Take no more requests for a model or one version of it, answer those that it has, and free it.

        Raises:
            RequestError: unloading is not allowed. ModelNotFoundError: no such model is loaded.
        """
        self._check_control()
        await asyncio.get_running_loop().run_in_executor(self._loads, self.repository.unload, model, version)
        self._forget()

    async def rollback(self, model: str, version: int | None = None) -> int:
        """Let an earlier version of a model respond again; see `ModelRepository.rollback`.

        Raises:
            RequestError: loading is not allowed, or the version cannot be loaded. ModelNotFoundError: no such model is
                loaded.
        """
        self._check_control()
        number = await self._loaded(model, self.repository.rollback, model, version)
        self._forget()
        return number

    async def _loaded(self, model: str, load: Callable[..., T], *args: Any) -> T:
        """Run `load` in a thread; an error tells the caller, who may load models, why the model was not loaded."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._loads, load, *args)
        except Exception as error:
            own = as_own_error(error)
            if own is None or status_of(own) is not Status.INTERNAL:
                raise
            _log.error("%s was not loaded: %s", model, own)
            status = Status.NOT_FOUND if isinstance(own, CheckpointNotFoundError) else Status.INVALID
            details = {"where": own.where, "value": own.value, "allowed": own.allowed, "fix": own.fix}
            known = {name: value for name, value in details.items() if value is not None}
            raise RequestError(status, own.what, **known) from error

    def warm_up(self, model: str) -> None:
        """Predict a made-up row, so that the first request does not wait for the ETL to plan its queries."""
        session = self.repository.get(model)
        with contextlib.suppress(VivianeError):  # not every model accepts the row
            session.try_predict(example_rows(session.inputs, 1))

    def _check_control(self) -> None:
        if not self.settings.allow_load:
            raise RequestError(Status.FORBIDDEN, "this server loads and unloads nothing over the network",
                               fix="start it with --allow-load")  # fmt: skip

    def _forget(self) -> None:
        """Let go of the batchers of versions that are loaded no more."""
        names = self.repository.names()
        with self._turn:
            for model, version in list(self._batchers):
                if version not in names.get(model, ()):
                    del self._batchers[model, version]

    def close(self) -> None:
        """End the threads that parse and load."""
        for queue in self._recommend_queues.values():
            queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loads.shutdown(wait=False, cancel_futures=True)


def version_number(version: str | None) -> int | None:
    """Return a version as a number; None and "" mean the newest.

    Raises:
        RequestError: it is none.

    Example:
        >>> version_number("12")
        12
    """
    if not version:
        return None
    if not version.isascii() or not version.isdecimal() or len(version) > 18:
        raise RequestError(Status.NOT_FOUND, "a version is a whole number", value=version[:100])
    return int(version)


def chosen_outputs(answer: Answer, names: Sequence[str] | None) -> dict[str, NDArray[np.float32]]:
    """Return the outputs that a request asks for; None: all.

    Raises:
        RequestError: there is no such output, or it is requested twice.
    """
    if not names:
        return answer.outputs
    found = {}
    for name in names:
        if name not in answer.outputs:
            raise invalid("the model has no such output", value=str(name)[:200], fix=suggest(name, answer.outputs))
        if name in found:
            raise invalid("an output is requested twice", value=name)
        found[name] = answer.outputs[name]
    return found


def _entered(queue: Queue | None) -> Callable[[], None]:
    """Count a request in a queue, and return what to call at its end."""
    if queue is None:
        return _nothing
    queue.backlog.enter()
    return queue.backlog.leave


def _nothing() -> None:
    """End a request that no queue counts."""


@lru_cache(1024)
def _asked(path: bytes) -> tuple[str, str, str | None] | None:
    """Return protocol, name and version that a path asks for; None: it asks for no computation.

    Example:
        >>> _asked(b"/v2/models/ctr/versions/3/infer?x=1")
        ('http', 'ctr', '3')
    """
    text = path.partition(b"?")[0].decode("latin-1")
    for protocol, start, end in _COMPUTING:
        if text.endswith(end) and text.startswith(start):
            name, _, version = text[len(start) : -len(end)].partition("/versions/")
            return protocol, name, version or None
    return None


def _answer_of(model: str, batcher: Batcher, outcome: Outcome, *, partial_rows: bool) -> Answer:
    found = outcome.prediction
    if found.error is not None:
        raise found.error
    if found.problems and not partial_rows:
        raise RowsError.of(found.problems)
    scores = found.scores
    assert scores is not None
    named = scores if isinstance(scores, dict) else {batcher.outputs[0].name: scores}
    return Answer(model, batcher.session.version, named, found.problems)


def _metadata(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _config(spec: Any) -> dict[str, Any]:
    kind = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    optional = {"optional": True} if spec.optional else {}
    return {"name": spec.name, "data_type": kind, "dims": list(spec.shape[1:]), **optional}
