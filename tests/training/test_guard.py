"""The NaN guard: names step, batch and column or feature, before a weight has changed."""

import numpy as np
import pytest
import torch
from click_model import SCHEMA, ClickModel, assert_same_bits, columns, make_batch, make_trainer, tensors_of
from torch import nn

from viviane.batch import Bag, Batch
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, KeyRangeError, NumericsError, SchemaError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.keys import KeyOutOfRange
from viviane.schema import Schema
from viviane.training import Trainer

SOLVER = Solver(batch_size=16, lr=0.02, device="cpu")


def refused(trainer, batch, error=NumericsError):
    """Train one good step, then the bad batch; returns the error's text after checking that no bit moved."""
    trainer.train_step(make_batch(16, 1))
    before = tensors_of(trainer)
    with pytest.raises(error) as caught:
        trainer.train_step(batch)
    assert_same_bits(before, tensors_of(trainer))
    assert trainer.step == 1
    assert torch.isfinite(trainer.train_step(make_batch(16, 2)))  # and training continues
    return str(caught.value)


def with_bad(name, row, value):
    values = np.array(columns(16, 3)[name], dtype=np.float32)
    values[row] = value
    return make_batch(16, 3, **{name: values})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("price", np.nan, "dense column 'price', row 5 of the batch: [nan] (1 row(s) in total)"),
        ("place", np.inf, "dense column 'place', row 5 of the batch: [inf, inf]"),
        ("click", np.nan, "label 'click', row 5 of the batch: nan"),
    ],
)
def test_bad_input_is_named(name, value, said):
    text = refused(make_trainer(SOLVER), with_bad(name, 5, value))
    assert "the batch contains NaN or infinite values" in text
    assert said in text
    assert "step 2, batch in memory" in text


def test_bad_sample_and_bag_weights_are_named():
    schema = Schema(
        labels=[{"name": "y"}],
        categorical=[{"name": "tags", "num_ids": 5, "kind": "multi_hot", "weights": "w"}],
        sample_weight="s",
    )
    table, feature = TableConfig(name="t", num_rows=5, dim=1), FeatureConfig(name="tags", table="t")

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = EmbeddingCollection([table], [feature], SGD())

        def forward(self, batch):
            return self.tables(batch).flat

    trainer = Trainer(Sum(), schema, SOLVER, SGD(), progress=False)
    columns = {"y": [0.0, 1.0, 1.0], "tags": [[3], [], [4, 3]], "w": [[1.0], [], [1.0, float("nan")]], "s": [1.0, 1, 1]}
    with pytest.raises(NumericsError, match=r"weights of feature 'tags', row 2 of the batch: nan"):
        trainer.train_step(Batch.from_columns(schema, columns))
    columns["w"], columns["s"] = [[1.0], [], [1.0, 1.0]], [1.0, float("inf"), 1.0]
    with pytest.raises(NumericsError, match=r"the sample weight, row 1 of the batch: inf"):
        trainer.train_step(Batch.from_columns(schema, columns))


def test_a_layer_that_overflows_is_named_and_batch_statistics_come_back():
    class Explodes(nn.Module):
        on = False

        def forward(self, x):
            return x * (float("inf") if self.on else 1.0)

    trainer = make_trainer(SOLVER)
    trainer.module.net.insert(1, Explodes())
    trainer.train_step(make_batch(16, 1))
    before = tensors_of(trainer)
    trainer.module.net[1].on = True
    with pytest.raises(NumericsError, match=r"the loss is nan: the output of module 'net\.1' \(Explodes\)"):
        trainer.train_step(make_batch(16, 2))
    assert_same_bits(before, tensors_of(trainer))


def test_weights_that_are_bad_already_are_named():
    trainer = make_trainer(SOLVER)
    content = trainer.module.tables.export_table("user")
    content.weight[:] = float("nan")
    trainer.module.tables.import_table("user", content)
    with pytest.raises(NumericsError, match="weights that were already NaN or infinite: table 'user'"):
        trainer.train_step(make_batch())


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_bad_gradient_names_feature_or_parameter(clip):
    class Bad(ClickModel):
        bad = ""

        def forward(self, batch):
            out = self.tables(batch)
            user = BadGradient.apply(out["user"]) if self.bad == "user" else out["user"]
            x = torch.cat([user, out["item"], out["seen"], batch.dense], 1)
            hidden = self.net[0](x)
            return self.net[1:](BadGradient.apply(hidden) if self.bad == "net" else hidden)

    trainer = Trainer(Bad(), SCHEMA, SOLVER.model_copy(update={"clip_grad_norm": clip}), Adam(), progress=False)
    trainer.train_step(make_batch(16, 1))
    before = tensors_of(trainer)
    trainer.module.bad = "user"
    with pytest.raises(NumericsError, match=r"gradients are NaN or infinite: those of feature 'user'\n"):
        trainer.train_step(make_batch(16, 2))
    trainer.module.bad = "net"
    with pytest.raises(NumericsError, match=r"feature 'user', feature 'item', .*parameter 'net\.0\.weight'"):
        trainer.train_step(make_batch(16, 2))
    assert_same_bits(before, tensors_of(trainer))


def test_a_sum_that_overflows_is_no_reason_to_refuse():
    trainer = make_trainer(SOLVER)
    huge = np.array(columns(16, 3)["price"])
    huge[:2] = 3e38  # each finite, their sum is not
    trainer.guard = trainer.stepper.guard
    trainer.guard.before(make_batch(16, 3, price=huge), 1)


