"""Training over 1, 2 and 4 processes against one process that sees the whole batches."""

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes
from group_model import NUM_VALID, SCHEMA, Clicks, columns, make_data, make_trainer, settings, tensors_of

from viviane.batch import Batch
from viviane.config import SGD, Adam
from viviane.core.errors import ConfigError, DataError, NumericsError, VivianeError
from viviane.data import Dataset
from viviane.embedding import CacheSettings, DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.metrics import Auc, AverageLoss, build_metric, roc_auc
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.model.losses import terms
from viviane.model.module import GraphModule
from viviane.parallel import Group, ShardingPlan, TablePlan, make_tables
from viviane.schema import Schema
from viviane.training import Trainer
from viviane.training.step.average import check_running_mean
from viviane.training.step.dense_exchange import DenseExchange

METRICS = ["auc", "log_loss", "accuracy", "calibration"]
# Sums of float32 gradients in another order, through 51 steps of Adam and AdaGrad. Two rows of 161 whose scores are
# equal but for that may change places: a pair is up to 9 of about 14,000 weights of the AUC, a row 3 of 240.
ROUNDING = {"loss": 1e-4, "log_loss": 1e-4, "calibration": 1e-4, "auc": 4e-3, "accuracy": 2e-2}


def mine(size_or_batch, group):
    """Return this process's rows of a batch of so many."""
    return slice(size_or_batch * group.rank // group.size, size_or_batch * (group.rank + 1) // group.size)


def train_alike(folder, group):
    """The same fit in all processes and in one: losses, metrics, predictions, every weight and state."""
    train, valid = Dataset(folder / "train"), Dataset(folder / "valid")
    solver = settings(eval_every=20, ema_decay=0.9)
    truth = make_trainer(Group(), solver, metrics=METRICS, log_every=10)
    ours = make_trainer(group, solver, metrics=METRICS, log_every=10)
    one, many = truth.fit(train, valid), ours.fit(train, valid)
    assert truth.step == ours.step == 51
    assert len(one.rows) == len(many.rows)
    for mine_row, row in zip(many.rows, one.rows, strict=True):
        for name in ("loss", *METRICS):
            if name in row:
                assert mine_row[name] == pytest.approx(row[name], rel=ROUNDING[name]), (name, mine_row, row)
    close(tensors_of(ours), tensors_of(truth))
    with ours.averaged(), truth.averaged():
        close(tensors_of(ours), tensors_of(truth))
    for name, value in truth.evaluate(valid).items():
        assert ours.evaluate(valid)[name] == pytest.approx(value, rel=ROUNDING[name]), name
    np.testing.assert_allclose(ours.predict(valid), truth.predict(valid), rtol=1e-3, atol=1e-5)  # of those weights


def close(mine, truth):
    assert mine.keys() == truth.keys()
    for name, part in truth.items():
        # Adam divides small gradients by their roots: a rounding step of a gradient may be 1e-3 of a step of lr 0.01.
        torch.testing.assert_close(mine[name], part, rtol=2e-3, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")


def metrics_alike(folder, group):
    """With the same weights, figures are the same to rounding in float64."""
    valid = Dataset(folder / "valid")
    truth, ours = make_trainer(Group(), settings(), metrics=METRICS), make_trainer(group, settings(), metrics=METRICS)
    with torch.no_grad():
        for name, part in truth.module.net.state_dict().items():
            ours.module.net.state_dict()[name].copy_(part)
    for size in (None, 7, 1000):
        one = truth.gather(valid, size)
        many = ours.gather(valid, size)
        assert many.num_rows == one.num_rows == NUM_VALID
        for name, value in one.compute().items():
            # Logits differ by float32 rounding in the exchange of a "mean"; scores keep their order but for ties.
            assert many.compute()[name] == pytest.approx(value, rel=1e-6), (name, size)
        ours_bins = [one_bin["count"] for one_bin in many.histogram(0)["bins"]]
        assert ours_bins == [one_bin["count"] for one_bin in one.histogram(0)["bins"]]
        np.testing.assert_allclose(ours.predict(valid, size), truth.predict(valid, size), rtol=1e-6)


def auc_alike(group):
    """The exact AUC of scattered rows, on scores with ties, of one sign, with weights, and on few rows."""
    rng = np.random.default_rng(5)
    rows = 5000
    ties = rng.integers(0, 9, rows).astype(np.float32)
    cases = {
        "apart": rng.normal(size=rows).astype(np.float32),
        "ties": ties,
        "equal": np.full(rows, 0.25, np.float32),
        "zeros of both signs": np.where(ties > 4, np.float32(0.0), np.float32(-0.0)),
        "skewed": (rng.random(rows) ** 20).astype(np.float32),
    }
    for name, scores in cases.items():
        labels = (rng.random(rows) < 0.3).astype(np.float32)
        weights = rng.integers(0, 5, rows).astype(np.float32) / 3
        for count in (rows, 2, 0):
            for weight in (None, weights):
                metric = Auc()
                # Uneven: the first process has most rows, and the second one none of few.
                owner = np.minimum(rng.geometric(0.6, rows) - 1, group.size - 1)[:count]
                take = np.flatnonzero(owner == group.rank)
                parts = [torch.from_numpy(one[take]) for one in (scores, labels, weights) if one is not None]
                if len(take):
                    metric.update(parts[0], parts[1], None if weight is None else parts[2])
                metric.join(group)
                truth = roc_auc(scores[:count], labels[:count], None if weight is None else weights[:count])
                # Without weights all sums are whole numbers below 2^53; with them, sums of doubles in another order.
                tolerance = 0 if weight is None else 1e-12
                assert metric.compute() == pytest.approx(truth, abs=tolerance, rel=tolerance, nan_ok=True), (
                    name,
                    count,
                )
    metric = Auc()
    scores = torch.tensor([0.5, float("nan") if group.rank == group.size - 1 else 0.1])
    metric.update(scores, torch.tensor([0.0, 1.0]))
    with pytest.raises(NumericsError, match=rf"rows of rank {group.size - 1}"):
        metric.join(group)


def terms_alike(group, optional=True):
    """Two losses, one of a label that some rows lack, with a penalty on weights: the gradients of the whole batch.

    Where no label is optional the shares of the ranks are those of their rows.
    """
    schema = Schema(
        labels=[{"name": "click"}, {"name": "buy", "optional": optional}], dense=[{"name": "x", "dim": 2}],
        categorical=[{"name": "user", "num_ids": 9}],
    )  # fmt: skip
    rng = np.random.default_rng(3)
    size = 13
    lacks = optional & (np.arange(size) > 8)
    whole = {
        "click": rng.integers(0, 2, size), "buy": np.where(lacks, -1, rng.integers(0, 2, size)),
        "x": rng.normal(size=(size, 2)), "user": rng.integers(3, 9, size),
    }  # fmt: skip
    own = mine(size, group)
    trained = []
    for alone in (True, False):
        model = Model(settings(lr=0.1), schema)
        model.add(Input(label={"click": ["click"], "buy": ["buy"]}, dense="x", sparse="cats"))
        model.add(SparseEmbedding("emb", bottom="cats", dim=2))
        model.add(DenseLayer("flat", "Reshape", bottom="emb", leading_dim=2))
        model.add(DenseLayer("all", "Concat", bottom=["flat", "x"]))
        for name in ("click", "buy"):
            model.add(DenseLayer(f"z_{name}", "MLP", bottom="all", num_outputs=[1], act_type="none"))
            extra = {"use_regularizer": True, "regularizer_type": "L2", "lambda": 0.5} if name == "buy" else {}
            model.add(DenseLayer(f"loss_{name}", "BinaryCrossEntropyLoss", bottom=[f"z_{name}", name], **extra))
        plan = model.plan()
        one = Group() if alone else group
        module = GraphModule(plan, SGD(), make=partial(make_tables, group=one))
        trainer = Trainer(module, schema, settings(lr=0.1), SGD(), group=one, terms=terms(plan.losses, schema))
        rows = slice(0, size) if alone else own
        for _ in range(3):
            loss = trainer.train_step(Batch.from_columns(schema, {name: part[rows] for name, part in whole.items()}))
        trained.append((loss, [one.detach() for one in trainer.stepper.parameters.values()]))
    # Three steps of SGD: float32 sums in another order.
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)


def metrics_by_group_alike(group):
    """Rows of a user are spread over the processes; the mean of batch losses is that of whole batches."""
    rng = np.random.default_rng(6)
    p, y = rng.random(101).astype(np.float32), (rng.random(101) < 0.4).astype(np.float32)
    users = rng.integers(0, 9, 101)
    own = np.flatnonzero(rng.integers(0, group.size, 101) == group.rank)
    for name in ("gauc:user", "ndcg@3:user", "hit_rate@2:user", "mrr:user"):
        truth, ours = build_metric(name), build_metric(name)
        for metric, rows in ((truth, slice(None)), (ours, own)):
            metric.update(*(torch.from_numpy(part[rows]) for part in (p, y)), groups=torch.from_numpy(users[rows]))
        ours.join(group)
        assert ours.compute() == pytest.approx(truth.compute(), rel=1e-12)  # sums of doubles in another order
    average = AverageLoss()
    for loss in (1.0, 3.0):
        average.update_loss(torch.tensor(loss + group.rank), 1.0 + group.rank)
    average.update_loss(torch.tensor(float("nan")), 0.0)  # a batch of which no process has rows
    has_rows = group.rank > 0  # and one of which the first process has none
    average.update_loss(torch.tensor(5.0 if has_rows else float("nan")), float(has_rows))
    average.join(group)
    weights = np.arange(1, group.size + 1)
    shift = (weights * (weights - 1)).sum() / weights.sum()
    assert average.compute() == pytest.approx((1.0 + shift + 3.0 + shift + 5.0) / 3, rel=1e-12)


def one_nan_stops_all(group):
    """A bad number on the last rank alone: every rank raises the words that name it, and training continues."""
    rank = group.size - 1
    for guard_at in ("the batch contains NaN", "the loss is nan"):
        trainer = make_trainer(group, settings())
        before, own, hooks = tensors_of(trainer), columns(8, seed=group.rank), []
        if group.rank == rank and guard_at == "the loss is nan":
            hooks = [trainer.module.net[0].register_forward_hook(lambda layer, given, output: output * float("nan"))]
        elif group.rank == rank:
            own["price"][5, 1] = np.nan
        with pytest.raises(NumericsError, match=rf"rank {rank}: {guard_at}[\s\S]*step 1"):
            trainer.train_step(Batch.from_columns(SCHEMA, own))
        after = tensors_of(trainer)
        assert all(torch.equal(after[name], part) for name, part in before.items())
        for hook in hooks:
            hook.remove()
        trainer.train_step(Batch.from_columns(SCHEMA, columns(8, seed=group.rank)))
    trainer = make_trainer(group, settings())
    if group.rank == 0:
        last = trainer.module.net[4].weight
        last.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError, match=r"rank 0: gradients are NaN or infinite[\s\S]*net\.4\.weight"):
        trainer.train_step(Batch.from_columns(SCHEMA, columns(8, seed=group.rank)))


