"""How the slow fuzzers tell their counts."""

from __future__ import annotations

from collections import Counter


def tell(kind: str, found: Counter[str]) -> None:
    """Print the counts that `benchmarks/fuzzing.py` keeps."""
    accepted = found["accepted"] + found["exit 0"]
    print(f"\n{kind}: {found.total()} cases, {accepted} accepted, {found.total() - accepted} refused")
