"""Data like HugeCTR's DataGenerator: the same parameters, files and distributions, and labels without a signal.

For data with a best reachable AUC use `viviane.data.synthetic.generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.core.errors import ConfigError
from viviane.core.files import replace_file
from viviane.core.seeds import derive_seed
from viviane.data.dataset import Dataset
from viviane.data.formats import Format, HugectrParquetFormat, NormFormat, RawAsyncFormat, RawFormat
from viviane.data.formats.file_list import write_file_list
from viviane.data.formats.fixed_records import DATA_FILE
from viviane.data.synthetic.power_law import power_law_ranks
from viviane.data.write import write_dataset
from viviane.schema import Schema

ALPHA: Final = {"Long": 0.9, "Medium": 1.1, "Short": 1.3}
"""Exponents of the named power laws."""
_CHUNK_ROWS: Final = 40_960
_LARGEST_COUNT: Final = 1000


class DataGeneratorConfig(Settings):
    """HugeCTR's DataGeneratorParams.

    Args:
        format: format of the files.
        label_dim, dense_dim, num_slot: columns of each kind.
        i64_input_key: keys of 8 bytes instead of 4.
        source, eval_source: file lists to write (norm, parquet), or files (raw, raw-async). Lists name files
            `train/gen_<i>.data` and `val/gen_<i>.data`, or .parquet, next to the list.
        slot_size_array: number of distinct keys per slot.
        nnz_array: keys per row of each slot; empty: one each. In norm and raw-async exactly this many, in Parquet
            between 1 and this many.
        check_type: "Sum": norm files have checksums; "Non": none.
        dist_type: distribution of the keys.
        power_law_type: "Long" (alpha 0.9), "Medium" (1.1), "Short" (1.3), or "Specific": `alpha`.
        alpha: exponent of the power law.
        num_files, eval_num_files, num_samples_per_file: files and rows of norm and Parquet.
        num_samples, eval_num_samples: rows of raw and raw-async.
        float_label_dense: raw: labels and dense values are float32 instead of int32.
        seed: seed of the rows.

    Float labels and dense values are uniform in (0, 1); integer labels are 0 or 1, and integer dense counts are below
    1000.
    """

    format: Literal["norm", "parquet", "raw", "raw-async"]
    label_dim: int = Field(ge=0)
    dense_dim: int = Field(ge=0)
    num_slot: int = Field(ge=1)
    i64_input_key: bool
    source: str = Field(min_length=1)
    eval_source: str = Field(min_length=1)
    slot_size_array: tuple[int, ...]
    nnz_array: tuple[int, ...] = ()
    check_type: Literal["Sum", "Non"] = "Sum"
    dist_type: Literal["PowerLaw", "Uniform"] = "PowerLaw"
    power_law_type: Literal["Long", "Medium", "Short", "Specific"] = "Specific"
    alpha: float = Field(default=1.2, ge=0, le=10)
    num_files: int = Field(default=128, ge=1)
    eval_num_files: int = Field(default=32, ge=1)
    num_samples_per_file: int = Field(default=40_960, ge=1)
    num_samples: int = Field(default=5_242_880, ge=0)
    eval_num_samples: int = Field(default=1_310_720, ge=0)
    float_label_dense: bool = False
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> DataGeneratorConfig:
        for name in ("slot_size_array", "nnz_array"):
            values = getattr(self, name)
            if (values or name == "slot_size_array") and (len(values) != self.num_slot or min(values) < 1):
                raise ValueError(f"{name} needs {self.num_slot} numbers of at least 1, one per slot: {values}")
        if self.format == "raw" and max(self.hotness) > 1:
            raise ValueError("raw supports one key per slot; use raw-async for more")
        return self

    @property
    def hotness(self) -> tuple[int, ...]:
        """Keys per row of each slot."""
        return self.nnz_array or (1,) * self.num_slot

    @property
    def exponent(self) -> float:
        """The power law's alpha."""
        return ALPHA.get(self.power_law_type, self.alpha)

    @property
    def whole_labels(self) -> bool:
        """Whether labels are the integers 0 and 1; otherwise floats."""
        return self.format == "raw-async" or (self.format == "raw" and not self.float_label_dense)

    @property
    def whole_dense(self) -> bool:
        """Whether dense values are counts k, read as ln(k + 1); otherwise floats."""
        return self.format in ("raw", "raw-async") and not self.float_label_dense

    def to_schema(self) -> Schema:
        """Return the schema of the rows: label, I1, I2, ..., C1, C2, ..."""
        task = "binary" if self.whole_labels else "regression"
        names = ["label"] if self.label_dim == 1 else [f"label{i}" for i in range(1, self.label_dim + 1)]
        slots = zip(self.slot_size_array, self.hotness, strict=True)
        categorical = [
            {
                "name": f"C{i}",
                "num_ids": size,
                "dtype": "int64" if self.i64_input_key else "int32",
                **({} if nnz == 1 else {"kind": "multi_hot", "max_length": nnz}),
            }
            for i, (size, nnz) in enumerate(slots, 1)
        ]
        return Schema.from_dict(
            {
                "labels": [{"name": name, "task": task} for name in names],
                "dense": [{"name": f"I{i}"} for i in range(1, self.dense_dim + 1)],
                "categorical": categorical,
            }
        )

    def to_format(self) -> Format:
        """Return the format of the files."""
        match self.format:
            case "norm":
                checked = self.check_type == "Sum"
                return NormFormat(check_sum=checked, i64_input_key=self.i64_input_key, file_name="gen_{}.data")
            case "parquet":
                return HugectrParquetFormat(i64_input_key=self.i64_input_key, file_name="gen_{}.parquet")
            case "raw":
                return RawFormat(float_label_dense=self.float_label_dense)
            case _:
                return RawAsyncFormat(i64_input_key=self.i64_input_key, is_dense_float=self.float_label_dense)


