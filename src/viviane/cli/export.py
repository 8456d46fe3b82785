"""`viviane export`: write a trained model in forms that other runtimes run, each compared with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_FORMS = "torch-export, aoti, onnx or torchscript; give it several times, or separate names by commas."


def command(
    model: Annotated[Path, typer.Argument(help="A saved model, or the run folder that holds one.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; an older export is replaced.")],
    to: Annotated[list[str], typer.Option(help=_FORMS)],
    precision: Annotated[str, typer.Option(help="auto (the model's), fp32, bf16 or fp16.")] = "auto",
    dense_only: Annotated[bool, typer.Option("--dense-only", help="Embedding vectors are inputs.")] = False,
    tables: Annotated[
        str, typer.Option(help="inside the forms, beside them, or in the model's folder: model.")
    ] = "inside",
    table_dtype: Annotated[
        str, typer.Option(help="model: as trained; int8: 8 bits a number, and less memory.")
    ] = "model",
    operators: Annotated[
        str, typer.Option(help="Lookups of torch-export: viviane's operators, or torch's.")
    ] = "viviane",
    cpu: Annotated[str, typer.Option(help="For aoti: native, x86-64-v3 or x86-64-v4.")] = "native",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Export a model; a form that differs from the model is not written."""
    from viviane.export import export, load

    names = [name.strip() for one in to for name in one.split(",")]
    # The library checks the names, for Python as well.
    options: dict[str, Any] = {
        "precision": precision,
        "tables": tables,
        "operators": operators,
        "table_dtype": table_dtype,
    }
    folder = export(model, names, output, dense_only=dense_only, cpu=cpu, device=device, **options)
    read = {"model": model} if tables == "model" else {}
    artifact = load(folder, **read)  # type: ignore[arg-type]
    for name, one in artifact.parity["forms"].items():
        file = artifact.manifest.forms[name].files[0]
        size = sum(artifact.manifest.files[part].bytes for part in artifact.manifest.forms[name].files)
        typer.echo(f"{folder / file}: {size:,} bytes, at most {one['max_difference']:.3g} from the model")
