"""The training loop, evaluation, checkpoints and run folders."""

from viviane.training.callbacks import Callback, StopAtTarget, StopWithoutGain
from viviane.training.checkpoint import Progress, load_checkpoint, write_checkpoint
from viviane.training.checkpoint_store import CheckpointStore
from viviane.training.history import History
from viviane.training.manifest import Manifest, read_manifest, verify_checkpoint
from viviane.training.objective import LossTerm
from viviane.training.run_folder import RunFolder
from viviane.training.trainer import Trainer

__all__ = [
    "Callback",
    "CheckpointStore",
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
    "verify_checkpoint",
    "write_checkpoint",
]