def resumed_bit_by_bit(folder, group, run):
    """Dropout of its own on every process; a run that was stopped and resumed ends in the same bits."""
    train, valid = Dataset(folder / "train"), Dataset(folder / "valid")
    straight = make_trainer(group, settings(ema_decay=0.9), dropout=0.3)
    straight.fit(train, valid)
    for last in (7, 20, 51):
        again = make_trainer(
            group, settings(ema_decay=0.9, max_steps=last), dropout=0.3, run_folder=run / f"{group.size}"
        )
        again.fit(train, valid, resume=True)
        assert again.step == last
    for one, other in ((straight, again), (straight.stepper.mean, again.stepper.mean)):
        parts = (one.tensors(), other.tensors()) if one is not straight else (tensors_of(one), tensors_of(other))
        assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
    draws = group.gather(torch.rand(4))
    assert len({tuple(draw.tolist()) for draw in draws}) == group.size


def frozen_parts(group):
    """Tables and layers that are frozen stay, and what is thawed moves again; no process waits for another."""
    trainer = make_trainer(group, settings())
    trainer.module.tables.freeze("user")
    trainer.module.net[0].weight.requires_grad_(False)
    batch = Batch.from_columns(SCHEMA, columns(8, seed=group.rank))
    before = tensors_of(trainer)
    trainer.train_step(batch)
    after = tensors_of(trainer)
    assert torch.equal(before["user.weight"], after["user.weight"])
    assert torch.equal(before["net.0.weight"], after["net.0.weight"])
    assert not torch.equal(before["item.weight"], after["item.weight"])
    trainer.module.tables.unfreeze("user")
    trainer.module.net[0].weight.requires_grad_(True)
    trainer.train_step(batch)
    assert not torch.equal(before["user.weight"], tensors_of(trainer)["user.weight"])
    assert not torch.equal(before["net.0.weight"], tensors_of(trainer)["net.0.weight"])


