"""fit with a cache that moves rows as on a GPU, fed as a GPU is: losses, checkpoints and bits of tables in memory."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "embedding"))
from staged import use_staged
from test_tables_in_tiers import MEMORY, comparable, data, files_of, fit, make_model, tiered  # noqa: F401

from viviane.config import AdaGrad, Adam
from viviane.core.errors import ConfigError
from viviane.data.run import PendingBatch
from viviane.embedding import EmbeddingCollection
from viviane.store import ArrayTier, HostCacheTier
from viviane.training import feed as feeds


class Copies:
    """Stands for the copies to a GPU: the batch on the "device" is another object than that in host memory."""

    def start(self, pending: PendingBatch, place: tuple[int, int]) -> Any:
        run, number, origin = pending
        host = run.batch(number, origin)
        return feeds._Waiting(replace(host, one_hot=host.one_hot.clone()), place)

    def finish(self, waiting: Any) -> None:
        pass


def feed_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    begin = feeds.DeviceFeed.__init__

    def begun(self: Any, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        self._copies = Copies()

    patch.setattr(feeds.DeviceFeed, "__init__", begun)


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    feed_as_on_a_gpu(monkeypatch)
    return use_staged(monkeypatch, longest=0.001)


@pytest.mark.parametrize("optimizer", [Adam(), AdaGrad(row_wise=True)], ids=["adam", "row-wise adagrad"])
def test_losses_and_checkpoints_are_those_of_tables_in_memory(
    data: Path,  # noqa: F811
    tmp_path: Path,
    gpu_like: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Any,
) -> None:
    _, expected = fit(data, tmp_path / "memory", optimizer=optimizer, epochs=1)
    late: list[Any] = []
    resolve = EmbeddingCollection.resolve

    def watched(self: Any, batch: Any, training: bool, *others: Any, ahead: bool = False, **named: Any) -> Any:
        if training and not ahead:
            late.append(batch)
        return resolve(self, batch, training, *others, ahead=ahead, **named)

    monkeypatch.setattr(EmbeddingCollection, "resolve", watched)
    model, history = fit(data, tmp_path / "tiers", optimizer=optimizer, epochs=1, embedding_memory=MEMORY)
    assert tiered(model)
    assert gpu_like
    assert not late, "all batches were announced before their step"
    assert comparable(history) == comparable(expected)
    assert files_of(tmp_path / "tiers") == files_of(tmp_path / "memory")
    assert all(isinstance(one, ArrayTier) for one in tiered(model)[0].tiers.values())
    assert tiered(model)[0].tier_stats()["host"].rows_written > 0


def test_a_checkpoint_resumes_over_files(
    data: Path,  # noqa: F811
    tmp_path: Path,
    gpu_like: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit(data, tmp_path / "straight", epochs=1)
    run = tmp_path / "run"
    fit(data, run, epochs=1, max_steps=21, embedding_memory=MEMORY)
    monkeypatch.setattr("viviane.embedding.construction.host_rows_of_tables", lambda *given: {"user": 40, "item": 30})
    model, _ = fit(data, run, epochs=1, resume=True, embedding_memory=MEMORY)
    assert files_of(run) == files_of(tmp_path / "straight")
    assert all(isinstance(one, HostCacheTier) for one in tiered(model)[0].tiers.values())
    assert tiered(model)[0].tier_stats()["file"].rows_written > 0


@pytest.mark.slow
def test_killed_inside_a_write_back_and_resumed(data: Path, tmp_path: Path, gpu_like: list[Any]) -> None:  # noqa: F811
    fit(data, tmp_path / "straight", epochs=1)
    run = tmp_path / "run"
    words = [sys.executable, __file__, str(data), str(run)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(words, env=environment, timeout=240, check=False)
    assert process.returncode == -signal.SIGKILL
    assert [*run.glob("checkpoints/step-*")], "the run was killed before its first checkpoint"
    fit(data, run, epochs=1, resume=True, embedding_memory=MEMORY)
    assert files_of(run) == files_of(tmp_path / "straight")


def test_host_memory_of_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"(?s)embedding_host_memory is of rows beside a GPU.*leave it out"):
        make_model(embedding_memory=MEMORY, embedding_host_memory="1 GiB")
    with pytest.raises(ConfigError, match="not a memory size"):
        make_model(embedding_host_memory="much")


def _killed_in_a_write_back() -> None:
    """Train, and end the process without warning when half of the rows of a write-back are in their tier."""
    patch, put, count = pytest.MonkeyPatch(), ArrayTier.put, 0
    feed_as_on_a_gpu(patch)
    use_staged(patch, longest=0.001)
    run = Path(sys.argv[2])

    def die(self: ArrayTier, keys: Any, rows: Any) -> None:
        nonlocal count
        count += bool([*run.glob("checkpoints/step-*")])
        if count < 20:
            put(self, keys, rows)
            return
        put(self, keys[: len(keys) // 2], rows[: len(keys) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(ArrayTier, "put", die)
    fit(Path(sys.argv[1]), run, epochs=1, embedding_memory=MEMORY)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _killed_in_a_write_back()
