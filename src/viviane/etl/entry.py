"""The entry point: raw files in, data sets out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from viviane.core.errors import ConfigNotFoundError, expect
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.registry import Registry
from viviane.core.rows import as_table
from viviane.etl.archive import load_learned
from viviane.etl.config import EtlConfig
from viviane.etl.fitted import FittedEtl
from viviane.etl.pipeline import ETL_FILE, Summary, run_job
from viviane.etl.presets import criteo

PRESETS: Final[Registry[Any]] = Registry("preset")
PRESETS.register("criteo")(criteo)


def run(
    config: EtlConfig | FittedEtl | str | AnyPath,
    input: Any,  # noqa: A002 - the word on the command line
    output: str | AnyPath,
    **options: Any,
) -> Summary:
    """Fit on the training part and write every part; with a FittedEtl, only apply it.

    Args:
        config: an EtlConfig, the path of a declarative file, the name of a preset, or a fitted ETL.
        input: raw files, folders or patterns: delimited text, gzip or not, or Parquet; or rows in memory, in a form of
            `viviane.core.rows.as_table`, which are written to a temporary file first; messages count them from 1.
        output: folder that gets train/, valid/, ... (the parts of the split), etl.zip, etl.json with the counts, and
            rejects.jsonl if rows were rejected. Without a split: train/ alone; a fitted ETL writes the data set
            into `output` itself.
        options: split: a Split or its text, such as "hash:user:train=0.8,valid=0.1,test=0.1";
            memory_limit: bytes or text ("4GB"), the bound of the whole process;
            threads: default, all cores;
            on_bad_row: "error" stops at a malformed row, "reject" sets it aside and counts it;
            resume: resume an interrupted run of the same job (default);
            overwrite: replace an existing output;
            labels: for a fitted ETL: False where files have no labels, None (default) finds out;
            engine: "duckdb" (default), "spark" or "gpu": the same output byte for byte;
            master, spark: Spark's master, such as "local[4]", and its settings; without them the active session's;
            device: where the GPU engine counts: "cuda" (default), "cuda:1", or "cpu" to try it;
            progress: called with a step, how much is done, of how much.

    Returns:
        The counts of rows in, rejected, filtered and written.

    Raises:
        DataError: a malformed row (file, line, column), a damaged file, a full disk.
        ConfigError: settings that cannot be; the output exists and is of another job.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "raw.csv").write_text("click,item\\n1,pen\\n0,ink\\n1,pen\\n0,cup\\n")
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        ...     labels=[{"name": "click"}], categorical=[{"name": "item"}])
        >>> run(config, folder / "raw.csv", folder / "out", split="rows:train=0.75,valid=0.25").rows
        {'train': 3, 'valid': 1}
    """
    expect("config", config, EtlConfig, FittedEtl, str, Path, RemotePath)
    if not _is_place(input):
        with tempfile.TemporaryDirectory(prefix="viviane-etl-") as folder:
            file = Path(folder) / "rows.parquet"
            pq.write_table(as_table(input), file)
            return run(config, file, output, **options, given_as=f"the given {type(input).__name__}")
    if isinstance(config, (EtlConfig, FittedEtl)):
        return run_job(config, input, location(output), **options)
    if str(config) in PRESETS:
        return run_job(PRESETS[str(config)](), input, location(output), **options)
    if not location(config).exists():
        raise ConfigNotFoundError("neither a preset nor a file", value=str(config), allowed=", ".join(PRESETS))
    return run_job(EtlConfig.from_json_file(config), input, location(output), **options)


def _is_place(value: Any) -> bool:
    """Whether an input is the place of files, or several such, and not rows."""
    places = (str, Path, RemotePath)
    return isinstance(value, places) or (
        isinstance(value, Sequence) and len(value) > 0 and all(isinstance(one, places) for one in value)
    )


def fit(config: EtlConfig, sources: str | AnyPath | Sequence[str | AnyPath], **options: Any) -> FittedEtl:
    """Learn from raw files without writing a data set that is kept; options as for `run`.

    A split's first part, or the one named train, is learned from.
    """
    with tempfile.TemporaryDirectory(prefix="viviane-etl-") as folder:
        run_job(config, sources, Path(folder) / "out", **options)
        return FittedEtl.of(load_learned(Path(folder) / "out" / ETL_FILE))