def fixed_rows_alike(group):
    """Static shapes: the same bits, and all ranks receive a request to stop in the same step."""
    free, fixed = make_trainer(group, settings()), make_trainer(group, settings())
    sync = fixed.stepper.sync
    sync.set_static_shape(8, fixed.stepper.exchange)
    received = []
    for step in range(9):
        sync.stop_requested = step == 1 and group.rank == group.size - 1
        batch = Batch.from_columns(SCHEMA, columns(8, seed=10 * step + group.rank))
        losses = [trainer.train_step(batch) for trainer in (free, fixed)]
        assert torch.equal(*losses)
        received.append(int(sync.stop_agreed))
    assert received == [0] * 7 + [1, 1]
    assert fixed.stepper.num_rows == 8 * group.size
    ends = [tensors_of(trainer) for trainer in (free, fixed)]
    assert all(torch.equal(ends[1][name], part) for name, part in ends[0].items())
    with pytest.raises(DataError, match="static batch shape"):
        sync.begin(Batch.from_columns(SCHEMA, columns(7, seed=0)))
    sync.clear_static_shape()
    fixed.train_step(Batch.from_columns(SCHEMA, columns(group.rank, seed=0)))
    sync.set_static_shape(8, fixed.stepper.exchange)
    sync.stop_agreed = False
    sync.stop_requested = group.rank == 0
    fixed.train_step(Batch.from_columns(SCHEMA, columns(8, seed=group.rank)))
    sync.clear_static_shape()  # the last step's requests are not lost
    assert sync.stop_agreed


