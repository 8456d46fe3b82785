"""Feature engineering: raw logs to a data set and its schema, in bounded memory, resumable.

Names are imported when they are first used: applying an ETL needs no part that looks at raw files or draws pictures.
"""

from typing import TYPE_CHECKING

from viviane.core.arrow_memory import keep_freed_memory
from viviane.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from viviane.etl.config import EtlConfig
    from viviane.etl.describe import ColumnStatistics, statistics
    from viviane.etl.drawing import picture
    from viviane.etl.entry import PRESETS, fit, run
    from viviane.etl.fitted import FittedEtl
    from viviane.etl.functions import register_function
    from viviane.etl.infer import Inferred, InferredColumn, infer_config, infer_file
    from viviane.etl.pipeline import Summary
    from viviane.etl.presets import criteo
    from viviane.etl.sequence_config import SequenceConfig
    from viviane.etl.sequence_job import SequenceSummary, sequences
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "viviane.etl.config": ("EtlConfig",),
            "viviane.etl.describe": ("ColumnStatistics", "statistics"),
            "viviane.etl.drawing": ("picture",),
            "viviane.etl.entry": ("PRESETS", "fit", "run"),
            "viviane.etl.fitted": ("FittedEtl",),
            "viviane.etl.functions": ("register_function",),
            "viviane.etl.infer": ("Inferred", "InferredColumn", "infer_config", "infer_file"),
            "viviane.etl.pipeline": ("Summary",),
            "viviane.etl.presets": ("criteo",),
            "viviane.etl.sequence_config": ("SequenceConfig",),
            "viviane.etl.sequence_job": ("SequenceSummary", "sequences"),
        },
    )

keep_freed_memory()

__all__ = [
    "PRESETS",
    "ColumnStatistics",
    "EtlConfig",
    "FittedEtl",
    "Inferred",
    "InferredColumn",
    "SequenceConfig",
    "SequenceSummary",
    "Summary",
    "criteo",
    "fit",
    "infer_config",
    "infer_file",
    "picture",
    "register_function",
    "run",
    "sequences",
    "statistics",
]
