"""Feature engineering: raw logs to a data set and its schema, in bounded memory, resumable."""

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
