"""`viviane summary`: what a model is made of, without making its tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from viviane.model import Model


def command(
    source: Annotated[Path, typer.Argument(metavar="CONFIG_OR_MODEL", help="A train config, a saved model, or a run.")],
    plot: Annotated[Path | None, typer.Option(help="Write a drawing of the graph to this SVG file.")] = None,
) -> None:
    """Print layers, shapes, parameters, tables and bytes."""
    from viviane.model import Model

    model = Model.blueprint(source) if source.is_dir() else _from_config(source)
    model.describe().print()
    if plot is not None:
        model.plot(plot)
        typer.echo(f"drawing: {plot}")


def _from_config(file: Path) -> Model:
    from viviane.cli.train_config import read_train_config

    config = read_train_config(file)
    model = config.build(config.data.train_schema())
    model.optimizer, model.embedding_optimizer = config.optimizer, config.embedding_optimizer
    return model
