"""Sessions on a GPU: captured forward passes give what the model gives, in all sizes, from any thread."""

import threading

import numpy as np
import pytest
import torch
from saved_models import ENCODED_ZOO, encoded_rows, encoded_schema

import viviane as vv
from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, KeyRangeError
from viviane.model import Model
from viviane.serving import InferenceSession
from viviane.serving.batches import cut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")

    def path(name: str):
        if not (folder / name).exists():
            schema = encoded_schema(name)
            model = vv.Model(vv.Solver(device="cuda", seed=3, batch_size=256), schema, name=name)
            model.add(ENCODED_ZOO[name])
            model.compile(vv.Adam(lr=0.02))
            labels = {label.name: np.arange(256) % 2 for label in schema.labels}
            for seed in range(5):
                model.trainer.train_step(Batch.from_columns(schema, {**encoded_rows(256, schema, seed), **labels}))
            model.save(folder / name)
        return folder / name

    return path


def stacked(scores) -> np.ndarray:
    return np.stack(list(scores.values()), 1) if isinstance(scores, dict) else scores[:, None]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", ENCODED_ZOO)
def test_every_model_in_every_size(name, precision, saved) -> None:
    model = Model.load(saved(name), device="cuda")
    session = InferenceSession(saved(name), device="cuda", precision=precision, max_batch_size=1024, instances=1)
    eager = InferenceSession(saved(name), device="cuda", precision=precision, cuda_graphs=False, instances=1)
    assert session.execution == "cuda graphs"
    for size in (1, 7, 64, 1024, 1500):
        rows = encoded_rows(size, session.schema, size)
        got, wanted = stacked(session.predict(rows)), model.predict(rows)
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE[precision], err_msg=str(size))
        # At a captured size the kernels are those of an eager pass: the bits are, where no bag is padded.
        if size in (1, 64, 1024) and name in ("dlrm_one_hot", "ncf"):
            np.testing.assert_array_equal(got, stacked(eager.predict(rows)), err_msg=str(size))
    assert np.ptp(got) > 1e-3


def test_batches_on_the_host_page_locked_and_on_the_gpu(saved) -> None:
    session = InferenceSession(saved("dlrm_one_hot"), device="cuda", max_batch_size=65_536)
    schema = session.schema
    batch = Batch.from_columns(schema, encoded_rows(40_000, schema, 1))
    wanted = np.concatenate([session.predict(cut(batch, i, i + 4000)) for i in range(0, 40_000, 4000)])
    for given in (batch, batch.pin_memory(), batch.to("cuda")):
        np.testing.assert_allclose(session.predict(given), wanted, atol=1e-6)
    locked = session.new_batch(5000)
    assert locked.dense.is_pinned()
    locked.dense.copy_(batch.dense[:5000])
    locked.one_hot.copy_(batch.one_hot[:5000])
    np.testing.assert_allclose(session.predict(locked), wanted[:5000], atol=1e-6)


def test_large_batches_on_the_gpu_with_full_bags_are_computed_in_parts(tmp_path) -> None:
    columns = [{"name": "c", "num_ids": 500}, {"name": "m", "num_ids": 500, "kind": "multi_hot", "hotness": 3}]
    schema = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=columns)
    model = vv.Model(vv.Solver(device="cuda", seed=1), schema)
    model.add(vv.zoo.DCNv2(dim=16, deep_mlp=[32]))
    model.compile()
    session = InferenceSession(model.save(tmp_path / "m"), device="cuda", max_batch_size=65_536, instances=1)
    random, size = np.random.default_rng(0), 37_000
    rows = {"x": random.random(size, np.float32), "c": random.integers(0, 500, size),
            "m": list(random.integers(0, 500, (size, 3)))}  # fmt: skip
    batch = Batch.from_columns(schema, rows).to("cuda")
    wanted = np.concatenate([session.predict(cut(batch.to("cpu"), i, i + 2000)) for i in range(0, size, 2000)])
    instance, eager = session._instances._free.get_nowait(), []
    instance._slots[0].run_eagerly = lambda given: eager.append(given.size)
    session._instances._free.put(instance)
    for given, part in ((batch, slice(None)), (cut(batch, 0, 5000), slice(5000))):
        np.testing.assert_allclose(session.predict(given), wanted[part], atol=1e-6)
    assert not eager
    bad = batch.bags["m"].values.clone()
    bad[3 * 20_000 + 1] = 501
    wrong = Batch(batch.layout, batch.labels, batch.dense, batch.one_hot, {"m": Bag(bad, batch.bags["m"].offsets)})
    with pytest.raises(KeyRangeError, match="column 'm', row 20000"):
        session.predict(wrong)
    np.testing.assert_allclose(session.predict(batch), wanted, atol=1e-6)


def test_ids_out_of_range_are_refused_and_do_no_harm(saved) -> None:
    session = InferenceSession(saved("dlrm_one_hot"), device="cuda", max_batch_size=65_536)
    schema = session.schema
    batch = Batch.from_columns(schema, encoded_rows(40_000, schema, 1))
    before = session.predict(batch)
    for row, value in ((3, 10**6), (39_999, -1), (20_000, 2**31 - 1)):
        ids = batch.one_hot.clone()
        ids[row, 1] = value
        bad = Batch(batch.layout, batch.labels, batch.dense, ids)
        for given in (bad, bad.to("cuda")):
            with pytest.raises(KeyRangeError, match=f"row {row}"):
                session.predict(given)
    np.testing.assert_array_equal(session.predict(batch), before)


def test_threads_share_instances(saved) -> None:
    session = InferenceSession(saved("dlrm"), device="cuda", max_batch_size=1024, instances=3)
    requests = [encoded_rows(size, session.schema, size) for size in (1, 7, 33, 300, 1000)]
    wanted = [session.predict(rows) for rows in requests]
    wrong = []

    def hammer(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, len(requests), 100):
            if not np.array_equal(session.predict(requests[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert session.close()


def test_what_cannot_be_captured_says_so(tmp_path) -> None:
    schema = vv.Schema(
        labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": None}, {"name": "d", "num_ids": 9}]
    )
    model = vv.Model(vv.Solver(device="cuda"), schema)
    model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cuda")
    assert "dynamic" in session.execution
    rows = {"c": np.array([5, -7]), "d": np.array([3, 4])}
    np.testing.assert_array_equal(session.predict(rows), model.predict(rows)[:, 0])
    with pytest.raises(ConfigError, match="cannot be captured"):
        InferenceSession(tmp_path / "m", device="cuda", cuda_graphs=True)
