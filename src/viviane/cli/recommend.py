"""`viviane recommend`: items for the users or histories of a file, or items like given ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viviane.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from viviane.model import Model
    from viviane.retrieval import Recommendations, Recommender


def command(
    retrieval: Annotated[Path, typer.Argument(help="A saved recommender, or a model with item and user vectors.")],
    data: Annotated[
        Path | None,
        typer.Argument(metavar="[INPUT]", help="A data set, or raw files for a model with its ETL."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .parquet or .csv file.")] = None,
    ranking: Annotated[Path | None, typer.Option(help="The second model, which orders the candidates.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many items.")] = 10,
    candidates: Annotated[int, typer.Option(min=1, help="How many the first stage hands on.")] = 100,
    similar: Annotated[str | None, typer.Option(help="Item ids, 17,25: print the items nearest to each.")] = None,
    keep_seen: Annotated[bool, typer.Option("--keep-seen", help="Recommend items of the history, too.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> None:  # fmt: skip
    """Recommend items: candidates by nearest neighbours, put in order by a second model."""
    from viviane.cli.tables import check_output

    recommender, model = open_recommender(retrieval, ranking, candidates, device)
    names = _names(model)
    if similar is not None:
        try:
            asked = [int(word) for word in similar.split(",")]
        except ValueError:
            fix = "give ids as the ETL numbers them, which the column `item` of recommendations holds"
            raise ConfigError("item ids are whole numbers", where="--similar", value=similar, fix=fix) from None
        found = recommender.similar(asked, k)
        for item, items, scores in zip(asked, found.items, found.scores, strict=True):
            near = ", ".join(f"{names(one)} {score:.3f}" for one, score in zip(items, scores, strict=True) if one >= 0)
            typer.echo(f"{names(item)}: {near}")
        return
    if data is None or output is None:
        fix = "viviane recommend MODEL INPUT --output FILE, or --similar"
        raise ConfigError("the input or the output is missing", fix=fix)
    check_output(output, overwrite)
    count = _write(recommender, model, data, output, k, remove_seen=not keep_seen, overwrite=overwrite)
    typer.echo(f"{output}: up to {k} items for each of {count:,} rows")


def open_recommender(
    path: Path, ranking: Path | None = None, candidates: int = 100, device: str = "auto"
) -> tuple[Recommender, Model]:
    """Return the recommender, and the model whose columns the input has."""
    from viviane.model import Model
    from viviane.retrieval import ItemIndex, Recommender, VectorSource, index_folder, model_version
    from viviane.retrieval.index import INDEX_FILE
    from viviane.retrieval.saving import RECOMMENDER_FILE

    second = None if ranking is None else Model.load(ranking, device=device)
    if (path / RECOMMENDER_FILE).is_file():
        if second is not None:
            raise ConfigError("a saved recommender has its ranking inside", fix="leave --ranking out")
        recommender = Recommender.load(path, device=device)
        models = [one.model for one in recommender.sources if isinstance(one, VectorSource)]
        if recommender.ranking is not None:
            models.append(recommender.ranking)
        if not models:
            fix = "use viviane.retrieval.Recommender in Python"
            raise ConfigError("the recommender has no model with the input's columns", value=str(path), fix=fix)
        return recommender, models[0]
    model, folder = Model.load(path, device=device), index_folder(path)
    index: Any = "exact"
    if (folder / INDEX_FILE).is_file():
        index = ItemIndex.load(folder, model=model_version(path))
    return Recommender(VectorSource(model, index), second, num_candidates=candidates), model


def _names(model: Model) -> Any:
    """Return a function from an item's id to its value, where the model's ETL has it."""
    values = item_values(model)
    return str if values is None else lambda item: str(values.get(int(item), int(item)))


def item_values(model: Model) -> dict[int, Any] | None:
    """Return the raw value of each item id, or None where the model carries no ETL with a vocabulary of them."""
    from viviane.retrieval.rows import Roles
    from viviane.schema import RESERVED

    if model.etl is None:
        return None
    from viviane.etl import FittedEtl

    table = model.schema.categorical_column(Roles.of(model.schema).item).table
    vocabulary = FittedEtl.load(model.etl).vocabularies.get(table)
    if vocabulary is None:
        return None
    return dict(enumerate(vocabulary.values.to_pylist(), RESERVED.first))


def _write(
    recommender: Recommender, model: Model, data: Path, output: Path, k: int, *, remove_seen: bool, overwrite: bool
) -> int:
    import pyarrow as pa

    from viviane.cli.rows import open_rows
    from viviane.cli.tables import writing
    from viviane.retrieval.rows import Roles

    item = Roles.of(model.schema).item
    count, values = 0, item_values(model)
    fields: list[Any] = [("row", pa.int64()), ("rank", pa.int32()), ("item", pa.int64()), ("score", pa.float32())]
    schema = pa.schema(fields if values is None else [*fields, ("value", pa.string())])
    with (
        open_rows(data, model, with_labels=False, without=(item,)) as rows,
        writing(output, schema, overwrite=overwrite) as write,
    ):
        for batch in rows.reader(4096):
            histories, columns = given_columns(model, batch)
            found = recommender.recommend(histories, k, rows=columns, remove_seen=remove_seen)
            write(_table(found, count, values, schema))
            count += len(histories)
    if not count:
        raise DataError("the input has no rows", where=str(data))
    return count


def given_columns(model: Model, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return the histories of a batch, and its other columns."""
    import numpy as np

    from viviane.retrieval import Histories
    from viviane.retrieval.rows import Roles
    from viviane.schema import RESERVED

    def lists(bag: Any) -> Histories:
        found = Histories(bag.values.numpy().astype(np.int64), bag.offsets.numpy())
        return found.where(found.values != RESERVED.padding)

    roles = Roles.of(model.schema)
    columns: dict[str, Any] = {name: batch.bag(name).values.numpy() for name in batch.layout.one_hot}
    columns |= {name: batch.dense_feature(name).numpy() for name, _ in batch.layout.dense}
    columns |= {name: lists(batch.bags[name]) for name in batch.bags if name != roles.history}
    columns.pop(roles.item, None)
    if roles.history is None:
        empty = np.zeros(batch.size + 1, dtype=np.int64)
        return Histories(np.empty(0, dtype=np.int64), empty), columns
    return lists(batch.bags[roles.history]), columns


def _table(found: Recommendations, first: int, values: dict[int, Any] | None, schema: Any) -> Any:
    """Return a row for each recommended item: the input's row, the rank from 1, the item, the score, its value."""
    import numpy as np
    import pyarrow as pa

    row, place = np.nonzero(found.items >= 0)
    items = found.items[row, place]
    columns: list[Any] = [row + first, (place + 1).astype(np.int32), items, found.scores[row, place]]
    if values is not None:
        columns.append([None if values.get(int(item)) is None else str(values[int(item)]) for item in items])
    return pa.table([pa.array(one, field.type) for one, field in zip(columns, schema, strict=True)], schema=schema)
