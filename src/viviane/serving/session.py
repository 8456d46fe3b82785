"""A loaded model that answers requests, from any number of threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from viviane.batch import Batch
from viviane.core.device import resolve_device
from viviane.core.errors import ConfigError
from viviane.core.locations import AnyPath
from viviane.etl import FittedEtl
from viviane.ops.dispatch import interpreted
from viviane.serving.batches import cut, padding_batch
from viviane.serving.columns import ColumnSpec, encoded_columns, output_columns, raw_columns
from viviane.serving.encoding import RowEncoder
from viviane.serving.errors import RowProblem, RowsError, SessionClosedError
from viviane.serving.instances import Instances
from viviane.serving.loading import LoadedModel, load_model, table_bytes
from viviane.serving.matrices import matrix_columns
from viviane.serving.parameter_server.automatic import tiers_if_too_large
from viviane.serving.parameter_server.settings import TableSettings
from viviane.serving.parameter_server.tables import ServedTables
from viviane.serving.settings import SessionSettings
from viviane.serving.statistics import Recorder, SessionStatistics
from viviane.serving.versions import find_version
from viviane.store.outbox import check_outbox
from viviane.store.stream import StreamAddress
from viviane.training.checkpoint.load import copy_dense
from viviane.training.checkpoint.tensor_files import tensors_of_bytes

Scores: TypeAlias = NDArray[np.float32] | dict[str, NDArray[np.float32]]
"""Of a model with one output its predictions, (rows,); of several a dict from output to (rows,)."""


@dataclass(frozen=True)
class PartialPrediction:
    """Predictions of the rows that could be used.

    Args:
        scores: as `InferenceSession.predict` returns them; NaN in refused rows.
        problems: the first problem of each refused row, in order of rows.
    """

    scores: Scores
    problems: tuple[RowProblem, ...]


class InferenceSession:
    """A saved model, loaded to answer requests. All methods may be called from any number of threads.

    `predict` gives the bits of `Model.predict` for the same rows in the same precision; on a GPU, where
    requests are padded, the last bits may differ.

    Args:
        path: a model folder, a run folder, or a folder of versions `1/`, `2/`, ...; a URL, too.
        version: which of the versions; None takes the latest.
        module: for a model made from a torch module, a module of the same shapes.
        tables: tiers that hold the tables (`viviane.serving.parameter_server.TableSettings`); None: memory, and a cache
            over the saved model where they do not fit.
        warm_from: a session of another version, with whose keys caches are filled.
        settings: fields of `SessionSettings`, such as device="cpu", precision="bf16", num_threads=4.

    Raises:
        CheckpointError: there is no such model or version, or a file is missing, truncated or altered.
        ConfigError: a setting is unknown, out of range, or not possible here.

    Example:
        >>> import tempfile
        >>> import viviane as vv
        >>> schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "city", "num_ids": 9}])
        >>> model = vv.Model(vv.Solver(device="cpu"), schema)
        >>> model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
        >>> model.compile()
        >>> folder = model.save(tempfile.mkdtemp() + "/model")
        >>> with InferenceSession(folder, device="cpu") as session:
        ...     scores = session.predict({"city": [3, 4, 3]})
        >>> scores.shape, bool(scores[0] == scores[2])
        ((3,), True)
    """

    def __init__(
        self,
        path: str | AnyPath,
        *,
        version: int | None = None,
        module: nn.Module | None = None,
        tables: TableSettings | Mapping[str, Any] | None = None,
        warm_from: InferenceSession | None = None,
        **settings: Any,
    ) -> None:
        self.settings = SessionSettings(**settings)
        self.version, folder = find_version(path, version)
        self.path = str(folder)
        device = resolve_device(self.settings.device)
        if isinstance(tables, Mapping):
            tables = TableSettings.from_dict(dict(tables), where="tables")
        if tables is not None:
            _check_tables(tables, device)
        if tables is None and module is None and self.settings.table_dtype == "model":
            tables = tiers_if_too_large(folder, device)
        model = load_model(
            folder, device, module, tables=tables, version=self.version, table_dtype=self.settings.table_dtype
        )
        self.tables = model.tables
        self.device, self.schema, self.model_name = device, model.schema, model.name
        etl = None if model.etl is None else FittedEtl.load(model.etl)
        matrices = self.settings.rows == "matrices"
        self._encoder = RowEncoder(model.schema, etl, model.strict_ids, matrices=matrices)
        self._encoded_inputs = matrix_columns(model.schema) if matrices else encoded_columns(model.schema)
        self._raw = self._encoder.has_etl if self.settings.rows == "auto" else self.settings.rows == "raw"
        if self._raw:
            _ = self._encoder.etl  # raises if there is none
        self._labels = [label.name for label in model.schema.labels]
        self._most = self.settings.batch_limit(device.type)
        self._table_bytes = 0 if tables is not None else table_bytes(model.module)
        self._instances = Instances(model, self.settings)
        self._recorder = Recorder()
        self._turn = threading.Condition()
        self._running, self._closed = 0, False
        if self.tables is not None:
            self._open_tables(self.tables, model, warm_from)
        self.warm_up()

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: threads, graphs and caches are this process's.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a session cannot be copied or pickled", where=self.path,
            fix="open one in each process: InferenceSession(path); any number of threads may share it",
        )  # fmt: skip

    def _open_tables(self, tables: ServedTables, model: LoadedModel, before: InferenceSession | None) -> None:
        """Fill caches, and begin to follow updates."""
        try:
            older = None if before is None else before.tables
            if tables.settings.cache is not None and tables.settings.cache.warm_up:
                tables.warm_up(older)
            tables.prepare_dense = partial(self._new_dense, model)
            kept = tables.kept_dense()
            if kept is not None:
                self._new_dense(model, kept)()
            tables.follow()
        except BaseException:
            tables.close()
            raise

    def _new_dense(self, model: LoadedModel, data: bytes) -> Callable[[], None]:
        """Build instances with other dense weights; what is returned lets later requests use them.

        Raises:
            CheckpointError: these are no dense weights of this model.
        """
        module = copy.deepcopy(model.module)
        copy_dense(tensors_of_bytes(data, "dense weights of an update"), module, "dense weights of an update")
        instances = Instances(replace(model, module=module), self.settings)

        def commit() -> None:
            self._instances = instances

        return commit

    @classmethod
    def from_settings(
        cls,
        path: str | AnyPath,
        settings: SessionSettings,
        *,
        version: int | None = None,
        tables: TableSettings | None = None,
        warm_from: InferenceSession | None = None,
    ) -> Self:
        """Make a session from settings that were read from a file; caches begin with the keys of another's."""
        return cls(path, version=version, tables=tables, warm_from=warm_from, **settings.model_dump())

    # What it is -------------------------------------------------------------------------------------------

    @property
    def precision(self) -> str:
        """What dense layers compute in: "fp32", "tf32", "bf16" or "fp16"."""
        return self._instances.precision.name

    @property
    def execution(self) -> str:
        """How batches are computed: "cuda graphs", "program" (one native call, on a CPU), or "eager: " and why."""
        return self._instances.execution

    @property
    def instances(self) -> int:
        """How many requests are computed at the same time."""
        return self._instances.count

    @property
    def table_bytes(self) -> int:
        """Memory of the rows that are tables of this process; 0 where tables are in tiers."""
        return self._table_bytes

    @property
    def takes_raw_rows(self) -> bool:
        """What `predict` takes rows for by default: raw rows, or encoded ones."""
        return self._raw

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row's prediction is a function of that row alone, so that requests may be predicted together.

        Not of raw rows where the ETL looks back among the rows of a request (lags, histories).
        """
        return not self._raw or self._encoder.rows_are_independent

    @property
    def inputs(self) -> tuple[ColumnSpec, ...]:
        """The columns that `predict` takes by default."""
        return self.raw_inputs if self.takes_raw_rows else self.encoded_inputs

    @property
    def raw_inputs(self) -> tuple[ColumnSpec, ...]:
        """The raw columns, as logged.

        Raises:
            ConfigError: the model has no ETL.
        """
        return raw_columns(self._encoder.raw_columns)

    @property
    def encoded_inputs(self) -> tuple[ColumnSpec, ...]:
        """The columns of ids and numbers, as the ETL writes them; or the matrices that hold them."""
        return self._encoded_inputs

    @property
    def outputs(self) -> tuple[ColumnSpec, ...]:
        """The predictions: probabilities of binary labels, values of regression labels."""
        return output_columns(self.schema)

    def statistics(self) -> SessionStatistics:
        """Return counts and latencies since the session was made; warm-up does not count."""
        return self._recorder.read()

    # Answering --------------------------------------------------------------------------------------------

    def predict(self, rows: Any, *, raw: bool | None = None) -> Scores:
        """Return the prediction of each row, in their order; labels are never needed.

        Args:
            rows: columns by name (arrays, lists, tensors), a list of dicts, an Arrow table or record batch, a pandas or
                Polars frame, or a `Batch`. Columns that the model does not read are left out. None, NaN in frames and
                lists, and the ETL's own texts of a missing value are missing raw values.
            raw: rows are as logged, and the model's ETL turns them into ids: values that it never saw are unknown,
                as in training. False: rows are ids and numbers. None: the session's setting.

        Returns:
            (rows,), float32; for a model with several outputs a dict from output to (rows,).

        Raises:
            RowsError: a row cannot be used; names row, column and value, and has all such rows in `problems`.
            SchemaError, DataError: a column is missing or of another type.
            SessionClosedError: the session was closed.
        """
        start = perf_counter()
        self._enter()
        try:
            batch, problems = self._encoded(rows, raw)
            if problems:
                raise RowsError.of(problems)
            scores = self._computed(batch, checked=not isinstance(rows, Batch))
            named = self._named(scores)
        except BaseException:
            self._recorder.add_failure()
            raise
        finally:
            self._leave()
        self._recorder.add(len(scores), 0, perf_counter() - start)
        return named

    def try_predict(self, rows: Any, *, raw: bool | None = None) -> PartialPrediction:
        """Predict the rows that can be used, and return what is wrong with the others; arguments as of `predict`.

        Raises:
            SchemaError, DataError: a column is missing or of another type.
            SessionClosedError: the session was closed.
        """
        start = perf_counter()
        self._enter()
        try:
            batch, problems = self._encoded(rows, raw)
            scores = self._computed(batch, checked=not isinstance(rows, Batch))
            refused = [problem.row for problem in problems]
            if refused:
                scores = scores.copy()
                scores[refused] = np.nan
            named = self._named(scores)
        except BaseException:
            self._recorder.add_failure()
            raise
        finally:
            self._leave()
        self._recorder.add(len(scores) - len(refused), len(refused), perf_counter() - start)
        return PartialPrediction(named, tuple(problems))

    def new_batch(self, size: int) -> Batch:
        """Return a batch of padding rows to write encoded rows into, in page-locked memory where the model is on a GPU.

        The GPU copies a large batch from there without a copy by the host. Bags are empty, or of their hotness.
        """
        batch = padding_batch(self.schema, size)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def warm_up(self, sizes: Sequence[int] | None = None) -> None:
        """Predict padding rows in batches of these sizes, so that later requests wait for no compilation."""
        for size in self.settings.warm_up if sizes is None else sizes:
            self._enter()
            try:
                self._computed(padding_batch(self.schema, min(size, self._most)), checked=True)
            finally:
                self._leave()

    # The end ----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, answer those that were accepted, and free the weights.

        Args:
            timeout_s: how long to wait for requests in progress; None waits for all.

        Returns:
            Whether all of them have been answered.
        """
        with self._turn:
            self._closed = True
            done = self._turn.wait_for(lambda: not self._running, timeout_s)
        if done:
            if self.tables is not None:
                self.tables.close()
            self.__dict__.pop("_instances", None)  # `__getattr__` answers from now on
            self.__dict__.pop("_encoder", None)
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Answer for what `close` has freed."""
        if name in ("_instances", "_encoder") and self.__dict__.get("_closed"):
            raise self._closed_error()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.device}"
        return f"InferenceSession({self.model_name!r}, version {self.version}, {state})"

    # Inside -----------------------------------------------------------------------------------------------

    # Of a request of one row on one thread, a context manager would take longer than a layer.

    def _enter(self) -> None:
        with self._turn:
            if self._closed:
                raise self._closed_error()
            self._running += 1

    def _closed_error(self) -> SessionClosedError:
        where = f"model {self.model_name!r}"
        return SessionClosedError("the session was closed", where=where, fix="load the model again")

    def _leave(self) -> None:
        with self._turn:
            self._running -= 1
            if self._closed:
                self._turn.notify_all()

    def _encoded(self, rows: Any, raw: bool | None) -> tuple[Batch, list[RowProblem]]:
        return self._encoder.encode(rows, raw=self._raw if raw is None else raw)

    def _computed(self, batch: Batch, *, checked: bool) -> NDArray[np.float32]:
        if not batch.size:
            return np.empty((0, len(self._labels)), np.float32)
        if self.tables is None:
            return self._in_parts(batch, checked)
        with self.tables.reading():
            return self._in_parts(batch, checked)

    def _in_parts(self, batch: Batch, checked: bool) -> NDArray[np.float32]:
        most, size, instances = self._most, batch.size, self._instances  # all parts have the same dense weights
        if size <= most:
            return instances.run(batch, checked=checked)
        parts = (cut(batch, start, start + most) for start in range(0, size, most))
        return np.concatenate([instances.run(part, checked=checked) for part in parts])

    def _named(self, scores: NDArray[np.float32]) -> Scores:
        if len(self._labels) == 1:
            return np.ascontiguousarray(scores.reshape(-1))
        return {name: np.ascontiguousarray(scores[:, place]) for place, name in enumerate(self._labels)}


def _check_tables(tables: object, device: torch.device) -> None:
    """Refuse what is not there before the model is loaded, which may take minutes."""
    if not isinstance(tables, TableSettings):
        raise ConfigError("not settings of tables", where="tables", value=type(tables).__name__,
                          allowed="TableSettings, or its clauses as a mapping")  # fmt: skip
    on_device = tables.cache is not None and tables.cache.place == "device"
    if on_device and device.type != "cuda" and not interpreted():
        raise ConfigError("a cache with place=\"device\" needs a session on a GPU", where="tables, cache.place",
                          value=str(device), fix="leave cache.place at \"host\"")  # fmt: skip
    if tables.updates is not None:
        if tables.updates.outbox is not None:
            check_outbox(tables.updates.outbox, tables.updates.model)
        StreamAddress.of(tables.updates.address).partitions(tables.updates.settings)