def generate_like_hugectr(config: DataGeneratorConfig, *, overwrite: bool = False) -> tuple[Dataset, Dataset]:
    """Write training and evaluation data as HugeCTR's DataGenerator does, and open them.

    Args:
        config: the data to write.
        overwrite: replace existing output.

    Raises:
        ConfigError: the output exists.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> train, valid = generate_like_hugectr(DataGeneratorConfig(
        ...     format="norm", label_dim=1, dense_dim=2, num_slot=2, i64_input_key=False, slot_size_array=(10, 99),
        ...     source=f"{folder}/list.txt", eval_source=f"{folder}/eval.txt",
        ...     num_files=3, eval_num_files=1, num_samples_per_file=20))
        >>> len(train), len(valid), (folder / "list.txt").read_text().split()[0]
        (60, 20, '3')
    """
    if config.format in ("norm", "parquet"):
        sizes = (config.num_files, config.eval_num_files)
        planned = [files * config.num_samples_per_file for files in sizes]
    else:
        planned = [config.num_samples, config.eval_num_samples]
    sources = [Path(config.source), Path(config.eval_source)]
    folders = [source.parent / part for source, part in zip(sources, ("train", "val"), strict=True)]
    outputs = [*sources, *(folders if config.format in ("norm", "parquet") else [])]
    for path in outputs:
        if path.exists() and not overwrite:
            raise ConfigError("the output exists", where=str(path), fix="choose another, or pass overwrite=True")
    train, valid = (
        _write(config, source, folder, rows) for source, folder, rows in zip(sources, folders, planned, strict=True)
    )
    return train, valid


def _write(config: DataGeneratorConfig, source: Path, folder: Path, rows: int) -> Dataset:
    schema, kind = config.to_schema(), config.to_format()
    if config.format in ("norm", "parquet"):
        per_file = config.num_samples_per_file
        chunks = _chunks(config, schema, folder.name, rows, per_file)
        data = write_dataset(
            folder, schema, chunks, format=kind, rows_per_group=per_file, rows_per_file=per_file, overwrite=True
        )
        write_file_list(source, [file.absolute() for file in data.files])
        return data
    with replace_file(source) as work:
        rows_folder = work.parent / "rows"
        write_dataset(rows_folder, schema, _chunks(config, schema, folder.name, rows, _CHUNK_ROWS), format=kind)
        (rows_folder / DATA_FILE).rename(work)
    return Dataset(source, schema, kind.model_copy(update={"num_samples": rows}))


def _chunks(
    config: DataGeneratorConfig, schema: Schema, part: str, rows: int, chunk_rows: int
) -> Iterator[dict[str, Any]]:
    for number, start in enumerate(range(0, rows, chunk_rows)):
        random = np.random.Generator(np.random.SFC64(derive_seed(config.seed, "hugectr", part, number)))
        count = min(chunk_rows, rows - start)
        columns: dict[str, Any] = {}
        for label in schema.labels:
            drawn = random.integers(0, 2, count) if config.whole_labels else _open_interval(random, count)
            columns[label.name] = drawn.astype(np.float32)
        for dense in schema.dense:
            counts = random.integers(0, _LARGEST_COUNT, count)
            columns[dense.name] = np.log1p(counts) if config.whole_dense else _open_interval(random, count)
        for column, nnz in zip(schema.categorical, config.hotness, strict=True):
            keys = _keys(config, random, (count, nnz), column.id_range)
            if column.kind == "one_hot":
                columns[column.name] = keys[:, 0]
            elif config.format == "parquet":
                lengths = random.integers(1, nnz + 1, count).tolist()
                columns[column.name] = [row[:length] for row, length in zip(keys.tolist(), lengths, strict=True)]
            else:
                columns[column.name] = keys
        yield columns


def _open_interval(random: np.random.Generator, count: int) -> Any:
    """Draw float32 numbers above 0 and below 1."""
    return (random.integers(1, 1 << 24, count) / (1 << 24)).astype(np.float32)


def _keys(config: DataGeneratorConfig, random: np.random.Generator, shape: tuple[int, int], size: int) -> Any:
    if config.dist_type == "Uniform":
        return random.integers(0, size, shape)
    return power_law_ranks(random.random(shape), size, config.exponent)
