"""torch.compile of a whole model: one graph from batch to logits, and a trainer that works on it in place."""

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from viviane.batch import Batch
from viviane.config import SGD, AdaGrad, Solver
from viviane.data import write_dataset
from viviane.model import GraphModule, plan_graph
from viviane.schema import Schema
from viviane.training import Trainer
from viviane.zoo import DLRM

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SCHEMA = Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "x"}],
    categorical=[{"name": "a", "num_ids": 20}, {"name": "m", "num_ids": 9, "kind": "multi_hot"}],
)


def columns(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "y": rng.integers(0, 2, rows).astype("float32"),
        "x": rng.normal(size=rows).astype("float32"),
        "a": rng.integers(3, 20, rows).astype("int32"),
        "m": [rng.integers(3, 9, length).tolist() for length in rng.integers(0, 4, rows)],
    }


@pytest.fixture
def module():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield GraphModule(plan_graph(DLRM().nodes(SCHEMA), SCHEMA), AdaGrad())
    torch._dynamo.reset()


@pytest.mark.slow
def test_batches_of_any_origin_and_size_share_a_graph(module):
    fast = torch.compile(module, backend="aot_eager", fullgraph=True)
    for i, rows in enumerate((60, 90, 70)):
        batch = Batch.from_columns(SCHEMA, columns(rows, i), origin=f"file {i}")
        # What is compiled is plain torch, whose sums of products differ by rounding from those of the CPU's kernel.
        torch.testing.assert_close(fast(batch), module(batch), rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2  # torch takes sizes that happen to be equal for one: none are here


@pytest.mark.slow
def test_a_trainer_takes_a_module_compiled_in_place(module, tmp_path):
    train = write_dataset(tmp_path / "train", SCHEMA, [columns(300)])
    other = copy.deepcopy(module)
    other.compile(backend="aot_eager", fullgraph=True)
    for one in (module, other):
        solver = Solver(batch_size=64, lr=0.01, epochs=2, device="cpu", clip_grad_norm=1.0)
        Trainer(one, SCHEMA, solver, SGD()).fit(train)
    assert counters["stats"]["unique_graphs"] > 0
    states = [one.state_dict() for one in (module, other)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        # Ten steps by gradients that differ by rounding: the eager model's dot products come from the CPU's kernel.
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)
