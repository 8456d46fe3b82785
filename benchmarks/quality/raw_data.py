"""The real data sets as raw files train, valid and test, split exactly as the published figures were.

Each function reads one data set from the data folder and writes raw files that the ETL then works on; a digest of the
test rows guards against a split that drifted. Nothing of the data is kept in the repository.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("VIVIANE_DATA", ROOT.parent / "shared" / "data"))

PARTS = ("train", "valid", "test")


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


def check_digest(name: str, test_rows: list[int], expected: str) -> None:
    found = f"{crc(','.join(map(str, sorted(test_rows)))):08x}"
    if found != expected:
        raise SystemExit(f"{name}: the test rows are not the published ones (digest {found}, expected {expected})")


def write_parts(frame: pd.DataFrame, part: list[int] | pd.Series, folder: Path) -> None:
    """Write rows with part 0, 1, 2 as train.parquet, valid.parquet, test.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(PARTS):
        chosen = frame[pd.Series(part, index=frame.index) == number]
        chosen.to_parquet(folder / f"{name}.parquet", index=False)


def criteo_tb(folder: Path, fold: int) -> None:
    """80,000 rows of Criteo's terabyte set; five folds by a hash of the row number."""
    file = DATA / "criteo_tb_80k" / "criteo_tb_80k.parquet"
    frame = pd.read_parquet(file, dtype_backend="pyarrow")  # keeps integers with missing values integers
    place = [crc(str(row)) % 10 for row in range(len(frame))]
    check_digest("criteo_tb_80k", [row for row, h in enumerate(place) if h in (0, 1)], "5d796ecd")
    test, valid = (2 * fold, 2 * fold + 1), (2 * fold + 2) % 10
    write_parts(frame, [2 if h in test else 1 if h == valid else 0 for h in place], folder)


def criteo_kaggle(folder: Path) -> None:
    """The first 10,000 lines of the Kaggle file, in the order of time: 7,000 / 1,000 / 2,000."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(DATA / "criteo_kaggle_10k" / "train_first10k.tsv.gz", "rb") as file:
        lines = file.read().splitlines(keepends=True)
    for name, start, stop in (("train", 0, 7000), ("valid", 7000, 8000), ("test", 8000, 10000)):
        (folder / f"{name}.tsv").write_bytes(b"".join(lines[start:stop]))


def ml1m(folder: Path) -> None:
    """MovieLens 1M by AutoInt's protocol: ratings of 3 left out, label rating > 3, a shuffled 80/10/10 split."""
    ratings = pd.read_parquet(DATA / "ml1m" / "ratings_notime.parquet")
    ratings = ratings[ratings.rating != 3].reset_index(drop=True)
    order = list(range(len(ratings)))
    random.seed(2019)
    random.shuffle(order)
    first, second = int(0.8 * len(order)), int(0.9 * len(order))
    check_digest("ml1m", order[second:], "b43079b3")
    part = pd.Series(0, index=ratings.index)
    part.iloc[order[first:second]] = 1
    part.iloc[order[second:]] = 2
    read = {"sep": "::", "engine": "python", "header": None, "encoding": "latin-1"}
    users = pd.read_csv(DATA / "ml1m" / "users.dat", names=["user_id", "gender", "age", "occupation", "zip"], **read)
    movies = pd.read_csv(DATA / "ml1m" / "movies.dat", names=["movie_id", "title", "genres"], **read)
    movies["year"] = movies.title.str.extract(r"\((\d{4})\)\s*$", expand=False)
    del movies["title"]
    frame = ratings.merge(users, on="user_id", how="left").merge(movies, on="movie_id", how="left")
    for column in ("user_id", "movie_id", "age", "occupation", "zip"):
        frame[column] = frame[column].astype(str)
    write_parts(frame, part, folder)


def frappe(folder: Path) -> None:
    """Frappe as the factorisation-machine papers build it: each log, then two apps that it does not hold."""
    with zipfile.ZipFile(DATA / "frappe" / "Mobile_Frappe.zip") as file:
        logs = pd.read_csv(io.BytesIO(file.read("Mobile_Frappe/frappe/frappe.csv")), sep="\t", dtype=str)
        apps = pd.read_csv(io.BytesIO(file.read("Mobile_Frappe/frappe/meta.csv")), sep="\t", dtype=str)
    columns = ["user", "item", *(name for name in logs.columns if name not in ("user", "item", "cnt"))]
    known = set(logs[columns].itertuples(index=False, name=None))
    rows, labels = [], []
    for i, log in enumerate(logs[columns].itertuples(index=False, name=None)):
        rows.append(log)
        labels.append(1)
        for j in (0, 1):
            t = 0
            while (log[0], str(crc(f"{i}:{j}:{t}") % 4082), *log[2:]) in known:
                t += 1
            rows.append((log[0], str(crc(f"{i}:{j}:{t}") % 4082), *log[2:]))
            labels.append(0)
    order = list(range(len(rows)))
    random.seed(1)
    random.shuffle(order)
    check_digest("frappe", order[202_026 + 57_722 :], "001c1dbc")
    frame = pd.DataFrame(rows, columns=columns)
    frame.insert(0, "label", labels)
    meta = apps[["item", "category", "downloads", "developer", "language", "price", "rating"]]
    frame = frame.merge(meta.rename(columns={"rating": "stars"}), on="item", how="left")
    part = pd.Series(0, index=frame.index)
    part.iloc[order[202_026 : 202_026 + 57_722]] = 1
    part.iloc[order[202_026 + 57_722 :]] = 2
    write_parts(frame, part, folder)


