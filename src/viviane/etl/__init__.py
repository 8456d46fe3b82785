"""Feature engineering: raw logs to a data set and its schema, in bounded memory, resumable."""

from viviane.etl.config import EtlConfig
from viviane.etl.entry import PRESETS, fit, run
from viviane.etl.fitted import FittedEtl
from viviane.etl.pipeline import Summary
from viviane.etl.presets import criteo

__all__ = ["PRESETS", "EtlConfig", "FittedEtl", "Summary", "criteo", "fit", "run"]
