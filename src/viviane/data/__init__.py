"""Data sets on disk, the reader that turns them into batches, and synthetic data with a known best score."""

from viviane.data.conversion import convert
from viviane.data.dataset import Dataset
from viviane.data.negative_dataset import NegativeDataset
from viviane.data.negatives import Negatives, NegativeSampler
from viviane.data.reader import Reader
from viviane.data.streaming import KafkaStream
from viviane.data.write import write_dataset

__all__ = [
    "Dataset",
    "KafkaStream",
    "NegativeDataset",
    "NegativeSampler",
    "Negatives",
    "Reader",
    "convert",
    "write_dataset",
]
