"""`viviane sok`: run a script that was written for the Sparse Operation Kit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the script is the script's own


def command(
    script: Annotated[Path, typer.Argument(help="A script that imports sparse_operation_kit.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments; options too.")] = None,
) -> None:
    """Run a script that was written for NVIDIA's Sparse Operation Kit, unchanged."""
    from viviane.tensorflow.run import run_script

    run_script(script, args or [])