def dense_sums_in_sixteen_bits(group):
    """Gradients rounded on the wire, the loss and signals not; a layer that nobody uses gets none."""
    for dtype, digits in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10), (None, 1e-6)):
        torch.manual_seed(0)
        used, unused = torch.nn.Linear(5, 3), torch.nn.Linear(2, 2)
        exchange = DenseExchange([*used.parameters(), *unused.parameters()], group, dtype)
        exchange.is_static = True
        every = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
        for step in range(2):
            exchange.signals.fill_(float(group.rank))
            loss = used(every[group.rank]).square().sum() * (1 + step)
            exchange.begin(loss)
            loss.backward()
            mean, finite = exchange.finish()
            truth = [used(x).square().sum() * (1 + step) for x in every]
            assert float(mean) == pytest.approx(float(sum(truth).detach()), rel=1e-6)
            assert torch.isfinite(finite)
            assert float(exchange.received[1]) == sum(range(group.size))
            whole = torch.autograd.grad(sum(truth), list(used.parameters()))
            for parameter, gradient in zip(used.parameters(), whole, strict=True):
                # Every process's gradient is rounded, and their sum: of numbers up to some hundreds.
                torch.testing.assert_close(parameter.grad, gradient, rtol=2 * digits, atol=400 * digits)
                parameter.grad = None
            assert all(one.grad is None for one in unused.parameters())


def sums_of_a_dropped_pass(group):
    """A pass fails on every rank after its first sums have started, on the last rank late: the next one is right."""
    layer = torch.nn.Linear(300, 200, bias=False)
    exchange = DenseExchange(list(layer.parameters()), group)
    for scale in (1.0, 3.0):
        exchange.begin(torch.tensor(scale))
        if scale == 1.0 and group.rank == group.size - 1:
            time.sleep(0.3)
        (layer.weight.sum() * scale * (group.rank + 1)).backward()
        if scale == 1.0:
            exchange.drop()
            layer.weight.grad = None
    mean, _ = exchange.finish()
    ranks = group.size * (group.size + 1) // 2
    assert torch.equal(layer.weight.grad, torch.full((200, 300), 3.0 * ranks))
    assert float(mean) == 3.0 * group.size


