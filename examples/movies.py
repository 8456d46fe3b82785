"""MovieLens: NCF from ids alone; then two stages, a two-tower model that finds candidates and NCF that ranks them.

    python examples/movies.py                             generated ratings in MovieLens' format
    python examples/movies.py --data ml-1m/ratings.dat    MovieLens 1M; ml-100k/u.data of MovieLens 100K works too

A line is: user, movie, rating, seconds since 1970; separated by :: (ratings.dat) or tabs (u.data), without a header.
"""

import argparse
from pathlib import Path

import numpy as np

import movie_ratings
import viviane as vv
import viviane.etl
from viviane.data import NegativeDataset, Negatives
from viviane.metrics.auc import roc_auc

parser = argparse.ArgumentParser(description="MovieLens with NCF, and two stages.")
parser.add_argument("--data", type=Path, help="ratings.dat or u.data")
parser.add_argument("--folder", type=Path, default=Path("movies"), help="where everything is written")
parser.add_argument("--users", type=int, default=400, help="users to generate where there is no data")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
arguments = parser.parse_args()
folder = arguments.folder
folder.mkdir(parents=True, exist_ok=True)
file = arguments.data or movie_ratings.generate(folder / "u.data", arguments.users)

# What a user rated 4 or 5 he liked. The newest tenth is for testing.
KINDS = {"user": "string", "movie": "string", "rating": "int", "time": "int"}
config = viviane.etl.EtlConfig(
    input={
        "columns": [{"name": name, "type": kind} for name, kind in KINDS.items()],
        "delimiter": "::" if file.suffix == ".dat" else "\t",
        "header": False,
    },
    filters=[{"column": "rating", "keep": ">=", "value": 4}],
    labels=[{"name": "liked", "source": "rating", "operators": [{"type": "threshold", "at": 4}]}],
    categorical=[{"name": "user"}, {"name": "movie"}],
)
summary = viviane.etl.run(config, file, folder / "data", split="time:time:train=0.9,test=0.1", overwrite=True)
train, test = vv.Dataset(folder / "data" / "train"), vv.Dataset(folder / "data" / "test")
num_users, num_movies = summary.num_ids["user"], summary.num_ids["movie"]
print(f"rows {summary.rows}, ids {summary.num_ids}")


def fitted(recipe: object, data: NegativeDataset, name: str, lr: float) -> vv.Model:
    """Train a model; negatives are drawn again in every epoch."""
    solver = vv.Solver(batch_size=arguments.batch_size, lr=lr, epochs=arguments.epochs, device=arguments.device)
    model = vv.Model(solver, data, name=name)
    model.add(recipe)
    model.compile(vv.Adam(), metrics=["auc"])
    model.fit(data)
    model.save(folder / name)
    return model


INIT = {"type": "normal", "std": 0.1}
# 1. NCF: for every liked movie four that the user never rated well, drawn by popularity^0.5.
draw = Negatives(item="movie", user="user", num=4, alpha=0.5, column=None)
ncf = fitted(vv.zoo.NCF(user="user", item="movie", dim=16, init=INIT), NegativeDataset(train, draw), "ncf", 3e-3)
held_out = NegativeDataset(test, draw.model_copy(update={"seed": 1, "alpha": 0.0}), seen=[train])
print(f"NCF: AUC {ncf.evaluate(held_out)['auc']:.4f}")

# 2. Two towers: the other movies of the batch and eight sampled ones are the wrong answers.
sampled = NegativeDataset(train, Negatives(item="movie", user="user", num=8, column="others"))
towers = vv.zoo.TwoTower(
    user="user",
    item="movie",
    negatives="others",
    dim=16,
    out_dim=16,
    user_mlp=[32],
    item_mlp=[32],
    temperature=0.2,
    init=INIT,
)
two_tower = fitted(towers, sampled, "two_tower", 1e-2)
everyone, catalogue = np.arange(3, num_users), np.arange(3, num_movies)
u = two_tower.tensor("user_vector", {"user": everyone})  # (users, 16)
v = two_tower.tensor("item_vector", {"movie": catalogue, "others": [[3] * 8] * len(catalogue)})[:, 0]  # (movies, 16)
scores = u @ v.T


def pairs(data: vv.Dataset) -> np.ndarray:
    """User and movie of each row, without those that are unknown."""
    found = [np.stack([b.bag(name).values.numpy() for name in ("user", "movie")], 1) for b in data.reader(65_536)]
    rows = np.concatenate(found)
    return rows[(rows >= 3).all(1)]


known, wanted = pairs(train), pairs(test)
scores[known[:, 0] - 3, known[:, 1] - 3] = -np.inf  # what he liked already is not shown again

# 3. The 50 nearest movies are the candidates; NCF puts them in order.
candidates = catalogue[np.argsort(-scores, axis=1)[:, :50]]  # (users, 50)
columns = {"user": np.repeat(everyone, 50), "movie": candidates.ravel()}
logits = ncf.predict(columns).reshape(candidates.shape)
best = np.take_along_axis(candidates, np.argsort(-logits, axis=1)[:, :10], axis=1)
found = (candidates[wanted[:, 0] - 3] == wanted[:, 1:]).any(1).mean()
shown = (best[wanted[:, 0] - 3] == wanted[:, 1:]).any(1).mean()
print(f"two-tower: {found:.1%} of the liked movies of the test are among 50 candidates of {len(catalogue)}")
print(f"two stages: {shown:.1%} are among the 10 shown; by chance {10 / len(catalogue):.1%}")

# 4. Two-tower as a model of the test rows: is a liked movie nearer than one that was not seen?
batches = list(held_out.reader(4096))
one = {name: np.concatenate([b.bag(name).values.numpy() for b in batches]) for name in ("user", "movie")}
label = np.concatenate([b.label("liked").numpy() for b in batches])
good = (one["user"] >= 3) & (one["movie"] >= 3)
near = (u[one["user"][good] - 3] * v[one["movie"][good] - 3]).sum(1)
print(f"two-tower: AUC {roc_auc(near, label[good]):.4f}")
