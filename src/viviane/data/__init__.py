"""Data sets on disk, the reader that turns them into batches, and synthetic data with a known best score."""

from viviane.data.conversion import convert
from viviane.data.dataset import Dataset
from viviane.data.reader import Reader
from viviane.data.write import write_dataset

__all__ = ["Dataset", "Reader", "convert", "write_dataset"]