def refused_model_is_known_everywhere(group, folder, run):
    """What rank 0 refuses, or cannot write, ends `save` on all ranks; what is saved afterwards is whole."""
    train = Dataset(folder / "train")
    model = Model(settings(epochs=1), SCHEMA)
    model.add(Input(label={"click": ["click"]}, dense="x", sparse={"cats": ["user", "item"]}))
    model.add(SparseEmbedding("emb", bottom="cats", dim=2))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", leading_dim=4))
    model.add(DenseLayer("all", "Concat", bottom=["flat", "x"]))
    model.add(DenseLayer("z", "MLP", bottom="all", num_outputs=[1], act_type="none"))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["z", "click"]))
    model.compile("sgd")
    taken, blocked = run / "taken", run / "blocked"
    if group.rank == 0:
        taken.mkdir()
        (taken / "letter.txt").write_text("mine")
        blocked.write_text("a file where a folder should be")
    group.gather_numbers([0])
    for place, words in ((taken, "not a saved model"), (blocked / "model", "could not be written")):
        with pytest.raises(VivianeError, match=words) as caught:
            model.save(place)
        assert group.rank == 0 or "rank 0" in str(caught.value)
    model.save(run / "model")
    assert [one.name for one in taken.iterdir()] == ["letter.txt"]
    loaded = Model.load(run / "model", device="cpu")
    np.testing.assert_allclose(loaded.predict(train)[:5], model.predict(train)[:5], rtol=1e-6)


def refusals(group):
    if group.size > 1:
        table = TableConfig(name="user", num_rows=53, dim=4)
        module = Clicks(group)
        module.tables = EmbeddingCollection([table], [FeatureConfig(name="user", table="user")], Adam())
        with pytest.raises(ConfigError, match=r"its own tables[\s\S]*make_tables"):
            Trainer(module, SCHEMA, settings(), Adam(), group=group)


def a_running_mean_is_refused_together(group):
    """The last rank alone has a table without running mean: its error came in the first update, and the others hung."""
    last = group.size - 1
    wrong = [
        (DynamicTableConfig(name="b", dim=2), None, "permanent rows"),
        (TableConfig(name="b", num_rows=9, dim=2, dtype="bfloat16"), None, "float32 rows"),
        (TableConfig(name="b", num_rows=900, dim=2), CacheSettings(tables={"b": 6_000}), "completely in memory"),
    ]
    features = [FeatureConfig(name=name, table=name) for name in "ab"]
    ranks = [TablePlan(table=name, kind="table", ranks=[rank]) for name, rank in (("a", 0), ("b", last))]
    plan = ShardingPlan(world_size=group.size, tables=ranks)
    for table, cache, said in wrong:
        tables = [TableConfig(name="a", num_rows=9, dim=2), table]
        module = torch.nn.ModuleList(
            [make_tables(tables, features, SGD(), group=group, plan=plan.to_dict(), cache=cache)]
        )
        with pytest.raises(ConfigError, match=rf"{said}[\s\S]*tables? '?b"):
            check_running_mean(module, group)


def everything(folder, run):
    group = Group.world()
    train_alike(folder, group)
    metrics_alike(folder, group)
    auc_alike(group)
    metrics_by_group_alike(group)
    terms_alike(group)
    terms_alike(group, optional=False)
    one_nan_stops_all(group)
    resumed_bit_by_bit(folder, group, run)
    frozen_parts(group)
    fixed_rows_alike(group)
    dense_sums_in_sixteen_bits(group)
    sums_of_a_dropped_pass(group)
    refused_model_is_known_everywhere(group, folder, run)
    refusals(group)
    a_running_mean_is_refused_together(group)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("group")
    make_data(made)
    return made


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_what_one_trains(size, folder, tmp_path):
    processes.run(size, everything, folder, tmp_path)
