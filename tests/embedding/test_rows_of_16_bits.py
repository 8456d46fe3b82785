"""Tables of float16 and bfloat16 in a collection, a model and a checkpoint."""

import pytest
import torch

from viviane.batch import Batch
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCHEMA = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 50}, {"name": "d", "num_ids": 20}])


def collection(dtype: str, **options) -> EmbeddingCollection:
    tables = [TableConfig(name="t", num_rows=50, dim=8, dtype=dtype), TableConfig(name="u", num_rows=9, dim=8)]
    features = [FeatureConfig(name="f", table="t"), FeatureConfig(name="g", table="u")]
    return EmbeddingCollection(tables, features, Adam(), seed=4, **options)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
def test_output_has_the_type_asked_for(dtype, output) -> None:
    embedding = collection(dtype, output_dtype=output)
    ids = torch.arange(9)
    out = embedding({"f": ids, "g": ids})
    rows = embedding.export_table("t").weight
    assert rows.dtype == TYPES[dtype]
    assert torch.equal(out["f"], rows[:9].to(output))
    assert torch.equal(out["g"], embedding.export_table("u").weight.to(output))
    assert embedding.summary()[0].weight_bytes == 50 * 8 * 2


def train(embedding: EmbeddingCollection, steps: int = 300) -> float:
    target = torch.linspace(-0.5, 0.5, 50).unsqueeze(1)
    ids = torch.arange(50)
    for _ in range(steps):
        loss = (embedding({"f": ids, "g": ids % 9})["f"] - target).square().mean()
        loss.backward()
        embedding.step(lr=1e-4)  # a tenth of what one bit is worth near 0.4 in bfloat16
    return float(loss.detach())


@pytest.mark.parametrize("dtype", TYPES)
def test_steps_smaller_than_a_bit_are_learned_from_and_repeat(dtype) -> None:
    first, second, plain = collection(dtype), collection(dtype), collection("float32")
    losses = [train(first), train(second)]
    # 300 steps of 1e-4 move a row by 0.03; rounding to nearest would leave bfloat16 where it was
    assert losses[0] == pytest.approx(train(plain), rel=0.05)
    assert losses[0] == losses[1]
    assert torch.equal(first.export_table("t").weight, second.export_table("t").weight)


def test_a_model_trains_saves_and_loads(tmp_path) -> None:
    model = Model(Solver(device="cpu", lr=0.05), SCHEMA)
    model.add(Input(label="y", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=4, dtype="bfloat16", tables={"d": {"dtype": "float32"}}))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(DenseLayer("logit", "InnerProduct", bottom="flat", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "y"]))
    model.compile(SGD())
    batch = Batch.from_columns(SCHEMA, {"y": [0, 1, 1], "c": [3, 4, 5], "d": [3, 4, 5]})
    before = model.predict(batch)
    for _ in range(20):
        model.trainer.train_step(batch)
    after = model.predict(batch)
    assert after[1] - after[0] > before[1] - before[0]
    model.save(tmp_path / "m")
    assert (Model.load(tmp_path / "m", device="cpu").predict(batch) == after).all()


def test_a_running_mean_of_16_bits_is_refused() -> None:
    model = Model(Solver(device="cpu", ema_decay=0.9), SCHEMA)
    model.add(Input(label="y", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=4, dtype="float16"))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(DenseLayer("logit", "InnerProduct", bottom="flat", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "y"]))
    model.compile(SGD())
    batch = Batch.from_columns(SCHEMA, {"y": [0, 1], "c": [3, 4], "d": [3, 4]})
    with pytest.raises(ConfigError, match=r"running mean needs float32 rows[\s\S]*remove ema_decay"):
        model.trainer.train_step(batch)
