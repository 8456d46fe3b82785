"""The loop of `fit`: batches, evaluations, checkpoints, and resuming an interrupted run."""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.data import DataPasses, Dataset
from viviane.data.streaming import KafkaStream
from viviane.parallel import num_restarts
from viviane.training.callbacks import Callback, measured_by
from viviane.training.checkpoint.store import CheckpointStore
from viviane.training.environment import Interrupt
from viviane.training.events import open_events
from viviane.training.feed import DeviceFeed
from viviane.training.fit_rows import FitRows
from viviane.training.history import History, higher_is_better, is_better
from viviane.training.look_ahead import LookAhead
from viviane.training.passes import PassFeed, tiered_storages
from viviane.training.profiling.stages import StageTimes
from viviane.training.progress import ProgressLine
from viviane.training.run_folder import RunFolder, hold_folder
from viviane.training.step.fixed_sizes import FixedSizes
from viviane.training.step.step_sync import agree_on_weights
from viviane.training.tier_counts import hits_text, tier_counts
from viviane.training.trackers import Sinks
from viviane.training.trainer_base import TrainerBase

_log = get_logger("training")
_NUM_TIMING_BATCHES = 2


class FitLoop:
    """One call of `fit`.

    The work after a step has this order: row of the training loss, callbacks, evaluation, checkpoint. So a checkpoint
    contains the evaluation of its own step, and a resumed run repeats neither.

    If several processes train, all run the same steps. Only rank 0 writes, and its result decides where callbacks or
    metrics are compared.

    Args:
        trainer: its module is trained.
        callbacks: hooks into `fit`.
        lead_metric: decides which checkpoint is the best.
        train, validation: the data.
        interrupt: requests to stop, such as Ctrl-C.
    """

    def __init__(
        self,
        trainer: TrainerBase,
        callbacks: Sequence[Callback],
        lead_metric: str,
        train: Dataset | DataPasses | KafkaStream,
        validation: Dataset | None,
        interrupt: Interrupt,
    ) -> None:
        self.trainer, self.callbacks, self.lead_metric = trainer, callbacks, lead_metric
        self.group = trainer.group
        self.solver = trainer.solver
        self.validation = validation
        self.interrupt = interrupt
        self.train = train
        self.first_step, self.first_epoch = trainer.step, trainer.epoch
        self.reader = self._new_reader(trainer.epoch, trainer.module)
        self.reader.look_ahead = LookAhead(trainer.module)
        if self._epoch_length() == 0:
            if not isinstance(train, KafkaStream) and len(train) == 0:
                raise DataError("the training set has no rows", where=str(train.path))
            raise ConfigError(
                "the training set has no complete batch", where=str(train.path),
                fix="use a smaller batch_size or drop_last=False",
            )  # fmt: skip
        self.folder = None if trainer.run_folder is None else RunFolder(trainer.run_folder)
        self.store: CheckpointStore | None = None
        self.best: float | None = None
        self.best_histogram: dict[str, Any] | None = None
        self.last_evaluated = self.last_saved = -1
        self.resumed = False
        self.score: float | None = None
        self.rows = FitRows(trainer, self.folder if self.writes else None)
        self.times: StageTimes = trainer.stepper.stages
        self.stopped = ""
        self._check_settings()
        self.sizes = FixedSizes(trainer.stepper, trainer.schema, self.reader)

    def _new_reader(self, epoch: int, module: nn.Module | None = None) -> DeviceFeed | PassFeed:
        """Return a reader of the training rows; it moves the rows of passes of a module that is given."""
        solver = self.solver
        options: dict[str, Any] = {
            "shuffle": solver.shuffle, "seed": solver.seed, "drop_last": solver.drop_last, "epoch": epoch,
            "shuffle_on": solver.shuffle_on,
        }  # fmt: skip
        where = (solver.batch_size, self.trainer.device, self.group)
        if isinstance(self.train, DataPasses):
            return PassFeed.open(self.train, *where, module=module, **options)
        return DeviceFeed.open(self.train, *where, **options)

    def _epoch_length(self) -> int:
        """Return the number of batches per epoch; for a stream, a number larger than any run needs."""
        return sys.maxsize if isinstance(self.train, KafkaStream) else len(self.reader)

    def _check_settings(self) -> None:
        needs = [name for name in ("target", "patience", "restore_best", "eval_every") if getattr(self.solver, name)]
        if self.validation is None and needs:
            raise ConfigError(f"solver.{needs[0]} needs validation data", fix="pass validation= to fit")
        if self.group.size > 1 and self.solver.restore_best and self.folder is None:
            raise ConfigError(
                "restore_best over several processes needs a run folder", fix="pass run_folder=, on a shared disk"
            )
        in_tiers = any(part.has_tiers for one in self.trainer.stepper.collections.values() for part in one.parts())
        if in_tiers and self.solver.async_checkpoint is True:
            fix = 'set "auto" or False: rows in tiers can be read only while no step updates them'
            raise ConfigError("tables in tiers cannot be saved during training", where="async_checkpoint", fix=fix)
        if self.trainer.tensorboard:
            require("tensorboard", extra="tracking", purpose="writing TensorBoard events")
            if self.folder is None:
                raise ConfigError("TensorBoard events need a run folder", fix="pass run_folder=")

    # Running ----------------------------------------------------------------------------------------------

    def run(self, resume: bool) -> History:
        """Train, and return the history."""
        with ExitStack() as held:
            if self.folder is not None:
                self.group.from_first(partial(hold_folder, self.folder, held))
            started, begun = datetime.now().astimezone(), perf_counter()
            self._open(resume, held)
            events = self._open_events()
            shown = self.trainer.progress if self.writes else False
            self.progress = ProgressLine(self._last_step(), self.trainer.step, shown)
            if tiered_storages(self.trainer.module):
                self.progress.read_more = partial(hits_text, self.trainer.module)
            self.rows.events = events
            try:
                for callback in self.callbacks:
                    callback.on_fit_start(self.trainer)
                self._epochs()
                self.sizes.end()
                self._finish()
            finally:
                self.reader.close()
                self.progress.close()
                if self.store is not None:
                    self.store.close()
                if events is not None:
                    events.close()
                if self.folder is not None and self.writes:
                    with suppress(OSError):  # a full disk: the error that ends the run already reports it
                        self.folder.write_stages(self.times.seconds)
                        self.folder.write_tiers(tier_counts(self.trainer.module))
                        self.folder.write_machine(started, perf_counter() - begun, resumed=self.resumed)
        self.trainer.history.run_folder = None if self.folder is None else str(self.folder.path)
        return self.trainer.history

    def _open_events(self) -> Sinks | None:
        if not self.writes:
            return None
        trainer = self.trainer
        events = None
        if self.folder is not None:
            events = open_events(self.folder.tensorboard, trainer.tensorboard, trainer.step)
        for tracker in trainer.trackers:
            tracker.start(str(trainer.config.get("name", trainer.config["module"])), trainer.config, trainer.step)
        sinks = [*([] if events is None else [events]), *trainer.trackers]
        return Sinks(sinks) if sinks else None

    def _open(self, resume: bool, held: ExitStack) -> None:
        """Prepare the run folder, restore a checkpoint, and choose the precision."""
        trainer = self.trainer
        up = higher_is_better(self.lead_metric)
        if self.folder is None:
            if resume:
                raise ConfigError("resume=True needs a run folder", fix="pass run_folder= to the trainer")
            if self.solver.restore_best:
                spare = held.enter_context(tempfile.TemporaryDirectory(prefix="viviane-best-"))
                self.store = CheckpointStore(Path(spare), 1, higher_is_better=up, group=self.group)
        else:
            keep = self.solver.keep_checkpoints
            self.store = CheckpointStore(
                self.folder.checkpoints, keep, higher_is_better=up, group=self.group,
                most_increments=self.solver.incremental_checkpoints,
            )  # fmt: skip
            self.store.mirror = self.trainer.mirror
            resume = resume or num_restarts() > 0  # torchrun restarted the processes
            found = self.group.from_first(partial(self._find_checkpoint, self.folder, self.store, resume))
            if found is not None:
                self._load_checkpoint(Path(found))
                self.store.begin_increments(trainer.module, trainer.step)
            elif resume:
                _log.info("no checkpoint in %s yet: starting at the beginning", self.folder.path)
            self.resumed = found is not None
            # Nothing is written before the checkpoint is loaded: a refused resume changes nothing.
            self.group.from_first(partial(self._start_folder, self.folder, self.store, resumed=found is not None))
        agree_on_weights(trainer.module, self.group)
        if trainer.precision is None:
            with self._new_reader(trainer.epoch) as other:  # a separate reader: the position of the run does not change
                trainer.choose_precision(list(itertools.islice(other, _NUM_TIMING_BATCHES)))

    def _find_checkpoint(self, folder: RunFolder, store: CheckpointStore, resume: bool) -> str | None:
        """Return the checkpoint to resume from; refuse a folder that holds a run if this is not a resume."""
        mirror = self.trainer.mirror
        if mirror is not None:
            mirror.pull(resume=resume)
        if not resume:
            folder.refuse_run()
            return None
        path = store.latest_whole()
        return None if path is None else str(path)

    def _start_folder(self, folder: RunFolder, store: CheckpointStore, *, resumed: bool) -> None:
        """Write the first files of a run, and remove leftovers of killed runs."""
        trainer = self.trainer
        folder.start(trainer.config, trainer.schema, self.train.info, trainer.files)
        store.clean()
        if resumed:
            store.discard_after(trainer.step)
        folder.rewrite_metrics(trainer.history.rows if resumed else [])

    def _load_checkpoint(self, path: Path) -> None:
        trainer = self.trainer
        place = trainer.stepper.load(path)
        values = place.values
        self.reader.restore(values["reader"])
        trainer.restore_progress(place)
        loop = values["loop"]
        self.first_step, self.first_epoch = loop["first_step"], loop["first_epoch"]
        self.best, self.last_evaluated, self.last_saved = loop["best"], loop["last_evaluated"], trainer.step
        self.best_histogram = loop.get("best_histogram")
        self.score = values["score"]
        self.rows.restore(place)
        self.times.seconds.update(loop["stages"])
        states: list[dict[str, Any]] = values["callbacks"]
        if len(states) == len(self.callbacks):
            for callback, state in zip(self.callbacks, states, strict=True):
                callback.restore(state)
        else:
            self._warn("the callbacks differ from those of the resumed run: their state is reset")
        # torchrun restarted the job without a request of the user: log it as a warning.
        tell = self._warn if num_restarts() > 0 else _log.info
        tell("resuming at step %d from %s", trainer.step, path)

    def _last_step(self) -> int:
        """Return the step at which this fit ends, unless something stops it earlier."""
        whole = self.first_step + self.solver.epochs * self._epoch_length()
        return whole if self.solver.max_steps is None else min(whole, self.first_step + self.solver.max_steps)

    def _epochs(self) -> None:
        for callback in self.callbacks:
            if callback.should_stop():
                self.stopped = callback.reason
        self.stopped = self._agreed(self.stopped)
        last_epoch = self.first_epoch + self.solver.epochs
        steps = self._last_step() - self.first_step
        self.reader.read_on(self.first_epoch + -(-steps // self._epoch_length()))
        while not self.stopped and self.reader.epoch < last_epoch:
            if self.trainer.step >= self._last_step() and self.solver.max_steps is not None:
                self.stopped = "max_steps"
                return
            self._epoch()
        self.stopped = self.stopped or "epochs"

    def _agreed(self, stopped: str) -> str:
        """Return rank 0's reason to stop."""
        reason: str = self.group.from_first(lambda: stopped)
        return reason

    @property
    def writes(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.group.rank == 0

    def _warn(self, message: str, *values: object) -> None:
        """Log a warning that all processes share, once."""
        if self.writes:
            _log.warning(message, *values)

    def _epoch(self) -> None:
        """Run to the end of the reader's epoch, or until something stops the run."""
        batches, epoch = iter(self.reader), self.reader.epoch
        while True:
            start = perf_counter()
            batch = next(batches, None)
            self.times.add("data_wait", perf_counter() - start)
            if batch is None and self.reader.epoch == epoch:  # a request to stop ended the stream
                self.stopped = "interrupted"
                return
            if batch is None:
                break
            self._step(batch)
            if self.stopped:
                return
        self.trainer.epoch = epoch + 1
        if self.solver.eval_every is None:
            self._evaluate()
        if self.solver.checkpoint_every is None and not self.stopped:
            self._save()

    def _step(self, batch: Batch) -> None:
        trainer = self.trainer
        sync = trainer.stepper.sync
        if sync is not None:
            sync.stop_requested = self.interrupt.asked or self._save_has_failed()
            self.sizes.follow()
        loss = trainer.train_step(batch)
        step, rows = trainer.step, trainer.stepper.num_rows
        self.rows.add(loss, rows)
        self.progress.step(step, rows, lambda: float(loss))
        self._after_step(step, loss)

    def _save_has_failed(self) -> bool:
        return self.store is not None and self.store.has_failed

    def _after_step(self, step: int, loss: Tensor) -> None:
        sync = self.trainer.stepper.sync
        if self.store is not None and (self._save_has_failed() if sync is None else sync.stop_agreed):
            self.store.finish()  # all processes have agreed to stop, for this reason or another
        if step % self.trainer.log_every == 0:
            self.rows.write_train(self.reader.epoch)
        for callback in self.callbacks:
            callback.on_step_end(step, loss)
        if self.solver.eval_every is not None and step % self.solver.eval_every == 0:
            self._evaluate()
        if self.solver.checkpoint_every is not None and step % self.solver.checkpoint_every == 0:
            self._save()
        if self.interrupt.asked if sync is None else sync.stop_agreed:
            self.stopped = "interrupted"
        elif self.solver.max_steps is not None and step >= self._last_step():
            self.stopped = self.stopped or "max_steps"

    def _finish(self) -> None:
        """Evaluate and save after the last step, restore the best weights, and call the callbacks."""
        if self.stopped == "interrupted":
            further = "" if self.folder is None else "; continue with resume=True"
            self._warn("interrupted at step %d%s", self.trainer.step, further)
        else:
            self.rows.write_train(self.reader.epoch)
            self._evaluate()
        self._save()
        if self.store is not None:
            self.store.finish()
        self.trainer.history.restored_step = None
        if self.solver.restore_best and self.stopped != "interrupted":
            self._restore_best()
        self.trainer.history.stopped = self.stopped
        for callback in self.callbacks:
            callback.on_fit_end(self.trainer.history)
        if self.trainer.mirror is not None and self.writes:
            self.trainer.mirror.push_files()

    # Work after a step ------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        step = self.trainer.step
        if self.validation is None or step in (self.last_evaluated, self.first_step):
            return
        start = perf_counter()
        with self.times.measure("evaluate"):
            evaluation = self.trainer.gather(self.validation, max_batches=self.solver.max_eval_batches)
            values = {**evaluation.compute(), **measured_by(self.callbacks, self.trainer)}
        self.last_evaluated = step
        value = values[self.lead_metric]
        self.score = value if math.isfinite(value) else None
        improved = is_better(self.lead_metric, value, self.best)
        self.best = value if improved else self.best
        self.rows.write("valid", self.reader.epoch, values, evaluation.num_rows / (perf_counter() - start))
        self.progress.evaluated(values)
        histogram = evaluation.histogram(step)
        self.best_histogram = histogram if improved else self.best_histogram
        if self.folder is not None and self.writes:
            self.folder.write_histogram(histogram)
            self.folder.write_stages(self.times.seconds)
        for callback in self.callbacks:
            if callback.on_evaluate_end(step, values) and not self.stopped:
                self.stopped = callback.reason
        self.stopped = self._agreed(self.stopped)
        if improved and self.solver.restore_best:
            self._save(improved=True)
        self.rows.pause(perf_counter() - start)

    def _save(self, *, improved: bool = False) -> None:
        step = self.trainer.step
        if self.store is None or self.last_saved == step or (self.folder is None and not improved):
            return
        start = perf_counter()
        with self.times.measure("checkpoint"):
            place = self.trainer.place()
            place.values["reader"] = self.reader.state()
            place.values["score"] = self.score if self.last_evaluated == step else None
            place.values["callbacks"] = [callback.state() for callback in self.callbacks]
            place.values["loop"] = {
                "first_step": self.first_step,
                "first_epoch": self.first_epoch,
                "best": self.best,
                "best_histogram": self.best_histogram,
                "last_evaluated": self.last_evaluated,
                **self.rows.state(place),
                "stages": dict(self.times.seconds),
            }
            beside = self.solver.async_checkpoint
            self.store.save(self.trainer.module, self.trainer.stepper.optimizer, place, beside=beside)
        self.last_saved = step
        self.rows.pause(perf_counter() - start)

    def _restore_best(self) -> None:
        store = self.store
        found = self.group.from_first(lambda: None if store is None else str(store.best_path() or ""))
        path = Path(found) if found else None
        if path is None:
            raise VivianeError("no evaluation had a defined metric, so there are no best weights to restore")
        place = self.trainer.stepper.load(path)
        self.trainer.take_mean(place)
        self.trainer.history.restored_step = place.step
        if self.folder is not None and self.writes and self.best_histogram is not None:
            self.folder.write_histogram(self.best_histogram)
        _log.info("restored the weights of %s", path.name)