def adult(folder: Path) -> None:
    """Census income, the official split; a tenth of its training part, by a hash of the row number, validates."""
    frame = pd.read_parquet(DATA / "adult" / "adult.parquet.brotli").drop(columns="fnlwgt")
    frame.columns = [name.replace("-", "_") for name in frame.columns]
    frame["income"] = (frame.income.str.strip() == ">50K").astype("int64")
    part = [2 if row <= 16_280 else 1 if crc(str(row)) % 10 == 0 else 0 for row in range(len(frame))]
    write_parts(frame, part, folder)


def adult_tasks(folder: Path) -> None:
    """The same people and parts, with a second label: never married."""
    frame = pd.read_parquet(DATA / "adult" / "adult.parquet.brotli").drop(columns="fnlwgt")
    frame.columns = [name.replace("-", "_") for name in frame.columns]
    frame["income"] = (frame.income.str.strip() == ">50K").astype("int64")
    frame["never_married"] = (frame.marital_status.str.strip() == "Never-married").astype("int64")
    frame = frame.drop(columns=["marital_status", "relationship"])
    part = [2 if row <= 16_280 else 1 if crc(str(row)) % 10 == 0 else 0 for row in range(len(frame))]
    write_parts(frame, part, folder)


def amazon_beauty(folder: Path) -> None:
    """Beauty in DIN's form: each item after the first, and one by chance that the user never had, after his history.

    The last item tests, the one before validates, the others train.
    """
    with gzip.open(DATA / "amazon_seq" / "Beauty.txt.gz", "rt") as file:
        users = {user: items for user, *items in map(str.split, file)}
    num_items = max(int(item) for items in users.values() for item in items)
    rows: list[tuple[int, str, list[str]]] = []
    part: list[int] = []
    for user, items in users.items():
        own, last = set(items), len(items) - 1
        for at in range(1, len(items)):
            # The published negative of the test item; the others draw by their place too.
            seed, t = (user if at == last else f"{user}:{at}"), 0
            while (other := str(crc(f"{seed}:{t}") % num_items + 1)) in own:
                t += 1
            history = items[max(0, at - 10) : at]
            rows += [(1, items[at], history), (0, other, history)]
            part += [2 if at == last else 1 if at == last - 1 else 0] * 2
    write_parts(pd.DataFrame(rows, columns=["label", "item", "history"]), part, folder)


def retailrocket(folder: Path) -> None:
    """Pairs of a visitor and an item viewed: put into the cart, bought; split by a hash of the pair."""
    with zipfile.ZipFile(DATA / "retailrocket_funnel" / "Retailrocket_Ecommerce.zip") as file:
        view, cart, buy = (
            pd.read_csv(io.BytesIO(file.read(f"RetailRocket_Ecommerce/{name}_ecommerce.dat")), sep="\t", dtype=str)
            for name in ("view", "add_to_cart", "purchase")
        )
    keys = [f"{visitor}:{item}" for visitor, item in zip(view.visitorid, view.itemid, strict=True)]
    frame = view[["visitorid", "itemid"]].rename(columns={"visitorid": "visitor", "itemid": "item"})
    for name, events in (("cart", cart), ("purchase", buy)):
        done = set(events.visitorid + ":" + events.itemid)
        frame[name] = [int(key in done) for key in keys]
    frame = frame.astype({"visitor": "int64", "item": "int64"})
    place = [crc(key) % 10 for key in keys]
    if (len(frame), sum(h < 2 for h in place)) != (78_371, 15_611):
        raise SystemExit(f"retailrocket: {len(frame)} pairs, {sum(h < 2 for h in place)} of them for the test")
    write_parts(frame, [2 if h < 2 else 1 if h == 2 else 0 for h in place], folder)


DATA_SETS: dict[str, Callable[..., None]] = {
    "criteo_tb_80k": criteo_tb,
    "criteo_kaggle_10k": criteo_kaggle,
    "ml1m": ml1m,
    "frappe": frappe,
    "adult": adult,
    "adult_tasks": adult_tasks,
    "amazon_beauty": amazon_beauty,
    "retailrocket": retailrocket,
}
