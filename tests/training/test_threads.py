"""One thread at a time trains a model: kernels work on its memory without Python's lock."""

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.config import Solver
from viviane.data import Dataset, write_dataset
from viviane.model import Model
from viviane.schema import Schema
from viviane.training import Callback
from viviane.zoo import DeepFM


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
    return write_dataset(tmp_path / "set", schema, [{"y": [0.0, 1.0] * 8, "c": [3, 4] * 8}])


def built(data: Dataset) -> Model:
    model = Model(Solver(batch_size=8, device="cpu", max_steps=2, seed=1), data)
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    return model


class Beside(Callback):
    """Calls a function in another thread after each step, and keeps what it raises."""

    def __init__(self, call: Any) -> None:
        self.call, self.found = call, list[BaseException | None]()

    def on_step_end(self, *_: Any) -> None:
        def run() -> None:
            try:
                self.call()
            except BaseException as error:
                self.found.append(error)
            else:
                self.found.append(None)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def test_a_second_thread_that_trains_is_refused(data: Dataset) -> None:
    """Two that trained at once ended the process."""
    model, alone = built(data), built(data)
    with data.reader(8) as reader:
        batch = next(iter(reader))
    for call in (lambda: model.fit(data, verbose=0), lambda: model.trainer.train_step(batch)):
        other = Beside(call)
        model.fit(data, callbacks=[other], verbose=0)
        alone.fit(data, verbose=0)
        assert len(other.found) == 2
        assert ["another thread trains" in str(one) for one in other.found] == [True, True], other.found
        rows = {"c": np.array([3, 4])}
        assert (model.predict(rows) == alone.predict(rows)).all()
    model.trainer.train_step(batch)  # the lock is free again


def test_a_copy_is_trained_beside(data: Dataset) -> None:
    model = built(data)
    twin = copy.deepcopy(model)
    other = Beside(lambda: twin.fit(data, verbose=0))
    model.fit(data, callbacks=[other], verbose=0)
    assert other.found == [None, None]


def test_threads_that_predict_do_not_disturb_one_another(data: Dataset) -> None:
    """Each put the module into eval mode and back, and swapped the mean of weights in and out, beside the others."""
    model = Model(Solver(batch_size=8, device="cpu", max_steps=4, seed=1, ema_decay=0.5), data)
    model.add(DeepFM(dim=2, deep_mlp=[8], dropout=0.5))
    model.compile()
    model.fit(data, verbose=0)
    model.trainer.module.train()
    rows = {"c": np.array([3, 4, 5, 6])}
    wanted, found = model.predict(rows), list[bool]()

    def ask() -> None:
        found.extend(bool((model.predict(rows) == wanted).all()) for _ in range(25))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [True] * 100
    assert all(part.training for part in model.trainer.module.modules())


def test_a_thread_that_predicts_or_saves_beside_training_is_refused(data: Dataset, tmp_path: Path) -> None:
    """It would put the module that is trained into eval mode."""
    model = built(data)
    for call in (
        lambda: model.predict({"c": np.array([3, 4])}),
        lambda: model.evaluate(data),
        lambda: model.save(tmp_path / "model"),
        lambda: model.trainer.save_checkpoint(tmp_path / "checkpoint"),
    ):
        other = Beside(call)
        model.fit(data, callbacks=[other], verbose=0)
        assert ["viviane.InferenceSession" in str(one) for one in other.found] == [True, True]
    assert not {"model", "checkpoint"} & {one.name for one in tmp_path.iterdir()}


def test_training_waits_for_an_evaluation(data: Dataset) -> None:
    model = built(data)
    begun, ended = threading.Event(), threading.Event()

    def evaluate() -> None:
        with model.trainer.averaged():
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=evaluate)
    thread.start()
    begun.wait(10)
    threading.Timer(0.2, ended.set).start()
    model.fit(data, verbose=0)
    assert ended.is_set()
    thread.join()
