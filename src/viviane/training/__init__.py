"""The training loop, evaluation, checkpoints and run folders."""

from viviane.training.callbacks import Callback, EvaluationLines, StopAtTarget, StopWithoutGain
from viviane.training.checkpoint.increments import verify_checkpoint
from viviane.training.checkpoint.load import load_checkpoint
from viviane.training.checkpoint.manifest import Manifest, read_manifest
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.checkpoint.store import CheckpointStore
from viviane.training.checkpoint.write import write_checkpoint
from viviane.training.feed import DeviceFeed
from viviane.training.history import History
from viviane.training.profiling.trace import record_trace
from viviane.training.run_folder import RunFolder
from viviane.training.step.objective import LossTerm
from viviane.training.trackers import MlflowTracker, Tracker, WandbTracker
from viviane.training.trainer import Trainer
from viviane.training.trainer_base import TrainerBase

__all__ = [
    "Callback",
    "CheckpointStore",
    "DeviceFeed",
    "EvaluationLines",
    "History",
    "LossTerm",
    "Manifest",
    "MlflowTracker",
    "Progress",
    "RunFolder",
    "StopAtTarget",
    "StopWithoutGain",
    "Tracker",
    "Trainer",
    "TrainerBase",
    "WandbTracker",
    "load_checkpoint",
    "read_manifest",
    "record_trace",
    "verify_checkpoint",
    "write_checkpoint",
]
