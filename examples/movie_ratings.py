"""Made-up ratings in MovieLens' format: users and movies have classes, and movies differ in fame."""

from pathlib import Path

import numpy as np

NUM_MOVIES, CLASSES = 300, 6


def generate(file: Path, num_users: int, seed: int = 0) -> Path:
    """Write user, movie, rating and time, separated by tabs, in no order of time."""
    rng = np.random.default_rng(seed)
    fame = 1 / np.arange(1, NUM_MOVIES + 1) ** 0.6
    kind = rng.permutation(NUM_MOVIES) % CLASSES
    lines = []
    for user in range(num_users):
        liking = np.where(kind == user % CLASSES, 6.0, 1.0) * fame
        for movie in rng.choice(NUM_MOVIES, rng.integers(20, 60), replace=False, p=liking / liking.sum()):
            rating = np.clip(round(3.2 + 1.2 * (kind[movie] == user % CLASSES) + rng.normal(0, 0.8)), 1, 5)
            lines.append(f"{user + 1}\t{movie + 1}\t{rating:.0f}\t{rng.integers(874_724_710, 893_286_638)}\n")
    file.write_text("".join(lines))
    return file
