"""HugeCTR's module `hugectr.tools`: data without a signal, in its formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from viviane.compat.hugectr.argument_types import typed
from viviane.compat.hugectr.arguments import REQUIRED, Arguments, Signature, say
from viviane.compat.hugectr.enums import Check_t, Distribution_t, PowerLaw_t
from viviane.compat.hugectr.processes import group
from viviane.core.errors import expect
from viviane.data.formats.file_list import is_file_list
from viviane.data.synthetic.data_generator import DataGeneratorConfig, generate_like_hugectr

_FORMATS = {"Norm": "norm", "Parquet": "parquet", "Raw": "raw", "RawAsync": "raw-async"}


class DataGeneratorParams(Arguments):
    """Parameters of the generated data."""

    signature: ClassVar[Signature] = Signature(
        "DataGeneratorParams",
        {
            "format": REQUIRED, "label_dim": REQUIRED, "dense_dim": REQUIRED, "num_slot": REQUIRED,
            "i64_input_key": REQUIRED, "source": REQUIRED, "eval_source": REQUIRED, "slot_size_array": REQUIRED,
            "nnz_array": [], "check_type": Check_t.Sum, "dist_type": Distribution_t.PowerLaw,
            "power_law_type": PowerLaw_t.Specific, "alpha": 1.2, "num_files": 128, "eval_num_files": 32,
            "num_samples_per_file": 40960, "num_samples": 5242880, "eval_num_samples": 1310720,
            "float_label_dense": False, "num_threads": 1,
        },
        speed=frozenset({"num_threads"}),
    )  # fmt: skip


class DataGenerator:
    """Writes training and evaluation data.

    Args:
        params: parameters of the data.

    Raises:
        ConfigError: `params` has another type.
    """

    @typed
    def __init__(self, params: DataGeneratorParams) -> None:
        expect("DataGenerator, params", params, DataGeneratorParams)
        self.params = params

    @typed
    def generate(self) -> None:
        """Write the files; existing file lists are kept, as in HugeCTR. Of several processes the first writes.

        The others wait for it if they call this, too: in HugeCTR one process may call it alone.
        """
        values: dict[str, Any] = dict(vars(self.params))
        values.pop("num_threads")
        values["format"] = _FORMATS[values["format"].name]
        for name in ("check_type", "dist_type", "power_law_type"):
            values[name] = values[name].name
        config = DataGeneratorConfig(**values)
        group().make_once(f"{config.source} {config.eval_source}", lambda: self._write(config))

    def _write(self, config: DataGeneratorConfig) -> None:
        source = Path(config.source)
        if config.format == "norm" and source.is_file() and is_file_list(source):
            say(f"File list {source} exists, the data is not generated again")
            return
        generate_like_hugectr(config, overwrite=True)
        say(f"Data of {config.num_slot} slots: {config.source}, {config.eval_source}")
