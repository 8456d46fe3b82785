"""Writing synthetic data: a Parquet data set, or raw text as input of an ETL."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from viviane.core.errors import ConfigError
from viviane.core.exchange import tidy
from viviane.core.files import replace_file, write_json_atomic
from viviane.data.columns import arrow_types
from viviane.data.synthetic.best_score import best_auc, best_log_loss
from viviane.data.synthetic.config import SyntheticConfig
from viviane.data.synthetic.criteo_text import chunk_text
from viviane.data.synthetic.planted import CHUNK_ROWS, BagValues, Chunk, PlantedModel
from viviane.data.write import write_dataset
from viviane.schema import RESERVED

SCORED_ROWS: Final = 1_000_000
T = TypeVar("T")


@dataclass(frozen=True)
class Generated:
    """Description of the written data.

    Args:
        path: the data set folder or the text file.
        rows: number of rows.
        best_auc: expected AUC of the true probabilities: no model does better.
        best_log_loss: their log loss, in nats.
        click_rate: mean probability.
        seconds: elapsed seconds.
    """

    path: Path
    rows: int
    best_auc: float
    best_log_loss: float
    click_rate: float
    seconds: float


class _Truth:
    """Collects every k-th true probability, at most SCORED_ROWS, and counts missing values."""

    def __init__(self, config: SyntheticConfig) -> None:
        self._step = max(1, -(-config.rows // SCORED_ROWS))
        self._scored: list[NDArray[np.float64]] = []
        self._rows = 0
        self._missing = [0] * len(config.sizes)

    def add(self, chunk: Chunk) -> None:
        first = -self._rows % self._step
        self._scored.append(chunk.probabilities[first :: self._step].copy())
        self._rows += len(chunk.labels)
        for i, ids in enumerate(chunk.ids):
            self._missing[i] += int((ids == RESERVED.missing).sum())

    @cached_property
    def summary(self) -> dict[str, float | None]:
        """Return the scores of the rows so far; called after all rows were added."""
        scored = np.concatenate(self._scored) if self._scored else np.zeros(0)
        rate = float(scored.mean()) if len(scored) else float("nan")
        figures = {"best_auc": best_auc(scored), "best_log_loss": best_log_loss(scored), "click_rate": rate}
        return {name: None if np.isnan(value) else value for name, value in figures.items()}

    def info(self, config: SyntheticConfig, part: str) -> dict[str, Any]:
        one_hot = zip(config.to_schema().one_hot, self._missing, strict=True)
        return {
            "rows": config.rows,
            "source": "synthetic",
            "part": part,
            **self.summary,
            "columns": {
                column.name: {"num_ids": column.num_ids, "num_missing": missing, "num_unknown": 0}
                for column, missing in one_hot
            },
            "config": config.to_dict(),
        }


def generate(
    config: SyntheticConfig,
    path: str | Path,
    format: Literal["parquet", "criteo"] = "parquet",  # noqa: A002 - the word on the command line
    *,
    part: str = "train",
    num_threads: int = 2,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Generated:
    """Write synthetic click data; memory stays bounded regardless of the number of rows.

    The bytes depend only on config and part, not on num_threads. Parts share the planted model and
    differ in their rows.

    Args:
        config: columns, frequencies, planted model.
        path: "parquet": a data set folder; "criteo": a text file, compressed if it ends in .gz, with
            `<path>.info.json` next to it.
        part: "train", "valid" or any other name.
        overwrite: replace existing output.
        progress: called with the rows that are made and all rows.

    Raises:
        ConfigError: the path exists, the format is unknown, or the text format has bags.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> done = generate(SyntheticConfig(rows=1000, num_dense=2, num_categorical=3), folder / "train")
        >>> done.rows, 0.5 < done.best_auc < 1
        (1000, True)
    """
    target = Path(path)
    if format not in ("parquet", "criteo"):
        raise ConfigError("unknown format", value=format, allowed="parquet, criteo")
    if num_threads < 1:
        raise ConfigError("too few threads", value=num_threads, allowed="num_threads >= 1")
    tidy(target)
    if target.exists() and not overwrite:
        raise ConfigError("the output exists", where=str(target), fix="choose another, or pass overwrite=True")
    start = time.perf_counter()
    truth = _Truth(config)
    if format == "parquet":
        schema = config.to_schema()
        types = pa.schema([pa.field(name, kind) for name, kind in arrow_types(schema).items()])
        tables = _chunks(config, part, num_threads, truth, lambda chunk: _table(chunk, types), progress)
        write_dataset(target, schema, tables, info=lambda: truth.info(config, part), overwrite=overwrite)
    else:
        if config.bags:
            raise ConfigError("criteo text has no bags", value=[bag.name for bag in config.bags], fix="use parquet")
        gz = target.suffix == ".gz"
        pieces = _chunks(config, part, num_threads, truth, lambda c: chunk_text(c, config.seed, gz), progress)
        info = target.with_name(f"{target.name}.info.json")
        with replace_file(target, overwrite=overwrite) as work:
            with work.open("wb") as file:
                file.writelines(pieces)
            info.unlink(missing_ok=True)  # if killed here, no statistics are better than those of another text
        write_json_atomic(info, truth.info(config, part))
    figures = {name: float("nan") if value is None else value for name, value in truth.summary.items()}
    return Generated(path=target, rows=config.rows, seconds=time.perf_counter() - start, **figures)


def _chunks(
    config: SyntheticConfig,
    part: str,
    num_threads: int,
    truth: _Truth,
    convert: Callable[[Chunk], T],
    progress: Callable[[int, int], None] | None,
) -> Iterator[T]:
    """Yield the converted chunks in order; threads prefetch a few chunks."""
    model = PlantedModel(config)

    def make(number: int) -> tuple[Chunk, T]:
        chunk = model.chunk(part, number, min(CHUNK_ROWS, config.rows - number * CHUNK_ROWS))
        return chunk, convert(chunk)

    def finished(number: int) -> T:
        chunk, made = ahead.popleft().result()
        truth.add(chunk)
        if progress is not None:
            progress(min(config.rows, (number + 1) * CHUNK_ROWS), config.rows)
        return made

    count = -(-config.rows // CHUNK_ROWS)
    ahead: deque[Future[tuple[Chunk, T]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="viviane-generate") as pool:
        try:
            for number in range(count):
                ahead.append(pool.submit(make, number))
                if len(ahead) > num_threads + 1:
                    yield finished(number + 1 - len(ahead))
            while ahead:
                yield finished(count - len(ahead))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _table(chunk: Chunk, types: pa.Schema) -> pa.Table:
    arrays: list[Any] = [pa.array(chunk.labels.astype(np.float32))]
    arrays += [pa.array(chunk.dense(i)) for i in range(len(chunk.counts))]
    arrays += [pa.array(ids) for ids in chunk.ids]
    arrays += [_list(bag, bag.ids) for bag in chunk.bags.values()]
    arrays += [_list(bag, bag.weights) for bag in chunk.bags.values() if bag.weights is not None]
    return pa.table(arrays, schema=types)


def _list(bag: BagValues, values: NDArray[Any]) -> Any:
    offsets: Any = pa.array(bag.offsets)
    return pa.ListArray.from_arrays(offsets, pa.array(values))
