"""What the ETL makes of each real data set, as declarative files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

STANDARD = ({"type": "log"}, {"type": "standardize"}, {"type": "fill", "value": 0.0})


def categorical(names: Sequence[str], min_count: int = 1) -> list[Json]:
    return [{"name": name, "encoding": {"type": "categorify", "min_count": min_count}} for name in names]


def cross(*names: str, min_count: int = 1) -> Json:
    encoding = {"type": "categorify", "min_count": min_count}
    return {"name": "_x_".join(names), "source": list(names), "encoding": encoding}


# Criteo ------------------------------------------------------------------------------------------------------

NUMBERS = [f"i{n}" for n in range(1, 14)]
CATEGORIES = [f"c{n}" for n in range(1, 27)]


def criteo_etl(min_count: int, *, text: bool) -> Json:
    """Numbers twice, as log-standardised values and as discretised categories; frequent categories only."""
    numbers = [{"name": name, "type": "int"} for name in NUMBERS]
    kind = "hex" if text else "int"
    return {
        "input": {
            "columns": [{"name": "label", "type": "int"}, *numbers, *({"name": c, "type": kind} for c in CATEGORIES)],
            **({"delimiter": "\t", "header": False} if text else {}),
        },
        "labels": [{"name": "label"}],
        "dense": [{"name": name, "operators": list(STANDARD)} for name in NUMBERS],
        "categorical": [
            *(
                {
                    "name": f"{name}_bucket",
                    "source": name,
                    "operators": [{"type": "log_square"}],
                    "encoding": {"type": "categorify", "min_count": min_count},
                }
                for name in NUMBERS
            ),
            *categorical(CATEGORIES, min_count),
        ],
    }


# MovieLens ---------------------------------------------------------------------------------------------------

PEOPLE = ["user_id", "movie_id", "gender", "age", "occupation", "zip"]


def movielens_etl(*, movie_fields: bool) -> Json:
    """The six fields of the papers; with `movie_fields` the movie's year and genres besides."""
    columns = [{"name": "rating", "type": "int"}, *({"name": name} for name in PEOPLE)]
    features = categorical(PEOPLE)
    if movie_fields:
        columns += [{"name": "year"}, {"name": "genres", "separator": "|"}]
        features += [*categorical(["year"]), {"name": "genres", "kind": "multi_hot"}]
    return {
        "input": {"columns": columns},
        "labels": [{"name": "liked", "source": "rating", "operators": [{"type": "threshold", "at": 4}]}],
        "categorical": features,
    }


# Frappe ------------------------------------------------------------------------------------------------------

CONTEXT = ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"]
APP = ["category", "downloads", "developer", "language", "price", "stars"]


def frappe_etl(*, app_fields: bool) -> Json:
    """The ten fields of the papers; with `app_fields` what the set says about the app besides."""
    names = CONTEXT + (APP if app_fields else [])
    return {
        "input": {"columns": [{"name": "label", "type": "int"}, *({"name": name} for name in names)]},
        "labels": [{"name": "label"}],
        "categorical": categorical(names),
    }


# Adult -------------------------------------------------------------------------------------------------------

TRAITS = [
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "gender", "native_country",
]  # fmt: skip
AMOUNTS = ["age", "educational_num", "capital_gain", "capital_loss", "hours_per_week"]


def adult_etl() -> Json:
    """Numbers as values, as exact categories and in coarse buckets; crosses for the wide part."""
    crosses = [
        ("education", "occupation"), ("marital_status", "occupation"), ("relationship", "occupation"),
        ("marital_status", "education"), ("workclass", "occupation"), ("gender", "marital_status"),
        ("native_country", "education"), ("occupation", "hours_per_week"), ("age", "marital_status"),
        ("age", "occupation"), ("capital_gain", "marital_status"), ("education", "hours_per_week"),
    ]  # fmt: skip
    return {
        "input": {
            "columns": [
                {"name": "income", "type": "int"},
                *({"name": name} for name in TRAITS),
                *({"name": name, "type": "int"} for name in AMOUNTS),
            ]
        },
        "labels": [{"name": "income"}],
        "dense": [{"name": name, "operators": list(STANDARD)} for name in AMOUNTS],
        "categorical": [
            *categorical(TRAITS),
            *(
                {"name": f"{name}_value", "source": name, "encoding": {"type": "categorify", "min_count": 3}}
                for name in AMOUNTS
            ),
            *(
                {"name": f"{name}_bucket", "source": name, "encoding": {"type": "bucketize", "quantiles": 10}}
                for name in ("age", "hours_per_week")
            ),
            *(cross(*pair, min_count=5) for pair in crosses),
        ],
    }
