"""Assemble the command line: each command lives in a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from viviane.cli.console import set_quiet
from viviane.core.errors import ConfigError, suggest
from viviane.core.machine_errors import as_own_error

# command -> module that defines the Typer function `command`, or `app`, a Typer with subcommands
COMMANDS = {
    "generate": "viviane.cli.generate",
    "etl": "viviane.cli.etl",
    "convert": "viviane.cli.convert",
    "check": "viviane.cli.check",
    "keyset": "viviane.cli.keyset",
    "train": "viviane.cli.train",
    "evaluate": "viviane.cli.evaluate",
    "predict": "viviane.cli.predict",
    "export": "viviane.cli.export",
    "serve": "viviane.cli.serve",
    "models": "viviane.cli.models",
    "top": "viviane.cli.top",
    "load-test": "viviane.cli.load_test",
    "store": "viviane.cli.store",
    "index": "viviane.cli.index",
    "recommend": "viviane.cli.recommend",
    "summary": "viviane.cli.summary",
    "plan": "viviane.cli.plan",
    "tune": "viviane.cli.tune",
    "trace": "viviane.cli.trace",
    "bench": "viviane.cli.bench",
    "checkpoint": "viviane.cli.checkpoint",
    "report": "viviane.cli.report",
    "compare": "viviane.cli.compare",
    "schema": "viviane.cli.json_schema",
    "doctor": "viviane.cli.doctor",
    "hugectr": "viviane.cli.hugectr",
    "sok": "viviane.cli.sok",
}


_FAILED = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _LazyGroup(TyperGroup):
    """Imports a command's module only when that command runs or shows its help."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _die_of_the_next_one()
            _say("interrupted")
            sys.exit(_INTERRUPTED)

    def list_commands(self, ctx: object) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # a shell completes a name that is not finished
                return None
            ctx.fail(f"no command {cmd_name!r}; {suggest(cmd_name, COMMANDS)}")
        return find_command(cmd_name)


def find_command(name: str) -> Any:
    """Import a command's module; returns the command as Click sees it, a group where it has subcommands."""
    module = importlib.import_module(COMMANDS[name])
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name  # which --help prints
        return group
    single = typer.Typer(add_completion=False)
    settings = getattr(module, "CONTEXT_SETTINGS", None)
    single.command(name, context_settings=settings)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup, no_args_is_help=True, add_completion=True, context_settings={"help_option_names": ["-h", "--help"]}
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"viviane {version('viviane')}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results, warnings and errors only.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and serve large deep-learning recommenders."""
    if verbose and quiet:
        raise ConfigError("--verbose and --quiet exclude each other", fix="leave one of them out")
    set_quiet(quiet)
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")


def main() -> None:
    """Run the command line and end the process.

    Exit codes: 0 success; 1 a check that found differences; 2 wrong usage, or a VivianeError, whose message is printed
    without a traceback unless VIVIANE_TRACEBACK is set; 130 Ctrl-C; 141 the reader of a pipe has gone. Refusals of the
    machine (memory, disk, permissions, limits) are VivianeErrors, too.
    """
    try:
        app()
    except KeyboardInterrupt:  # before or after the command itself
        _die_of_the_next_one()
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(_BROKEN_PIPE)
    except Exception as error:
        own = as_own_error(error)
        if own is None or os.environ.get("VIVIANE_TRACEBACK"):
            raise
        _say(f"error: {own}")
        sys.exit(_FAILED)


def _die_of_the_next_one() -> None:
    """Let a second Ctrl-C kill the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _say(text: str) -> None:
    with suppress(OSError):  # where stderr cannot be written the exit code has to do
        print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
