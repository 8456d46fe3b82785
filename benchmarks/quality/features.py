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


def bucket(name: str, quantiles: int) -> Json:
    return {"name": f"{name}_bucket", "source": name, "encoding": {"type": "bucketize", "quantiles": quantiles}}


# Criteo ------------------------------------------------------------------------------------------------------

NUMBERS = [f"i{n}" for n in range(1, 14)]
CATEGORIES = [f"c{n}" for n in range(1, 27)]


def squares(name: str) -> Json:
    """floor(ln(x)^2) as a category: narrow classes for small numbers, wide ones for large."""
    encoding = {"type": "categorify", "min_count": 10}
    return {"name": f"{name}_bucket", "source": name, "operators": [{"type": "log_square"}], "encoding": encoding}


def criteo_etl(*, min_count: int, quantiles: int | None, text: bool) -> Json:
    """Numbers twice: log-standardised, and as a category, by shares of the training data or by `squares`."""
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
            *(bucket(name, quantiles) if quantiles else squares(name) for name in NUMBERS),
            *categorical(CATEGORIES, min_count),
        ],
    }


# MovieLens ---------------------------------------------------------------------------------------------------

PEOPLE = ["user_id", "movie_id", "gender", "age", "occupation", "zip"]


def movielens_etl() -> Json:
    """The six fields of the papers."""
    return {
        "input": {"columns": [{"name": "rating", "type": "int"}, *({"name": name} for name in PEOPLE)]},
        "labels": [{"name": "liked", "source": "rating", "operators": [{"type": "threshold", "at": 4}]}],
        "categorical": categorical(PEOPLE),
    }


# Frappe ------------------------------------------------------------------------------------------------------

CONTEXT = ["user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city"]


def frappe_etl() -> Json:
    """The ten fields of the papers."""
    return {
        "input": {"columns": [{"name": "label", "type": "int"}, *({"name": name} for name in CONTEXT)]},
        "labels": [{"name": "label"}],
        "categorical": categorical(CONTEXT),
    }


# Adult -------------------------------------------------------------------------------------------------------

TRAITS = [
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "gender", "native_country",
]  # fmt: skip
AMOUNTS = ["age", "educational_num", "capital_gain", "capital_loss", "hours_per_week"]


CROSSES = [
    ("education", "relationship"), ("marital_status", "occupation"), ("workclass", "relationship"),
    ("education", "occupation"), ("marital_status", "relationship"), ("age", "relationship"),
]  # fmt: skip


def adult_etl() -> Json:
    """Numbers as values, as exact categories (which matters most) and in percentiles; crosses for the wide part."""
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
            *categorical(TRAITS, 3),
            *({**cross(name, min_count=3), "name": f"{name}_value"} for name in AMOUNTS),
            *(bucket(name, 100) for name in AMOUNTS),
            *(cross(*pair, min_count=3) for pair in CROSSES),
        ],
    }


ADULT_DEEP = [*TRAITS, *(f"{name}_{form}" for form in ("value", "bucket") for name in AMOUNTS)]
ADULT_WIDE = [*ADULT_DEEP, *("_x_".join(pair) for pair in CROSSES)]
