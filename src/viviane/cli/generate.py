"""`viviane generate`: synthetic click data with a known best AUC."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from viviane.cli.work_progress import WorkProgress
from viviane.core.errors import ConfigError
from viviane.core.exchange import tidy

_MOST_COLUMNS = 100_000


def command(
    out: Annotated[Path, typer.Argument(help="Folder (parquet) or text file (criteo; .gz compresses).")],
    rows: Annotated[str, typer.Option(help="Rows: 1000000, 1_000_000 or 1e6.")] = "1e6",
    valid_rows: Annotated[str, typer.Option(help="Validation rows; OUT then holds a train and a valid part.")] = "0",
    layout: Annotated[
        str, typer.Option("--format", help="parquet: a data set to train on; criteo: raw text for the ETL.")
    ] = ("parquet"),
    num_dense: Annotated[int, typer.Option(min=0, max=_MOST_COLUMNS, help="Dense columns.")] = 13,
    num_categorical: Annotated[int, typer.Option(min=0, max=_MOST_COLUMNS, help="One-hot columns.")] = 26,
    cardinalities: Annotated[str | None, typer.Option(help="Distinct values per column: 10,1000,5e6.")] = None,
    max_cardinality: Annotated[str, typer.Option(help="Largest column; the others are spread below.")] = "100_000",
    alpha: Annotated[float, typer.Option(help="Exponent of the power law of key frequencies.")] = 1.1,
    click_rate: Annotated[float, typer.Option(help="Share of positive labels.")] = 0.25,
    signal: Annotated[float, typer.Option(help="Standard deviation of the planted logit; 0 is noise.")] = 1.5,
    missing_dense: Annotated[float, typer.Option(help="Share of missing dense values.")] = 0.05,
    missing_categorical: Annotated[float, typer.Option(help="Share of missing categories.")] = 0.02,
    multi_hot: Annotated[
        int, typer.Option(min=0, max=_MOST_COLUMNS, help="Multi-hot columns M1, M2, ... (parquet).")
    ] = 0,
    hotness: Annotated[int, typer.Option(help="Longest bag of a multi-hot column.")] = 5,
    seed: Annotated[int, typer.Option(help="Chooses the planted model and the rows.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=4096, help="Threads that make rows.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write synthetic click data whose best reachable AUC is known."""
    from viviane.data.synthetic import SyntheticConfig, generate

    sizes = None if cardinalities is None else [whole(size, "cardinalities") for size in cardinalities.split(",")]
    largest = whole(max_cardinality, "max-cardinality")
    settings: dict[str, Any] = {
        "num_dense": num_dense,
        "num_categorical": num_categorical if sizes is None else None,
        "cardinalities": sizes,
        "cardinality_range": [min(4, largest), largest],
        "alpha": alpha,
        "bags": [{"name": f"M{i}", "cardinality": largest, "hotness": [0, hotness]} for i in range(1, multi_hot + 1)],
        "click_rate": click_rate,
        "signal": signal,
        "missing_dense": missing_dense,
        "missing_categorical": missing_categorical,
        "seed": seed,
    }
    if layout not in ("parquet", "criteo"):
        raise ConfigError("unknown format", where="--format", value=layout, allowed="parquet, criteo")
    planned = parts(out, whole(rows, "rows"), whole(valid_rows, "valid-rows"), layout)
    for _, _, path in planned:
        tidy(path)
        if path.exists() and not overwrite:
            raise ConfigError("the output exists", where=str(path), fix="choose another, or pass --overwrite")
    kind: Literal["criteo", "parquet"] = "criteo" if layout == "criteo" else "parquet"
    for part, number, path in planned:
        config = SyntheticConfig.from_dict({**settings, "rows": number}, where="viviane generate")
        with WorkProgress(begins=False) as work:
            done = generate(config, path, kind, part=part, num_threads=threads, overwrite=overwrite,
                            progress=partial(work.show, part))  # fmt: skip
        if not done.rows:
            typer.echo(f"{done.path}: 0 rows, columns alone")
            continue
        typer.echo(
            f"{done.path}: {done.rows:,} rows in {done.seconds:.1f} s ({done.rows / done.seconds:,.0f} rows/s), "
            f"best reachable AUC {done.best_auc:.4f}, log loss {done.best_log_loss:.4f}, "
            f"click rate {done.click_rate:.4f}"
        )


def parts(out: Path, rows: int, valid_rows: int, layout: str) -> list[tuple[str, int, Path]]:
    """Return (part, rows, path) of what is to be written."""
    if not valid_rows:
        return [("train", rows, out)]
    suffix = ".txt" if layout == "criteo" else ""
    return [("train", rows, out / f"train{suffix}"), ("valid", valid_rows, out / f"valid{suffix}")]


def whole(text: str, option: str) -> int:
    """Read a whole number that may be written as 1e6 or 1_000_000."""
    try:
        number = float(text)
        if number >= 0 and number.is_integer() and number < 2**53:
            return int(number)
    except ValueError:
        pass  # no number at all is refused as one that is not whole
    raise ConfigError("not a whole number", where=f"--{option}", value=text, allowed="1000000, 1_000_000, 1e6")
