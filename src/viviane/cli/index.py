"""`viviane index`: build the index of a model's items, or look at one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from viviane.cli.subcommands import command_group

app = command_group("Index the items of a two-tower, SASRec or HSTU model for nearest-neighbour search.")


@app.command()
def build(
    path: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model with item and user vectors.")],
    data: Annotated[
        Path | None,
        typer.Option(help="A data set; its users measure recall, and its items are indexed where the item's "
                     "vector reads more than the item's id."),
    ] = None,
    kind: Annotated[str, typer.Option(help="exact, or by faiss: flat, ivf, hnsw, sq8.")] = "exact",
    lists: Annotated[int | None, typer.Option(min=1, help="Lists of ivf and sq8.")] = None,
    probes: Annotated[int | None, typer.Option(min=1, help="Lists that are searched.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A folder; else MODEL/index.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: auto, cpu, cuda.")] = "auto",
) -> None:  # fmt: skip
    """Index the vectors of a model's items, next to the model or in --output."""
    from viviane.model import Model
    from viviane.retrieval import IndexSettings, build_index, index_folder, model_version

    settings = IndexSettings.from_dict({"kind": kind, "num_lists": lists, "num_probes": probes})
    model = Model.load(path, device=device)
    items, queries = _from_data(model, data)
    index = build_index(model, settings, items=items, version=model_version(path))
    recall = index.measure_recall(index.vectors[:1000] if queries is None else queries)
    place = output or index_folder(path)
    index.save(place)
    found = ", ".join(f"recall@{k} {value:.3f}" for k, value in recall.items())
    typer.echo(f"{place}: {len(index):,} items x {index.vectors.shape[1]}, {settings.kind}, {found}")


def _from_data(model: Any, data: Path | None) -> tuple[dict[str, Any] | None, Any]:
    """Return the items' columns, where their vectors read several, and some users' vectors."""
    from viviane.cli.rows import open_rows
    from viviane.retrieval.rows import Roles

    if data is None:
        return None, None
    roles = Roles.of(model.schema)
    needed = model.module.columns_of("item_vector") - {roles.item, roles.history}
    named = [name for name in needed if name not in {bag.name for bag in model.schema.bags}]
    with open_rows(data, model, with_labels=False) as rows:
        queries = _first(model.tensor("user_vector", batch) for batch in rows.reader(1000))
        if not named:
            return None, queries
        import numpy as np

        columns: dict[str, list[Any]] = {name: [] for name in [roles.item, *named]}
        for batch in rows.reader(65_536):
            for name, parts in columns.items():
                one_hot = name in batch.layout.one_hot_index
                values = batch.bag(name).values if one_hot else batch.dense_feature(name)
                parts.append(values.numpy())
        return {name: np.concatenate(parts) for name, parts in columns.items()}, queries


def _first(parts: Any) -> Any:
    return next(iter(parts), None)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A saved model that has an index, or the folder of an index.")],
) -> None:
    """Print what an index holds and how much it finds."""
    from viviane.core.errors import CheckpointError
    from viviane.retrieval import ItemIndex, index_folder, model_version
    from viviane.retrieval.index import INDEX_FILE

    if (path / INDEX_FILE).is_file():
        index = ItemIndex.load(path)
    else:
        try:
            folder = index_folder(path)
        except CheckpointError:
            folder = path
        index = ItemIndex.load(folder, model=model_version(path) if folder != path else None)
    lines = {
        "kind": index.settings.kind, "items": len(index), "dim": index.vectors.shape[1], "model": index.model,
        "recall": index.recall,
    }  # fmt: skip
    typer.echo(json.dumps(lines, indent=2))
