"""Made-up logs in the format of the news example: readers stay with a few categories, articles differ in appeal."""

from pathlib import Path

import numpy as np

CATEGORIES = ["sports", "news", "finance", "travel", "music", "foodanddrink", "health", "autos"]
NUM_ARTICLES = 400


def generate(folder: Path, num_users: int, seed: int = 0) -> dict[str, Path]:
    """Write a folder for training and one for testing; returns them by name."""
    rng = np.random.default_rng(seed)
    category = rng.integers(0, len(CATEGORIES), NUM_ARTICLES)
    appeal = rng.normal(0, 0.7, NUM_ARTICLES)
    likes = rng.permuted(np.tile(np.arange(len(CATEGORIES)), (num_users, 1)), axis=1)[:, :2]  # two categories each
    news = "".join(
        f"N{i}\t{CATEGORIES[c]}\t{CATEGORIES[c]}{i % 3}\tTitle {i}\tAbstract\thttps://example.org/{i}\t[]\t[]\n"
        for i, c in enumerate(category)
    )
    found: dict[str, Path] = {}
    for part, day, visits in (("train", 11, 3), ("test", 15, 1)):
        lines = []
        for number in range(num_users * visits):
            user = number % num_users
            liked = np.flatnonzero(np.isin(category, likes[user]))
            history = " ".join(f"N{one}" for one in rng.choice(liked, rng.integers(0, 12)))
            shown = rng.choice(NUM_ARTICLES, rng.integers(3, 8), replace=False)
            score = appeal[shown] + 2.2 * np.isin(category[shown], likes[user]) - 1.6
            clicks = rng.random(len(shown)) < 1 / (1 + np.exp(-score))
            cells = " ".join(f"N{one}-{int(click)}" for one, click in zip(shown, clicks, strict=True))
            time = f"11/{day}/2019 {rng.integers(1, 12)}:{rng.integers(10, 60)}:{rng.integers(10, 60)} AM"
            lines.append(f"{number + 1}\tU{user}\t{time}\t{history}\t{cells}\n")
        found[part] = folder / part
        found[part].mkdir(parents=True, exist_ok=True)
        (found[part] / "behaviors.tsv").write_text("".join(lines), encoding="utf-8")
        (found[part] / "news.tsv").write_text(news, encoding="utf-8")
    return found
