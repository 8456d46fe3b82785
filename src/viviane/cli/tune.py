"""`viviane tune`: settings of a training file chosen by Optuna on its validation rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viviane.core.errors import ConfigError

if TYPE_CHECKING:
    from viviane.cli.search_space import Range
    from viviane.training import History

_BEST = "best.json"
_PAGE = "tune.html"
_JOURNAL = "trials.log"


def command(
    config: Annotated[Path, typer.Argument(help="JSON file of `viviane train`, with validation data.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for trials, page and best.json.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, those of earlier calls included.")] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=VALUES", help="A setting to search: solver.lr=1e-4:1e-2:log, model.dim=8,16,32."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="A setting that stays, as for train.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the sampler; each trial trains with the file's own seed.")
    ] = 0,
) -> None:
    """Search settings. Trials are kept in a journal, so that the same command continues an interrupted search.

    One call at a time searches in a folder.
    """
    from viviane.cli.search_space import default_space, parse_range
    from viviane.cli.train_config import read_train_config
    from viviane.core.file_names import refuse_links
    from viviane.core.locks import locked
    from viviane.core.optional import require

    optuna = require("optuna", extra="tune", purpose="tuning")
    settings = read_train_config(config, changes or [])
    if settings.data.validation is None:
        raise ConfigError("tuning compares trials on validation data", where=str(config), fix="add data.validation")
    space = [parse_range(one) for one in search] if search else default_space(settings.to_dict())
    output.mkdir(parents=True, exist_ok=True)
    refuse_links(output, error=ConfigError)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lead, up = _lead(config, changes or [])
    with locked(output):
        study = _open_study(output / _JOURNAL, up)
        done = sum(one.state.is_finished() for one in study.trials)
        for number in range(done, trials):
            study.sampler = optuna.samplers.TPESampler(seed=_seed_of(seed, number))
            trial = study.ask()
            chosen = {one.path: one.suggest(trial) for one in space}
            _run(study, trial, config, changes or [], chosen, lead)
            shown = "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                              for name, value in chosen.items())  # fmt: skip
            last = study.trials[-1]
            value = "stopped early" if last.value is None or last.state.name == "PRUNED" else f"{lead} {last.value:.5f}"
            typer.echo(f"trial {number + 1} of {trials}: {value}  {shown}")
        _finish(study, space, config, changes or [], output, lead, up)


class _Held:
    """In place of Optuna's lock, which a killed process leaves behind: the lock of the folder is held."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _open_study(journal: Path, up: bool) -> Any:
    """Open the journal of trials, or create it; an entry that a killed process began is removed.

    Raises:
        CheckpointError: the journal is damaged.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    from viviane.core.errors import CheckpointError

    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)  # Optuna's own, of an earlier version
    if journal.exists():
        data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with journal.open("r+b") as file:
                file.truncate(whole)
    lock: Any = _Held()
    backend = JournalFileBackend(str(journal), lock_obj=lock)
    try:
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend), study_name="viviane", load_if_exists=True,
            direction="maximize" if up else "minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        raise CheckpointError("the journal of trials is damaged", where=str(journal), value=str(error)[:200],
                              fix="search in another folder, or remove the file") from error  # fmt: skip


def _seed_of(seed: int, trial: int) -> int:
    """Return the sampler's seed for one trial; a continued search gets the seeds of an uninterrupted one."""
    import numpy as np

    return int(np.random.SeedSequence([seed, trial]).generate_state(1)[0])


def _lead(config: Path, changes: list[str]) -> tuple[str, bool]:
    """Return the metric that trials are compared by, and whether more of it is better."""
    from viviane.cli.train_config import read_train_config
    from viviane.training.history import higher_is_better

    settings = read_train_config(config, changes)
    lead = settings.metrics[0] if settings.metrics else "auc"
    return lead, higher_is_better(lead)


def _run(study: Any, trial: Any, config: Path, changes: list[str], chosen: dict[str, Any], lead: str) -> None:
    """Train one trial and report its best evaluation; one whose numbers diverge has failed."""
    import optuna

    from viviane.core.errors import NumericsError

    try:
        history = _train(
            trial, config, [*changes, *(f"{path}={json.dumps(value)}" for path, value in chosen.items())], lead
        )
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    except NumericsError:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, history.best(lead))


def _train(trial: Any, config: Path, changes: list[str], lead: str) -> History:
    import optuna

    from viviane.cli.train_config import read_train_config
    from viviane.training import Callback

    class Report(Callback):
        """Reports each evaluation to Optuna, and ends a trial that it prunes."""

        def on_evaluate_end(self, step: int, metrics: dict[str, float]) -> None:
            trial.report(metrics[lead], step)
            if trial.should_prune():
                raise optuna.TrialPruned

    settings = read_train_config(config, changes)
    train = settings.data.open_train()
    model = settings.build(train.schema)
    model.compile(settings.optimizer, settings.embedding_optimizer, settings.metrics, statistics=train.info)
    return model.fit(train, settings.data.open_validation(), callbacks=[Report()], verbose=0)


def _finish(
    study: Any, space: list[Range], config: Path, changes: list[str], output: Path, lead: str, up: bool
) -> None:
    """Write the best settings as a training file, and the page; print where they are."""
    from viviane.cli.train_config import read_train_config
    from viviane.cli.tune_page import trial_rows, write_page
    from viviane.core.files import write_json_atomic

    rows = trial_rows(study, space)
    finished = [row for row in rows if row.value is not None and not row.pruned]
    if not finished:
        raise ConfigError("no trial came to its end", value=len(rows), fix="search smaller learning rates")
    best = max(finished, key=lambda row: (row.value or 0.0) * (1 if up else -1))
    words = [f"{path}={json.dumps(value)}" for path, value in best.settings.items()]
    write_json_atomic(output / _BEST, read_train_config(config, [*changes, *words]).to_dict())
    write_page(output / _PAGE, rows, space, lead, up)
    typer.echo(f"best:  {lead} {best.value:.5f}, trial {best.number + 1}: {' '.join(words)}")
    typer.echo(f"train: viviane train {output / _BEST}\npage:  {output / _PAGE}")
