"""The training loop, evaluation, checkpoints and run folders."""

from viviane.training.callbacks import Callback, StopAtTarget, StopWithoutGain
from viviane.training.checkpoint import load_checkpoint
from viviane.training.checkpoint_store import CheckpointStore
from viviane.training.checkpoint_write import write_checkpoint
from viviane.training.feed import DeviceFeed
from viviane.training.history import History
from viviane.training.manifest import Manifest, read_manifest, verify_checkpoint
from viviane.training.objective import LossTerm
from viviane.training.place import Progress
from viviane.training.run_folder import RunFolder
from viviane.training.trace import record_trace
from viviane.training.trainer import Trainer

__all__ = [
    "Callback",
    "CheckpointStore",
    "DeviceFeed",
    "History",
    "LossTerm",
    "Manifest",
    "Progress",
    "RunFolder",
    "StopAtTarget",
    "StopWithoutGain",
    "Trainer",
    "load_checkpoint",
    "read_manifest",
    "record_trace",
    "verify_checkpoint",
    "write_checkpoint",
]
