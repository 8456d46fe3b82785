"""Forward passes as programs give the bits of the modules, for every model of one-hot columns."""

import threading

import numpy as np
import pytest
import torch
from saved_models import MULTI_TASK, ZOO

import viviane as vv
from viviane.batch import Batch, Layout
from viviane.core.errors import KeyRangeError
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.serving.batches import cut
from viviane.serving.program import prevented

NAMES = [name for name in ZOO if name not in ("din", "bst", "two_tower")]


def schema_of(name: str, **user) -> Schema:
    labels = ("click", "buy") if name in MULTI_TASK else ("click",)
    return Schema(
        labels=[{"name": label} for label in labels],
        dense=[{"name": "price"}, {"name": "vector", "dim": 3}],
        categorical=[{"name": "user", "num_ids": 60, **user}, {"name": "item", "num_ids": 40}],
    )


def batch_of(schema: Schema, size: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed + size)
    wide = any(column.dtype == "int64" for column in schema.one_hot)
    ids = torch.randint(0, 40, (size, len(schema.one_hot)), generator=generator)
    dense = torch.randn(size, schema.num_dense, generator=generator)
    return Batch(Layout.of(schema), torch.zeros(size, 0), dense, ids if wide else ids.to(torch.int32))


def saved(folder, schema: Schema, recipe, **solver):
    model = vv.Model(vv.Solver(device="cpu", **solver), schema)
    model.add(recipe)
    model.compile()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save(folder)
    return model


def stacked(scores) -> np.ndarray:
    return np.stack(list(scores.values()), 1) if isinstance(scores, dict) else scores[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_programs_have_the_bits_of_the_model(name, tmp_path) -> None:
    schema = schema_of(name)
    model = saved(tmp_path / "m", schema, ZOO[name])
    session = InferenceSession(tmp_path / "m", device="cpu")
    # NCF reads no dense columns, and takes them as they are left out of its graph.
    assert session.execution == "program"
    for size in (1, 7, 64, 65, 1024, 3):
        batch = batch_of(schema, size)
        np.testing.assert_array_equal(stacked(session.predict(batch)), model.predict(batch), err_msg=str(size))
    assert np.ptp(model.predict(batch_of(schema, 64))) > 1e-3


@pytest.mark.parametrize(
    "recipe",
    [
        vv.zoo.DLRM(dim=8, bottom_mlp=[16], top_mlp=[16], concat_embeddings=True),
        vv.zoo.DeepFM(dim=4, deep_mlp=[16], batch_norm=True, dropout=0.3),
        vv.zoo.WideDeep(dim=4, deep_mlp=[16], init="normal"),
    ],
)
@pytest.mark.parametrize("user", [{}, {"dtype": "int64"}])
def test_other_settings(recipe, user, tmp_path) -> None:
    schema = schema_of("dlrm", **user)
    model = saved(tmp_path / "m", schema, recipe)
    session = InferenceSession(tmp_path / "m", device="cpu", num_threads=2)
    assert session.execution == "program"
    for size in (1, 100, 129, 500):
        batch = batch_of(schema, size)
        np.testing.assert_array_equal(session.predict(batch), model.predict(batch)[:, 0])
        dense, ids = batch.dense.t().contiguous().t(), batch.one_hot.long().t().contiguous().t()
        strided = Batch(batch.layout, batch.labels, dense, ids)
        np.testing.assert_array_equal(session.predict(strided), model.predict(batch)[:, 0])


def test_cross_layers_with_projections(tmp_path) -> None:
    schema = schema_of("dlrm")
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=8, init="normal"))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("x0", "Concat", bottom=["flat", "dense"]))
    model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=3, projection_dim=5))
    model.add(vv.DenseLayer("logit", "InnerProduct", bottom="cross", num_output=1))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cpu")
    for size in (1, 33, 500):
        batch = batch_of(schema, size)
        np.testing.assert_array_equal(session.predict(batch), model.predict(batch)[:, 0])


@pytest.mark.parametrize("policy", ["raise", "default", "hash", "ignore"])
def test_keys_out_of_range_follow_their_policy(policy, tmp_path) -> None:
    schema = schema_of("dlrm")
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=4, init="normal", out_of_range=policy, dtype="float16"))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("both", "Concat", bottom=["dense", "flat"]))
    model.add(vv.DenseLayer("logit", "MLP", bottom="both", num_outputs=[8, 1], activations=["relu", "none"]))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cpu")
    assert session.execution == "program"
    batch = batch_of(schema, 5)
    good = session.predict(batch)
    batch.one_hot[2, 1] = 40
    if policy == "raise":
        with pytest.raises(KeyRangeError, match="row 2"):
            session.predict(batch)
        batch.one_hot[2, 1] = 3
    np.testing.assert_array_equal(session.predict(batch), model.predict(batch)[:, 0])
    np.testing.assert_array_equal(session.predict(batch)[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


def test_instances_do_not_share_buffers(tmp_path) -> None:
    schema = schema_of("dcn_v2")
    saved(tmp_path / "m", schema, ZOO["dcn_v2"])
    session = InferenceSession(tmp_path / "m", device="cpu", instances=3)
    batches = [batch_of(schema, size) for size in (1, 50, 200, 700)]
    wanted = [session.predict(batch) for batch in batches]
    wrong = []

    def hammer(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, len(batches), 60):
            if not np.array_equal(session.predict(batches[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_cannot_be_a_program_says_why(models) -> None:
    assert "bags" in InferenceSession(models.path("dlrm"), device="cpu").execution
    assert "torch module" in str(prevented(torch.nn.Linear(1, 1), Layout.of(schema_of("dlrm"))))


def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(tmp_path) -> None:
    schema = schema_of("deepfm")
    saved(tmp_path / "m", schema, ZOO["deepfm"])
    one, four = (InferenceSession(tmp_path / "m", device="cpu", num_threads=count) for count in (1, 4))
    batch = batch_of(schema, 700)
    whole = one.predict(batch)
    np.testing.assert_array_equal(four.predict(batch), whole)
    for first, last in ((0, 1), (699, 700), (3, 67), (100, 612)):
        np.testing.assert_array_equal(one.predict(cut(batch, first, last)), whole[first:last])


def test_a_key_out_of_range_in_any_threads_share_is_named(tmp_path) -> None:
    schema = schema_of("dlrm")
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=4, out_of_range="raise"))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("logit", "InnerProduct", bottom="flat", num_output=1))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile()
    model.save(tmp_path / "m")
    session = InferenceSession(tmp_path / "m", device="cpu", num_threads=3)
    assert session.execution == "program"
    batch = batch_of(schema, 300)
    session.predict(batch)
    batch.one_hot[250, 1] = 40
    with pytest.raises(KeyRangeError, match="row 250"):
        session.predict(batch)
