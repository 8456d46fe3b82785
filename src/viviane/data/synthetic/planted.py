"""The planted model: rows and the true probability of their labels, chunk by chunk.

    logit = bias + signal (w1 linear + w2 pairs + w3 smooth),   each part scaled to mean 0, variance 1

    linear   sum over features of an effect per key
    pairs    sum over pairs of features of the product of two latent vectors (2 numbers per key): what cross
             layers, factorization machines and dot interactions can learn, and a linear model does not
    smooth   sum over dense columns of sin(a x + b)

Effects and vectors are hashes of (column, key), so that no table is needed, whatever the cardinality. They decrease
with the rank of the key, (1 + rank / 100)^-1/2, because effects of rare keys cannot be learned from a finite number of
rows. Bags contribute the (weighted) mean over their ids. Chunk i of a part ("train", "valid") depends only on
(config, part, i).
Shapes: R rows of a chunk, nnz ids of a bag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from viviane.core.seeds import derive_seed
from viviane.data.synthetic.config import SyntheticBag, SyntheticConfig
from viviane.data.synthetic.power_law import power_law_ranks
from viviane.schema import RESERVED

CHUNK_ROWS: Final = 65_536
SHARES: Final = {"linear": 0.5, "pairs": 0.3, "smooth": 0.2}
_HEAD_RANKS: Final = 100.0
_MAX_PAIRS: Final = 8

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BagValues:
    """Ids of a bag column: row r holds ids[offsets[r]:offsets[r + 1]]."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    weights: Floats | None


@dataclass(frozen=True)
class Chunk:
    """Rows and their true probabilities.

    Args:
        labels: 0 or 1, (R,).
        probabilities: probability of label 1, (R,).
        counts: dense columns as integers, each (R,); -1 is missing.
        ids: one-hot columns, each (R,), reserved ids included; 1 is missing.
        bags: by column.
    """

    labels: NDArray[np.int8]
    probabilities: NDArray[np.float64]
    counts: list[NDArray[np.int32]]
    ids: list[NDArray[np.int32]]
    bags: dict[str, BagValues]

    def dense(self, column: int) -> Floats:
        """Return a dense column as models see it: log(1 + count), missing 0."""
        return _log_counts(self.counts[column])


