"""`CTRClassifier()` as it is, beside LightGBM and logistic regression with their defaults, on equal rows.

    python benchmarks/quality/defaults.py [--sets adult frappe] [--seeds 3]

All three train on the training and validation parts together and are measured on the test part. LightGBM gets text and
ids as categories; logistic regression gets them one-hot, and numbers filled with the median and standardised.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/record.py

import lightgbm
import numpy as np
import pandas as pd
from raw_data import DATA_SETS
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import viviane as vv
from record import record

SETS = ("criteo_kaggle_10k", "adult", "criteo_tb_80k", "frappe", "ml1m")
LABELS = {"adult": "income", "ml1m": "rating"}
# What the publisher documents about integer columns; every program gets it.
IDS = {"criteo_tb_80k": [f"c{n}" for n in range(1, 27)]}
USED = {  # the fields of the papers
    "frappe": ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"],
    "ml1m": ["user_id", "movie_id", "gender", "age", "occupation", "zip"],
}


def frames(name: str, folder: Path) -> tuple[pd.DataFrame, pd.Series, pd.DataFrame, pd.Series]:
    """Return features and labels to train on, and those to test on."""
    place = folder / name
    DATA_SETS[name](place, *([0] if name == "criteo_tb_80k" else []))
    parts = {}
    for part in ("train", "valid", "test"):
        if (place / f"{part}.parquet").exists():
            parts[part] = pd.read_parquet(place / f"{part}.parquet")
        else:
            columns = ["label", *(f"i{n}" for n in range(1, 14)), *(f"c{n}" for n in range(1, 27))]
            texts = {column: str for column in columns if column.startswith("c")}
            parts[part] = pd.read_csv(place / f"{part}.tsv", sep="\t", header=None, names=columns, dtype=texts)
    train = pd.concat([parts["train"], parts["valid"]], ignore_index=True)
    label = LABELS.get(name, "label")

    def divided(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
        y = (frame[label] > 3).astype(int) if name == "ml1m" else frame[label].astype(int)
        return frame[USED.get(name, [one for one in frame if one != label])].reset_index(drop=True), y

    return *divided(train), *divided(parts["test"])


def for_peers(name: str, train: pd.DataFrame, test: pd.DataFrame) -> tuple[list[str], list[str], Any, Any]:
    """Return numbers, categories, and both frames with categories as such."""
    numbers = [c for c in train if pd.api.types.is_numeric_dtype(train[c]) and c not in IDS.get(name, ())]
    texts = [c for c in train if c not in numbers]
    a, b = train.copy(), test.copy()
    for c in texts:
        a[c] = pd.Categorical(a[c].astype("string").astype(object))
        b[c] = pd.Categorical(b[c].astype("string").astype(object), categories=a[c].cat.categories)
    for c in numbers:
        a[c], b[c] = a[c].astype(float), b[c].astype(float)
    return numbers, texts, a, b


def regression(numbers: list[str], texts: list[str]) -> Any:
    """Return scikit-learn's logistic regression behind the usual preparation."""
    steps = []
    if numbers:
        steps.append(("numbers", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numbers))
    if texts:
        steps.append(("texts", OneHotEncoder(handle_unknown="ignore"), texts))
    return make_pipeline(ColumnTransformer(steps), LogisticRegression(max_iter=200))


def measure(name: str, folder: Path, seeds: int, threads: int) -> None:
    train, y, test, truth = frames(name, folder)
    numbers, texts, a, b = for_peers(name, train, test)
    boosted = lightgbm.LGBMClassifier(verbose=-1, n_jobs=threads).fit(a, y).predict_proba(b)[:, 1]
    for frame in (a, b):
        frame[texts] = frame[texts].astype(object).where(frame[texts].notna(), "missing")
    linear = regression(numbers, texts).fit(a, y).predict_proba(b)[:, 1]
    found: list[tuple[float, float, float]] = []
    for seed in range(1, seeds + 1):
        start = time.perf_counter()
        clf = vv.CTRClassifier(random_state=seed, categories=IDS.get(name), device="cpu", verbose=1).fit(train, y)
        seconds = time.perf_counter() - start
        p = clf.predict_proba(test)[:, 1]
        found.append((float(roc_auc_score(truth, p)), float(log_loss(truth, p)), seconds))
    shape = {"rows": len(train), "test": len(test), "seeds": seeds}
    aucs, losses, seconds_of = (sorted(one) for one in zip(*found, strict=True))
    for peer, scores in (("LightGBM", boosted), ("logistic regression", linear)):
        auc, loss = float(roc_auc_score(truth, scores)), float(log_loss(truth, scores))
        record(bench="quality", case=f"{name}, CTRClassifier()", metric=f"test AUC, beside {peer}",
               value=statistics.mean(aucs), unit="", better="higher", goal=auc, peer=f"{peer}, its defaults",
               peer_value=auc, spread=(aucs[0], aucs[-1]), shape=shape)  # fmt: skip
        record(bench="quality", case=f"{name}, CTRClassifier()", metric=f"test log loss, beside {peer}",
               value=statistics.mean(losses), unit="", better="lower", peer=f"{peer}, its defaults",
               peer_value=loss, spread=(losses[0], losses[-1]), shape=shape)  # fmt: skip
    record(bench="quality", case=f"{name}, CTRClassifier()", metric="time of fit", value=statistics.mean(seconds_of),
           unit="s", better="lower", spread=(seconds_of[0], seconds_of[-1]), shape=shape)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="print only")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    np.random.seed(0)
    with tempfile.TemporaryDirectory(prefix="viviane-quality-") as folder:
        for name in options.sets:
            measure(name, Path(folder), options.seeds, options.threads)


if __name__ == "__main__":
    main()
