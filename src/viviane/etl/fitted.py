"""A fitted ETL: one object, one file, applied to anything later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Self

import pyarrow as pa

from viviane.core.errors import DataError
from viviane.core.locations import AnyPath, location
from viviane.etl.apply import Applier
from viviane.etl.archive import load_learned, save_learned
from viviane.etl.cells import BadCell
from viviane.etl.checks import unusable_rows
from viviane.etl.derivations import EARLIER
from viviane.etl.deriving import add_earlier, add_group_columns, add_row_columns
from viviane.etl.engine import DuckDbEngine
from viviane.etl.learned import Learned
from viviane.etl.parquet import check_columns, typed_chunk
from viviane.etl.pipeline import Summary, run_job

RAW_TABLE: Final = "the raw table"


class FittedEtl(Learned):
    """A config with all that it learned from training data.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from viviane.etl import EtlConfig, fit
        >>> raw = Path(tempfile.mkdtemp()) / "raw.csv"
        >>> _ = raw.write_text("click,item\\n1,pen\\n0,ink\\n1,pen\\n")
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        ...     labels=[{"name": "click"}], categorical=[{"name": "item"}])
        >>> fitted = fit(config, raw)
        >>> fitted.transform_table(pa.table({"item": ["ink", "pen", "cup", None]})).to_pydict()
        {'item': [4, 3, 2, 1]}
    """

    def save(self, path: str | AnyPath) -> AnyPath:
        """Write everything into one file: a zip of JSON and Parquet with check sums; returns the file."""
        return save_learned(self, location(path))

    @classmethod
    def load(cls, path: str | AnyPath) -> Self:
        """Read a saved ETL.

        Raises:
            DataError: the file is missing, truncated, altered, or of a later format; names the file.
        """
        return cls.of(load_learned(location(path)))

    def transform_table(self, raw: pa.Table) -> pa.Table:
        """Apply to raw rows in memory, for prediction: every row comes out, in order.

        Args:
            raw: the input columns by name, typed or as text; columns that only labels need may be absent. Filters
                do not apply and `ignored` columns are left out. Lags and histories look back among these rows.

        Returns:
            The columns of the schema; without labels if any label's column is absent.

        Raises:
            DataError: a column is missing or of a wrong type, or a cell cannot be converted; names column and row.
        """
        typed, cells = self.read(raw)
        if cells:
            cell = min(cells, key=lambda one: one.row)
            place = f"{RAW_TABLE}, row {cell.row}, column {cell.column!r}"
            raise DataError(f"a malformed row: {cell.problem}", where=place, value=cell.value)
        return self.apply(typed)

    def read(self, raw: pa.Table) -> tuple[pa.Table, list[BadCell]]:
        """Bring raw rows in memory to the types of the config, for `apply`.

        Returns:
            all rows, and the cells for which a row cannot be used, in no order; several may be of one row.

        Raises:
            DataError: a column is missing or of a wrong type.
        """
        config = self.config
        sources = set(config.feature_sources) | config.label_sources
        weight = config.sample_weight
        extra = frozenset({weight.source or weight.name} if weight else set()) - set(config.feature_sources)
        optional = config.label_sources | extra
        wanted = tuple(column for column in config.input.columns if column.name in sources | extra)
        wanted = check_columns(raw.schema, wanted, RAW_TABLE, optional, text_allowed=True)
        chunk = typed_chunk(raw, wanted, 0, config.input.missing)
        return chunk.table, chunk.bad + unusable_rows(chunk.table, config, None, self._applier.engine, self.states)

    def apply(self, typed: pa.Table) -> pa.Table:
        """Turn rows that `read` found usable into ids and numbers; returns what `transform_table` does."""
        config = self.config
        with self._lock:
            engine = self._applier.engine
            table = add_earlier(add_row_columns(typed, config, self.external), config, engine)
            table = add_group_columns(table, config, self.groups, engine)
            return self._applier.table(table, keep_ignored=False)

    def for_prediction(self) -> FittedEtl:
        """Return the same ETL without labels and sample weights, which rows to predict need not have."""
        config = self.config.model_copy(update={"labels": (), "sample_weight": None})
        return FittedEtl(config, self.states, self.borders, self.vocabularies, self.groups, self.external)

    @property
    def rows_are_independent(self) -> bool:
        """Whether the result of a row depends on that row alone, not on the rows before it."""
        return not any(isinstance(one, EARLIER) for one in self.config.derived)

    def transform(
        self, sources: str | AnyPath | Sequence[str | AnyPath], output: str | AnyPath, **options: Any
    ) -> Summary:
        """Apply to raw files of any size and write a data set folder.

        Args:
            sources: files, folders or patterns.
            output: the folder; with a split, one folder per part inside it.
            options: split, memory_limit, threads, on_bad_row, resume, overwrite, labels, progress as in
                `viviane.etl.run`.
        """
        return run_job(self, sources, location(output), **options)

    @classmethod
    def of(cls, learned: Learned) -> Self:
        """Give what was learned the methods of this class."""
        return cls(
            learned.config, learned.states, learned.borders, learned.vocabularies, learned.groups, learned.external
        )  # fmt: skip

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    @cached_property
    def _applier(self) -> Applier:
        return Applier(self, DuckDbEngine(), threads=1)
