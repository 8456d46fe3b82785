"""`viviane hugectr`: run a script or a JSON file that was written for HugeCTR."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from viviane.core.errors import ConfigError

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the script is the script's own


def command(
    script: Annotated[Path | None, typer.Argument(help="A script that imports hugectr, or a notebook.")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments; options too.")] = None,
    program: Annotated[str | None, typer.Option(help="Of a notebook run this program alone.")] = None,
    train: Annotated[Path | None, typer.Option(help="Train from HugeCTR's JSON: solver, optimizer, layers.")] = None,
) -> None:
    """Run a script or a JSON file that was written for HugeCTR, unchanged."""
    from viviane.compat.hugectr import run_script, train_from_json

    if (script is None) == (train is None):
        raise ConfigError("give a script, or --train config.json", value=None if script is None else str(script))
    if script is not None:
        with _also_sok(script):
            run_script(script, args or [], program)
    elif train is not None:
        train_from_json(train)


def _also_sok(script: Path) -> AbstractContextManager[Any]:
    """Let a script that mentions sparse_operation_kit or Horovod find Viviane's: some train so and serve by HPS."""
    if find_spec("tensorflow") is None or not script.is_file():
        return nullcontext()
    text = script.read_text(encoding="utf-8", errors="replace")
    if "sparse_operation_kit" not in text and "horovod.tensorflow" not in text:
        return nullcontext()
    from viviane.tensorflow.run import installed

    return installed()
