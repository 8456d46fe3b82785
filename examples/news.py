"""News: which of the articles shown will be read, given what the reader read before? DIN.

    python examples/news.py                                       generated logs in the format of the public set
    python examples/news.py --train MINDsmall_train --test MINDsmall_dev   the public set (MIND), one folder a part

A folder holds behaviors.tsv (impression, user, time, history, articles shown with -1 or -0 behind each) and news.tsv
(article, category, subcategory, title, ...).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import news_logs
import viviane as vv
import viviane.etl

parser = argparse.ArgumentParser(description="News with the reader's history.")
parser.add_argument("--train", type=Path, help="folder with behaviors.tsv and news.tsv")
parser.add_argument("--test", type=Path, help="folder of later days")
parser.add_argument("--folder", type=Path, default=Path("news"), help="where everything is written")
parser.add_argument("--users", type=int, default=2000, help="users to generate where there is no data")
parser.add_argument("--history", type=int, default=20, help="longest history, the newest articles")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
arguments = parser.parse_args()
folder = arguments.folder
folder.mkdir(parents=True, exist_ok=True)

raw = {"train": arguments.train, "test": arguments.test}
if None in raw.values():
    raw = news_logs.generate(folder / "raw", arguments.users)


def articles(part: Path) -> dict[str, tuple[str, str]]:
    """Category and subcategory by article."""
    with (part / "news.tsv").open(encoding="utf-8") as lines:
        cells = (line.split("\t", 3) for line in lines)
        return {one[0]: (one[1], one[2]) for one in cells}


def rows(part: Path, number: int) -> Iterator[dict[str, list[object]]]:
    """One row for each article shown; a piece of the file at a time."""
    known = articles(part)
    names = ("part", "user", "article", "category", "subcategory", "history", "history_category", "click")
    made: dict[str, list[object]] = {name: [] for name in names}
    with (part / "behaviors.tsv").open(encoding="utf-8") as lines:
        for line in lines:
            _, user, _, history, shown = line.rstrip("\n").split("\t")
            past = history.split()[-arguments.history :]
            past_category = [known.get(one, ("", ""))[0] for one in past]
            for one in shown.split():
                article, _, click = one.rpartition("-")
                category, subcategory = known.get(article, (None, None))
                cells = (number, user, article, category, subcategory, past, past_category, int(click))
                for name, cell in zip(names, cells, strict=True):
                    made[name].append(cell)
            if len(made["click"]) > 100_000:
                yield made
                made = {name: [] for name in names}
    yield made


lists, text = pa.list_(pa.string()), pa.string()
schema = pa.schema([
    ("part", pa.int64()), ("user", text), ("article", text), ("category", text), ("subcategory", text),
    ("history", lists), ("history_category", lists), ("click", pa.int64()),
])  # fmt: skip
with pq.ParquetWriter(folder / "shown.parquet", schema) as writer:
    for number, part in enumerate(raw.values()):
        for made in rows(part, number):
            writer.write_table(pa.table(made, schema=schema))

# An article has one vector, in the history and as the target; so has a category.
HISTORY = {"kind": "sequence", "max_length": arguments.history}
STRINGS = [{"name": name} for name in ("user", "article", "category", "subcategory")]
LISTS = [{"name": name, "list": True} for name in ("history", "history_category")]
WHOLE = [{"name": name, "type": "int"} for name in ("part", "click")]
RARE = {"type": "categorify", "min_count": 2}
config = viviane.etl.EtlConfig(
    input={"columns": [*STRINGS, *LISTS, *WHOLE]},
    derived=[
        {"type": "count", "name": "shown", "by": "article"},
        {"type": "target_encode", "name": "read_rate", "by": "article", "target": "click"},
    ],
    labels=[{"name": "click"}],
    dense=[{"name": "shown", "operators": [{"type": "log"}, {"type": "standardize"}]}, {"name": "read_rate"}],
    categorical=[
        {"name": "article", "vocabulary": "article", "encoding": RARE},
        {"name": "history", "vocabulary": "article", "encoding": RARE, **HISTORY},
        {"name": "category", "vocabulary": "category"},
        {"name": "history_category", "vocabulary": "category", **HISTORY},
        {"name": "subcategory"},
    ],
)
summary = viviane.etl.run(config, folder / "shown.parquet", folder / "data", split="time:part:test@1", overwrite=True)
train, test = vv.Dataset(folder / "data" / "train"), vv.Dataset(folder / "data" / "test")
print(f"rows {summary.rows}, ids {summary.num_ids}")

solver = vv.Solver(batch_size=arguments.batch_size, lr=3e-3, epochs=arguments.epochs, device=arguments.device)
model = vv.Model(solver, train, name="din")
model.add(
    vv.zoo.DIN(
        history=["history", "history_category"], target=["article", "category"], dim=16, attention_mlp=[32],
        top_mlp=[64, 32], init={"type": "normal", "std": 0.1},
    )
)  # fmt: skip
model.compile(vv.Adam(), metrics=["auc"])
model.fit(train, validation=test)
model.save(folder / "din")
print(f"DIN: AUC {model.evaluate(test)['auc']:.4f}")