class PlantedModel:
    """Draws chunks of rows.

    Example:
        >>> model = PlantedModel(SyntheticConfig(num_dense=2, num_categorical=4, click_rate=0.25))
        >>> chunk = model.chunk("train", 0, 10_000)
        >>> bool(abs(chunk.labels.mean() - 0.25) < 0.02)  # 4.6 standard deviations
        True
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        names = [f"C{i}" for i in range(1, len(config.sizes) + 1)] + [bag.name for bag in config.bags]
        self._salts = [np.uint64(derive_seed(config.seed, "effects", name)) for name in names]
        random = np.random.Generator(np.random.PCG64(derive_seed(config.seed, "columns")))
        self._scale = random.uniform(0.8, 1.6, config.num_dense)
        self._shift = random.uniform(0.5, 3.0, config.num_dense)
        self._frequency = random.uniform(0.4, 1.2, config.num_dense)
        self._phase = random.uniform(0.0, 2 * np.pi, config.num_dense)
        order = random.permutation(len(names))  # so that pairs combine columns of different cardinality
        self._pairs = [(int(a), int(b)) for a, b in zip(order[0::2], order[1::2], strict=False)][:_MAX_PAIRS]
        self._calibrate()

    def _calibrate(self) -> None:
        """Estimate mean and scale of the parts, and the bias for the click rate, on a sample of rows."""
        parts = self._parts(*self._rows(self._random("calibration", 0), CHUNK_ROWS))
        spread = {name: float(values.std()) for name, values in parts.items()}
        total = sum(SHARES[name] for name in parts if spread[name] > 0)
        self._mean = {name: float(values.mean()) for name, values in parts.items()}
        self._factor = {
            name: self.config.signal * (SHARES[name] / total) ** 0.5 / spread[name] if spread[name] > 0 else 0.0
            for name in parts
        }
        self._bias = 0.0
        logits = self._logits(parts)
        low, high = -100.0, 100.0
        for _ in range(60):
            self._bias = (low + high) / 2
            above = _sigmoid(logits + self._bias).mean() > self.config.click_rate
            low, high = (low, self._bias) if above else (self._bias, high)

    def chunk(self, part: str, number: int, num_rows: int = CHUNK_ROWS) -> Chunk:
        """Return chunk `number` of a part, truncated to num_rows rows."""
        random = self._random(part, number)
        counts, ids, bags = self._rows(random, CHUNK_ROWS)
        probabilities = _sigmoid(self._logits(self._parts(counts, ids, bags)))
        labels = (random.random(CHUNK_ROWS) < probabilities).astype(np.int8)
        if num_rows == CHUNK_ROWS:
            return Chunk(labels, probabilities, counts, ids, bags)
        return Chunk(
            labels[:num_rows],
            probabilities[:num_rows],
            [column[:num_rows] for column in counts],
            [column[:num_rows] for column in ids],
            {name: _cut(bag, num_rows) for name, bag in bags.items()},
        )

    def _random(self, part: str, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(derive_seed(self.config.seed, "rows", part, number)))

    def _rows(self, random: np.random.Generator, rows: int) -> Any:
        config = self.config
        counts = []
        for scale, shift in zip(self._scale, self._shift, strict=True):
            normal = random.standard_normal(rows, dtype=np.float32)
            count = np.exp(np.minimum(normal * np.float32(scale) + np.float32(shift), 20)).astype(np.int32)
            count[_chosen(random, rows, config.missing_dense)] = -1
            counts.append(count)
        ids = []
        for size in config.sizes:
            column = self._ids(random, rows, size)
            column[_chosen(random, rows, config.missing_categorical)] = RESERVED.missing
            ids.append(column)
        return counts, ids, {bag.name: self._bag(random, rows, bag) for bag in config.bags}

    def _ids(self, random: np.random.Generator, rows: int, size: int) -> NDArray[np.int32]:
        ranks = power_law_ranks(random.random(rows), size, self.config.alpha)
        return (ranks + RESERVED.first).astype(np.int32)

    def _bag(self, random: np.random.Generator, rows: int, bag: SyntheticBag) -> BagValues:
        low, high = bag.hotness
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(random.integers(low, high + 1, rows), out=offsets[1:])
        nnz = int(offsets[-1])
        weights = random.random(nnz, dtype=np.float32) + np.float32(0.5) if bag.weighted else None
        return BagValues(self._ids(random, nnz, bag.cardinality), offsets, weights)

    def _parts(
        self, counts: list[NDArray[np.int32]], ids: list[NDArray[np.int32]], bags: dict[str, BagValues]
    ) -> dict[str, Floats]:
        """Return the parts of the logit, each (R,), unscaled."""
        parts: dict[str, Floats] = {}
        if counts:
            parts["smooth"] = np.zeros(len(counts[0]), np.float32)
            for count, frequency, phase in zip(counts, self._frequency, self._phase, strict=True):
                parts["smooth"] += np.sin(_log_counts(count) * np.float32(frequency) + np.float32(phase))
        vectors = [_latent(column, salt) for column, salt in zip(ids, self._salts, strict=False)]
        for bag, salt in zip(bags.values(), self._salts[len(ids) :], strict=True):
            vectors.append(_pool(_latent(bag.ids, salt), bag))
        if vectors:
            parts["linear"] = np.zeros(vectors[0].shape[1], np.float32)
            for vector in vectors:
                parts["linear"] += vector[0]
                parts["linear"] += vector[1]
        if self._pairs:
            parts["pairs"] = np.zeros_like(parts["linear"])
            for a, b in self._pairs:
                parts["pairs"] += vectors[a][2] * vectors[b][2]
                parts["pairs"] += vectors[a][3] * vectors[b][3]
        return parts

    def _logits(self, parts: dict[str, Floats]) -> NDArray[np.float64]:
        total: NDArray[np.float64] = np.full(len(next(iter(parts.values()))), self._bias)
        for name, values in parts.items():
            total += (values - np.float32(self._mean[name])) * np.float32(self._factor[name])
        return total


def _latent(ids: NDArray[np.int32], salt: np.uint64) -> Floats:
    """Return four numbers in [-1, 1) per id, (4, n), hashed from (salt, id) and decreasing with the rank."""
    mixed = ids.astype(np.uint64)
    mixed += salt
    for factor in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93):
        mixed *= np.uint64(factor)
        mixed ^= mixed >> np.uint64(32)
    ranks = np.maximum(ids - np.int32(RESERVED.first), 0)
    fade = np.float32(1 / 32768) / np.sqrt(1 + ranks * np.float32(1 / _HEAD_RANKS))
    pieces = mixed.view(np.uint16).reshape(-1, 4).T.astype(np.float32, order="C")
    pieces -= np.float32(32768)
    pieces *= fade
    return pieces


def _pool(latent: Floats, bag: BagValues) -> Floats:
    """Return the (weighted) mean over each bag's ids, (4, R); 0 for an empty bag."""
    weighted = latent if bag.weights is None else latent * bag.weights
    sums = np.zeros((len(latent), weighted.shape[1] + 1))
    np.cumsum(weighted, axis=1, dtype=np.float64, out=sums[:, 1:])
    lengths = np.maximum(np.diff(bag.offsets), 1)
    return ((sums[:, bag.offsets[1:]] - sums[:, bag.offsets[:-1]]) / lengths).astype(np.float32)


def _log_counts(counts: NDArray[np.int32]) -> Floats:
    return np.log1p(np.maximum(counts, 0).astype(np.float32))


def _chosen(random: np.random.Generator, rows: int, share: float) -> Any:
    # Draw also for a share of 0, so that other columns do not depend on it.
    return random.random(rows, dtype=np.float32) < share


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -500, 500))))


def _cut(bag: BagValues, rows: int) -> BagValues:
    nnz = bag.offsets[rows]
    return BagValues(bag.ids[:nnz], bag.offsets[: rows + 1], None if bag.weights is None else bag.weights[:nnz])
