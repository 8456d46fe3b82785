"""From raw logs to recommended items: SASRec and item neighbours find candidates, DIN ranks them.

    python examples/recommend.py                      generated logs
    python examples/recommend.py --data events.csv    a CSV file with the columns user, item and time

The newest event of each user tests, the one before validates; every item of the catalogue is a candidate.
"""

import argparse
from pathlib import Path

import numpy as np

import viviane as vv
import viviane.etl
from viviane.retrieval import (
    CatalogueEvaluation,
    CatalogueMetrics,
    Histories,
    ItemKNN,
    Popularity,
    VectorSource,
    fit_two_stage,
)
from viviane.schema import Schema

parser = argparse.ArgumentParser(description="Recommendations from raw logs.")
parser.add_argument("--data", type=Path, help="a CSV file with the columns user, item and time")
parser.add_argument("--folder", type=Path, default=Path("recommend"), help="where everything is written")
parser.add_argument("--users", type=int, default=800, help="users to generate where there is no data")
parser.add_argument("--items", type=int, default=120, help="items to generate")
parser.add_argument("--epochs", type=int, default=40, help="at most; training stops when validation does not improve")
parser.add_argument("--length", type=int, default=20, help="newest items of a history that the models read")
parser.add_argument("--device", default="cpu", help="cpu or cuda")
arguments = parser.parse_args()
folder, length = arguments.folder, arguments.length
folder.mkdir(parents=True, exist_ok=True)


def generate(file: Path) -> Path:
    """Write logs in which an item is often followed by one of three that go with it."""
    rng = np.random.default_rng(0)
    goes_with = rng.integers(0, arguments.items, (arguments.items, 3))
    popular = rng.zipf(1.3, arguments.items).clip(1, 50).astype(float)
    popular /= popular.sum()
    lines = []
    for user in range(arguments.users):
        item = int(rng.choice(arguments.items, p=popular))
        for step in range(int(rng.integers(4, 16))):
            lines.append((step * 1000 + int(rng.integers(1000)), f"u{user}", f"i{item}"))
            follows = rng.random() < 0.7
            item = int(rng.choice(goes_with[item])) if follows else int(rng.choice(arguments.items, p=popular))
    rows = "".join(f"{user},{item},{time}\n" for time, user, item in sorted(lines))
    file.write_text("user,item,time\n" + rows)
    return file


# 1. Raw logs to ids: the ETL numbers users and items.
raw = arguments.data or generate(folder / "events.csv")
config = viviane.etl.EtlConfig(
    input={"columns": [{"name": "user"}, {"name": "item"}, {"name": "time", "type": "int"}]},
    categorical=[{"name": "user"}, {"name": "item"}, {"name": "time", "encoding": {"type": "raw"}}],
)
summary = viviane.etl.run(config, raw, folder / "events", overwrite=True)
num_items = summary.num_ids["item"]
batches = list(vv.Dataset(folder / "events" / "train").reader(65_536))
columns = {name: np.concatenate([b.bag(name).values.numpy() for b in batches]) for name in ("user", "item", "time")}
users, _ = Histories.of_events(columns["user"], columns["item"], columns["time"])
users = users.take(np.flatnonzero(users.lengths > 3))
print(f"events {len(users.values)}, users {len(users)}, items {num_items - 3}")

# 2. One row a user: the history, padded to one length, and the item that came next.
column = {"num_ids": num_items, "vocabulary": "item"}
history = {"name": "history", "kind": "sequence", "max_length": length, "hotness": length, **column}
schema = Schema(labels=[{"name": "taken"}], categorical=[history, {"name": "item", **column}])


def rows(of: Histories) -> dict:
    """Columns of the rows that predict each user's last item."""
    return {
        "history": list(of.before_last(1).padded(length).values.reshape(-1, length).astype("int32")),
        "item": of.values[of.offsets[1:] - 1].astype("int32"),
        "taken": np.ones(len(of), dtype="float32"),
    }


train = vv.write_dataset(folder / "train", schema, [rows(users.before_last(2))], overwrite=True)
valid = vv.write_dataset(folder / "valid", schema, [rows(users.before_last(1))], overwrite=True)

# 3. The first stage, stopped when NDCG over the whole catalogue stops to grow.
common = {"restore_best": True, "device": arguments.device, "num_threads": 1}
solver = vv.Solver(batch_size=64, lr=0.005, epochs=arguments.epochs, patience=3, **common)
model = vv.Model(solver, schema, name="sasrec")
model.add(vv.zoo.SASRec(dim=32, num_blocks=1, dropout=0.2, embedding_dropout=0.2, init={"type": "normal", "std": 0.05}))
model.compile(vv.Adam(), metrics=["log_loss"])
before, wanted = users.before_last(2), users.before_last(1)
next_item = wanted.values[wanted.offsets[1:] - 1]
run = model.fit(train, valid, callbacks=[CatalogueEvaluation(model, before, next_item)])
print(f"SASRec: validation NDCG@10 {run.best('catalogue/ndcg@10'):.4f}, stopped by {run.stopped}")
model.save(
    folder / "sasrec"
)  # viviane index build recommend/sasrec --kind hnsw; viviane recommend recommend/sasrec ...

# 4. The second stage: DIN over the candidates of all sources. Validation decides whether it is used.
sources = [
    VectorSource(model, name="sasrec"),
    ItemKNN.count(before, num_items),
    Popularity.count(before, num_items),
]
din = vv.zoo.DIN(dim=8, attention_mlp=[16], top_mlp=[32], activation="relu", init={"type": "normal", "std": 0.05})
ranking = vv.Solver(batch_size=256, lr=0.002, epochs=6, patience=2, **common)
made = fit_two_stage(wanted, sources, din, ranking)
print("validation NDCG@10: " + ", ".join(f"{way} {value:.4f}" for way, value in made.validation.items()))
print(f"chosen: {made.chosen}")
made.recommender.save(folder / "recommender")

# 5. Ask a loaded copy, and compare with what the users took in the end.
recommender = vv.Recommender.load(folder / "recommender", device=arguments.device)
asked, taken = users.before_last(1), Histories.of(users.values[users.offsets[1:] - 1][:, None])
found = recommender.recommend(asked, k=10)
metrics = CatalogueMetrics(num_items, [10])
metrics.add_lists(found.items, taken)
print("test: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.compute().items()))

values = viviane.etl.FittedEtl.load(folder / "events" / "train" / "etl.zip").vocabularies["item"].values.to_pylist()
names = dict(enumerate(values, 3))
print("the first user had, at last,", ", ".join(str(names.get(int(i), "?")) for i in asked[0][-10:]))
print("and is shown", ", ".join(str(names.get(int(i), "?")) for i in found.items[0] if i >= 0))
