"""Data sets on disk, the reader that turns them into batches, and synthetic data with a known best score."""

from viviane.data.conversion import convert
from viviane.data.dataset import Dataset
from viviane.data.key_sets import collect_key_sets, read_key_sets, write_key_sets
from viviane.data.negative_dataset import NegativeDataset
from viviane.data.negatives import Negatives, NegativeSampler
from viviane.data.passes import DataPass, DataPasses
from viviane.data.reader import Reader
from viviane.data.streaming import KafkaStream
from viviane.data.write import write_dataset

__all__ = [
    "DataPass",
    "DataPasses",
    "Dataset",
    "KafkaStream",
    "NegativeDataset",
    "NegativeSampler",
    "Negatives",
    "Reader",
    "collect_key_sets",
    "convert",
    "read_key_sets",
    "write_dataset",
    "write_key_sets",
]
