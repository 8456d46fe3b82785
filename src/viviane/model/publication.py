"""Publishing a model's changed rows while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError, RemoteError, StoreError
from viviane.core.logging import get_logger
from viviane.model.changed_rows import ChangedRows
from viviane.model.nodes import SparseEmbedding
from viviane.store.applier import Published
from viviane.store.outbox import Outbox
from viviane.store.stream import DeltaPublisher
from viviane.training import Callback
from viviane.training.checkpoint.dense_state import NUM_DIGEST_ROWS, dense_tensors, weights_digest
from viviane.training.trainer_base import TrainerBase

if TYPE_CHECKING:
    from viviane.training import History

_log = get_logger("model")


class Publication(Callback):
    """Sends the rows that training has changed to servers, every so many seconds, through an outbox.

    Made by `Model.publish`. `fit` calls it; a loop of your own calls `mark` after each step, and `publish`.
    What is published is in the outbox first, so that it survives a kill of this process. Servers take it if their
    snapshot has the weights that the model has now, or is one that `snapshot` or `Model.save` wrote meanwhile.

    Args:
        model: what is trained.
        address: kafka://host:port/topic.
        outbox: folder for what the broker has not confirmed; of this model alone.
        every_s: seconds between publications.
        dense_every: publications between two that hold the dense weights; 1: each of them.
        settings: librdkafka's own; no credentials.

    Raises:
        RemoteError: no broker answers within 3 seconds, or there is no such topic.
        ConfigError: an optimizer, `ema_decay` or `all_rows` moves rows that no batch touches, or the outbox continues a
            model with other weights.
    """

    reason = "publication"

    def __init__(
        self, model: Any, address: str, *, outbox: str | Path, every_s: float = 1.0, dense_every: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if not every_s > 0 or dense_every < 1:
            value = f"every_s {every_s}, dense_every {dense_every}"
            raise ConfigError("publications come at no such times", value=value, allowed="more than 0; 1 or more")
        self.every_s, self.dense_every = every_s, dense_every
        if model.solver.ema_decay is not None:
            raise ConfigError(
                "the running mean of weights moves rows that no batch touches, so that all of them would have to be "
                "published", where="Solver", value=f"ema_decay={model.solver.ema_decay}", fix="leave ema_decay out",
            )  # fmt: skip
        whole = [node.name for node in model.nodes if isinstance(node, SparseEmbedding) and node.all_rows]
        if whole:
            raise ConfigError(
                "a softmax over all items moves every row in every step, so that all would have to be published",
                where=f"embedding {whole[0]!r}", fix="sample candidates: softmax='sampled'",
            )  # fmt: skip
        self._model = model
        self._changed = ChangedRows(model.module)
        digest = self._digest()
        self._publisher = DeltaPublisher(address, outbox, model.name, base=digest, settings=settings)
        self._continues = digest in (self._outbox.base, self._outbox.weights) or not self._outbox.publication
        if not self._outbox.publication and self._outbox.base != digest:  # of an attempt that published nothing
            self._outbox.begin_with(digest)
        self._began_at = model.trainer.step
        self._is_closed = False
        self._last = time.monotonic()
        self._first_step: int | None = None
        self._step = 0
        self._count = 0
        self._watches: list[Any] = []

    @property
    def _outbox(self) -> Outbox:
        return self._publisher.outbox

    def _digest(self) -> int:
        return weights_digest(dense_tensors(self._model.module), self._changed.first_rows(NUM_DIGEST_ROWS))

    # For loops of your own --------------------------------------------------------------------------------------

    def mark(self, batch: Batch) -> None:
        """Remember the rows of a batch that weights were updated by."""
        self._changed.mark(batch)
        self._first_step = self._first_step or self._step + 1

    def publish(self) -> int:
        """Publish what has changed, and return the number of the publication; it is on this disk then.

        Raises:
            StoreError: the disk is full. RemoteError: the broker has not answered for long, and too much waits. What
                was to be published stays marked as changed.
        """
        from safetensors.torch import save

        if self._is_closed:
            raise ConfigError("the publication is closed", where=str(self._publisher.address),
                              fix="make another one with Model.publish")  # fmt: skip
        self._begin()
        clocks = self._changed.clocks
        changes, removed = self._changed.take(), self._changed.take_removed()
        dense = None
        if self._count % self.dense_every == 0:
            tensors = dense_tensors(self._model.module)
            dense = save({name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()})
        try:
            steps = (self._first_step or 0, self._step)
            number = self._publisher.publish(changes, erased=removed, dense=dense, steps=steps)
        except (StoreError, RemoteError):
            self._changed.give_back(changes, clocks, removed)
            raise
        self._count += 1
        self._first_step, self._last = None, time.monotonic()
        return number

    def _begin(self) -> None:
        """Let servers have this model's weights, where the outbox was left by others."""
        if self._continues:
            return
        if self._changed.num_dynamic:
            raise ConfigError(
                "the outbox continues a model with other weights, and which keys its dynamic tables had is not known",
                where=str(self._outbox.folder),
                fix="resume the run, load its last snapshot, or publish with a new outbox and a new snapshot",
            )  # fmt: skip
        _log.warning("%s was left by a model with other weights: all rows are published", self._outbox.folder)
        self._changed.mark_again(all_rows=True)
        self._continues = True

    def barrier(self, timeout_s: float = 60.0) -> None:
        """Return when the broker has confirmed all that was published; raises RemoteError after `timeout_s`."""
        self._publisher.barrier(timeout_s)

    def snapshot(self, folder: str | Path) -> Any:
        """Save the model with the mark of all that was published: servers begin there, and go on with what comes next.

        Args:
            folder: of the model, such as "models/ctr/2".
        """
        self.publish()
        return self._model.save(folder, published=self.position().to_json())

    def position(self) -> Published:
        """Return what was published so far, which a snapshot of the model contains."""
        return Published(self._outbox.publisher, dict(self._outbox.last))

    def close(self) -> None:
        """Wait for the broker for up to 10 seconds; what it has not confirmed stays in the outbox."""
        if not self._is_closed:
            self._is_closed = True
            if self._first_step is None:
                self._outbox.end_with(self._digest())
            self._publisher.close()
            self._model.end_publication(self)

    # For fit ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: TrainerBase) -> None:
        """Watch which rows steps look up.

        Raises:
            ConfigError: steps are recorded in CUDA graphs, which do not expose their batches.
        """
        if trainer.device.type == "cuda" and trainer.solver.cuda_graph is not False:
            raise ConfigError("a model is published from eager steps", where="Solver", value="cuda_graph",
                              fix="cuda_graph=False")  # fmt: skip
        if not self._count:  # a run that resumes has loaded its checkpoint after this object was made
            self._changed.begin()
            if trainer.step != self._began_at and not self._outbox.publication:
                self._outbox.begin_with(self._digest())
        for collection in self._changed.collections.values():
            self._watches.append(collection.register_forward_pre_hook(self._looked_up))

    def _looked_up(self, module: Any, given: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._changed.mark(given[0], module)

    def on_step_end(self, step: int, loss: Tensor) -> None:
        """Publish when it is time."""
        self._first_step, self._step = self._first_step or step, step
        if time.monotonic() - self._last >= self.every_s:
            self.publish()

    def state(self) -> dict[str, Any]:
        """Publish before a checkpoint: a run that resumes from it has nothing left to publish from before."""
        return {"publication": self.publish()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the run that left the outbox: steps after it come again, with the same rows."""
        del state
        self._continues = True

    def on_fit_end(self, history: History) -> None:
        """Publish the rest, and watch no more; where the best weights were restored, publish those."""
        if history.restored_step is not None:
            self._changed.mark_again()
        self.publish()
        for one in self._watches:
            one.remove()
        self._watches.clear()
