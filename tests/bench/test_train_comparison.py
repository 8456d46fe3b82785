"""`viviane bench train`: the peers are the same models, and tiny sizes give their table and file."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from viviane.bench.embedding import LeftOut
from viviane.bench.plain_models import PLAIN, build_plain
from viviane.bench.samples import Samples, columns_of
from viviane.bench.train import TrainComparison, TrainFigure, measure_floors, measure_training
from viviane.bench.train_libraries import TRAIN_LIBRARIES, Training
from viviane.bench.workload import Tables
from viviane.cli.bench_train import show
from viviane.cli.main import app
from viviane.core.errors import ConfigError
from viviane.data import write_dataset
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.schema import Schema
from viviane.zoo import ZOO

CPU = torch.device("cpu")
ROWS = (30, 7, 5)
TINY = ["bench", "train", "--device", "cpu", "--rows", "50,7", "--dim", "3", "--batch-size", "5", "--seconds", "0.01"]


@pytest.mark.parametrize("name", PLAIN)
def test_the_hand_written_model_is_the_zoos(name: str) -> None:
    training = Training(name, Tables(ROWS, 4, "sgd", CPU), 64, num_dense=3)
    ours = training.build().module.eval()
    plain = build_plain(name, ROWS, 3, ZOO[name](dim=4)).eval()
    for node, collection in collections_of(ours).items():
        bags = plain.first if node == "first_weights" else plain.bags
        for i, bag in enumerate(bags.bags, 1):
            bag.weight.data.copy_(collection.table_rows(f"c{i}"))
    order = [key for key in dict(plain.named_parameters()) if "bags" not in key]
    order.sort(key=lambda key: key == "dense_vectors")  # a parameter of the module itself comes first
    mine = sorted(dense_parameters(ours).items(), key=lambda item: item[0].startswith("dense_vectors"))
    if name == "deepfm":  # the vectors of dense numbers stand in another place: put them last in both
        assert order[-1] == "dense_vectors"
    for key, (_, weight) in zip(order, mine, strict=True):
        plain.get_parameter(key).data.copy_(weight.data.view_as(plain.get_parameter(key)))
    batch = training.samples.batch(64)
    with torch.no_grad():
        wanted, found = plain(batch.dense, batch.one_hot.t().long()), ours(batch)[:, 0]
    # float32 sums of at most 256 products of numbers of size 1, in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("library", ["viviane", "viviane, reader", "torch"])
def test_every_library_learns(library: str, rule: str) -> None:
    training = Training("deepfm", Tables(ROWS, 4, rule, CPU, lr=0.05), 64, num_dense=3)
    step = TRAIN_LIBRARIES[library].build(training)
    losses = [float(step(i % 8)) for i in range(150)]
    assert sum(losses[-20:]) < sum(losses[:20])  # there is nothing to learn but the click rate


def test_figures_are_measured_and_shown(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    training = Training("dcn", Tables((50, 7), 3, "sgd", CPU), 5)
    found = [measure_training(name, training, 0.01) for name in ("viviane", "torch", "deepctr")]
    measured = tuple(one for one in found if isinstance(one, TrainFigure))
    left_out = tuple(one for one in found if not isinstance(one, TrainFigure))
    comparison = TrainComparison((training,), tuple(measure_floors([training])), measured, left_out)
    show(comparison)
    words = " ".join(capsys.readouterr().out.split())
    assert "Training step of dcn, sgd, fp32, cpu" in words
    assert "Floor:" in words
    content = json.loads(json.dumps(comparison.to_dict()))
    assert content["tables"] == {"num": 2, "rows": 57, "dim": 3}
    shown = {one["library"]: one for one in [*content["figures"], *content["left_out"]]}
    assert set(shown) == {"viviane", "torch", "deepctr"}
    assert shown["viviane"]["ours_is_faster_by"] == 1
    assert shown["torch"]["samples_per_second"] == pytest.approx(5 / shown["torch"]["ms"] * 1e3)
    # 6 flops for each weight of a matrix: layers of 256 and 128 and the logit; the crosses have vectors
    assert content["floors"][0]["flops"] == 5 * 6 * ((2 * 3 + 13) * 256 + 256 * 128 + (2 * 3 + 13 + 128))
    assert isinstance(measure_training("deepctr", replace(training, model="dlrm"), 0.01), LeftOut)


@pytest.mark.slow
def test_a_tiny_run_gives_its_file(tmp_path) -> None:
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(app, [*TINY, "--peers", "torch", "--output", str(file)])
    assert done.exit_code == 0, done.output
    assert [one["library"] for one in json.loads(file.read_text())["figures"]] == [
        "viviane",
        "viviane, reader",
        "torch",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "dlmr"], "did you mean 'dlrm'"),
        (["--precision", "int8"], "no such precision"),
        (["--peers", "keras"], "unknown peer"),
        (["--optimizer", "lion"], "unknown optimizer"),
        (["--processor-time"], "on the wall alone"),
    ],
)
def test_what_is_wrong_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*TINY, *words])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_samples_fit_any_schema(tmp_path) -> None:
    schema = Schema(
        labels=[{"name": "y"}],
        dense=[{"name": "x", "dim": 2}, {"name": "z"}],
        categorical=[
            {"name": "a", "num_ids": 9}, {"name": "raw", "num_ids": None},
            {"name": "bag", "num_ids": 50, "kind": "multi_hot", "weights": "bag_weight"},
            {"name": "seq", "num_ids": 50, "kind": "sequence", "max_length": 3},
            {"name": "seven", "num_ids": 50, "kind": "multi_hot", "hotness": 7},
        ],
        sample_weight="w",
    )  # fmt: skip
    batch = Samples(schema).batch(200)
    read = write_dataset(tmp_path / "rows", schema, [columns_of(schema, batch)], format="viviane").head(200)
    assert all(torch.equal(one, other) for one, other in zip(read.tensors(), batch.tensors(), strict=True))
    assert int(batch.bags["seq"].lengths.max()) <= 3
    assert len(Samples(schema).write(tmp_path / "more", 300)) == 300