def test_without_the_guard_nan_goes_through():
    trainer = make_trainer(SOLVER.model_copy(update={"nan_guard": False}))
    loss = trainer.train_step(with_bad("click", 5, np.nan))
    assert torch.isnan(loss)
    assert torch.isnan(trainer.module.net[0].weight).any()


def test_a_key_out_of_range_changes_nothing():
    bad = make_batch(16, 3, user=np.full(16, 77, np.int32))
    text = refused(make_trainer(SOLVER), bad, KeyRangeError)
    assert "user" in text
    assert "77" in text


def test_fit_names_the_file_of_a_bad_batch(tmp_path, train):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, batch):
            return self.layer(batch.dense_feature("price").log())  # log of a negative price is NaN

    trainer = Trainer(Logs(), SCHEMA, SOLVER, SGD(), progress=False)
    with pytest.raises(NumericsError, match=r"(?s)module 'layer'.*step 1, .*clicks.*epoch 0, batch 0.*part-00000"):
        trainer.fit(train)


@pytest.mark.parametrize(
    "output", [lambda b: b.dense, lambda b: [1], lambda b: b.dense[:3, 0], lambda b: b.dense[0, 0]]
)
def test_a_wrong_output_says_which_shape_is_wanted(output):
    trainer = make_trainer(SOLVER)
    trainer.module.forward = output
    with pytest.raises(SchemaError, match=r"\(16, 1\) or \(16,\)"):
        trainer.train_step(make_batch())


def test_a_module_with_everything_frozen_is_told():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).requires_grad_(False)

        def forward(self, batch):
            return self.layer(batch.dense)

    trainer = Trainer(Frozen(), SCHEMA, SOLVER, SGD(), progress=False)
    with pytest.raises(ConfigError, match="does not depend on any trained weight"):
        trainer.train_step(make_batch())


def nasty_batch(seed: int) -> Batch:
    """Empty bags, one key many times, key 0 and the largest, one row, int64, huge and tiny numbers."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 3, 17, 64]))
    pick = lambda top: rng.choice([0, 1, 2, 3, top - 1, int(rng.integers(top))], size)  # noqa: E731
    lengths = rng.choice([0, 0, 1, 8], size)
    scale = float(rng.choice([0.0, 1e-30, 1.0, 1e4]))
    batch = make_batch(
        size, seed,
        user=pick(50), item=np.full(size, pick(30)[0]), click=rng.integers(0, 2, size).astype(np.float32),
        price=(rng.normal(size=size) * scale).astype(np.float32),
        seen=[[int(rng.choice([0, 3, 29]))] * n for n in lengths],
    )  # fmt: skip
    if seed % 7 == 0:  # one key 2,000 times in a single bag
        bag = Bag(torch.full((2000,), 29), torch.tensor([0] + [2000] * size))
        batch = Batch(batch.layout, batch.labels, batch.dense, batch.one_hot.long(), {"seen": bag}, origin="nasty")
    return batch


def train_on_nasty(seed: int) -> dict[str, torch.Tensor]:
    features = [
        FeatureConfig(name="user", table="user"),
        FeatureConfig(name="item", table="item"),
        FeatureConfig(name="seen", table="item", combiner=("sum", "mean")[seed % 2]),
    ]
    tables = [TableConfig(name="user", num_rows=50, dim=3), TableConfig(name="item", num_rows=30, dim=3)]

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = EmbeddingCollection(tables, features, (SGD(), Adam())[seed % 2], seed=seed)
            self.net = nn.Linear(12, 1)
            torch.nn.init.constant_(self.net.weight, 0.1)
            torch.nn.init.zeros_(self.net.bias)

        def forward(self, batch):
            return self.net(torch.cat([self.tables(batch).flat, batch.dense], 1))

    solver = Solver(lr=0.01, device="cpu", clip_grad_norm=(None, 1.0)[seed % 3 == 0], seed=seed)
    trainer = Trainer(Tiny(), SCHEMA, solver, Adam(), progress=False)
    for i in range(4):
        assert torch.isfinite(trainer.train_step(nasty_batch(4 * seed + i)))
    moved = tensors_of(trainer)
    assert all(torch.isfinite(one.float()).all() for one in moved.values())
    return moved


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=["100", "900 more"]
)
def test_nasty_batches_train_and_repeat_to_the_bit(seeds):
    for seed in seeds:
        first = train_on_nasty(seed)
        if seed % 10 == 0:
            assert_same_bits(first, train_on_nasty(seed))


@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_a_key_that_a_gpu_found_out_of_range_is_raised_at_the_end_of_an_evaluation(valid, monkeypatch, use):
    trainer = make_trainer()
    tables = trainer.module.tables
    found = KeyOutOfRange(torch.tensor([1, 0, 77]), "batch 3", ("user",), (tables.tables["user"],), None)
    forward = type(tables).forward

    def on_gpu(self, batch):
        self._violations.append(found)  # a GPU leaves a record, and waits for nothing
        return forward(self, batch)

    monkeypatch.setattr(type(tables), "forward", on_gpu)
    with pytest.raises(
        KeyRangeError, match=r"feature 'user', table 'user', row 0 of the batch, batch 3\n  value:   77"
    ):
        getattr(trainer, use)(valid)
    assert trainer.module.training
