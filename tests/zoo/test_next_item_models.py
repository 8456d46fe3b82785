"""SASRec and HSTU: they learn which item follows, see no later item, and give vectors for retrieval."""

import json

import numpy as np
import pytest
import torch

from viviane.batch import Batch
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.data import write_dataset
from viviane.model import GraphModule, Model, plan_graph
from viviane.retrieval import CatalogueEvaluation, Histories
from viviane.schema import Schema
from viviane.zoo import HSTU, SASRec

ITEMS, LENGTH = 12, 6
TIMES = {"name": "hist_time", "num_ids": None, "kind": "sequence", "max_length": LENGTH}


def schema(*more) -> Schema:
    return Schema(
        labels=[{"name": "y"}],
        categorical=[
            {"name": "hist", "num_ids": ITEMS + 3, "kind": "sequence", "max_length": LENGTH, "vocabulary": "item"},
            {"name": "item", "num_ids": ITEMS + 3},
            *more,
        ],
    )


def walks(count: int, seed: int) -> list[np.ndarray]:
    """Each item is followed by the one two further, in a ring, with 90 %; else by any."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(3, LENGTH + 2, count):
        one = [int(rng.integers(ITEMS))]
        while len(one) < length:
            one.append((one[-1] + 2) % ITEMS if rng.random() < 0.9 else int(rng.integers(ITEMS)))
        found.append(np.array(one) + 3)
    return found


def rows(users) -> dict:
    return {
        "hist": [one[:-1].astype("int32") for one in users],
        "item": np.array([one[-1] for one in users], dtype="int32"),
        "y": np.ones(len(users), dtype="float32"),
    }


SMALL = {"dim": 16, "num_blocks": 1, "init": {"type": "normal", "std": 0.1}}
MODELS = {
    "sasrec": SASRec(**SMALL),
    "sasrec, last": SASRec(**SMALL, targets="last", activation="silu", dropout=0.1),
    "sasrec, sampled": SASRec(**SMALL, softmax="sampled"),
    "hstu": HSTU(**SMALL),
    "hstu, cosine": HSTU(**SMALL, cosine=True, temperature=0.1, head_dim=4, value_dim=6, embedding_dropout=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_learns_what_follows_stops_by_ndcg_and_survives_saving(name, tmp_path) -> None:
    model = Model(Solver(batch_size=64, lr=0.02, epochs=6, device="cpu", patience=3, restore_best=True), schema())
    model.add(MODELS[name])
    model.compile(Adam(), metrics=["log_loss"])
    train, valid = walks(600, 0), walks(100, 1)
    data = write_dataset(tmp_path / "train", schema(), [rows(train)])
    held = write_dataset(tmp_path / "valid", schema(), [rows(valid)])
    nothing = Histories.of([[] for _ in valid])  # items may come again here
    check = CatalogueEvaluation(
        model, [one[:-1] for one in valid], [int(one[-1]) for one in valid], seen=nothing, k=[1, 3]
    )
    history = model.fit(data, held, callbacks=[check])
    # 90 % are followed by the planted item; chance is 1 in 12.
    assert history.best("catalogue/ndcg@3") > 0.75
    assert check.measure(model.trainer)["catalogue/ndcg@3"] == history.best("catalogue/ndcg@3")  # restored
    assert model.plan().unused == ()
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model", device="cpu")
    given = {key: value for key, value in rows(valid).items() if key != "y"}
    assert np.array_equal(loaded.predict(given), model.predict(given))
    user, item = model.tensor("user_vector", given), model.tensor("item_vector", given)
    scale = 10.0 if "cosine" in name else 1.0
    # the prediction is the sigmoid of the vectors' product, summed in another order
    np.testing.assert_allclose(model.predict(given)[:, 0], 1 / (1 + np.exp(-scale * (user * item).sum(1))), rtol=1e-4)
    recipe = MODELS[name]
    assert type(recipe).from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("recipe", [SASRec(**SMALL), HSTU(**SMALL, times="hist_time", time_unit=60)], ids=str)
def test_no_place_sees_later_items_and_padding_changes_nothing(recipe) -> None:
    own = schema(TIMES) if isinstance(recipe, HSTU) else schema()
    module = GraphModule(plan_graph(recipe.nodes(own), own), SGD()).eval()

    def states(history, times):
        columns = {"hist": [history], "item": [5]} | ({"hist_time": [times]} if isinstance(recipe, HSTU) else {})
        batch = Batch.from_columns(own, columns)
        return module.tensor("states", batch)[0], module.tensor("user_vector", batch)[0]

    when = [100, 900, 1000, 5000]
    long, _ = states([3, 4, 5, 6], when)
    other, _ = states([3, 4, 5, 9], when)
    torch.testing.assert_close(long[:3], other[:3], rtol=0, atol=0)
    assert (long[3] - other[3]).abs().max() > 1e-6
    _, plain = states([3, 4], when[:2])
    _, padded = states([3, 4, 0, 0], [*when[:2], 0, 0])
    torch.testing.assert_close(plain, padded)
    _, in_front = states([0, 0, 3, 4], [0, 0, *when[:2]])
    if isinstance(recipe, SASRec):  # HSTU's biases go by distance, which is the same, and SASRec's by the items after
        torch.testing.assert_close(plain, in_front)
    _, empty = states([], [])
    assert empty.abs().sum() == 0


def test_a_softmax_over_all_items_moves_every_row_as_a_dense_table_would() -> None:
    own = schema()
    module = GraphModule(plan_graph(SASRec(**SMALL).nodes(own), own), SGD()).train()
    users = walks(5, 2)
    batch = Batch.from_columns(own, {key: value for key, value in rows(users).items() if key != "y"})
    collection = module._modules["emb"]
    before = collection.table_rows("item").clone()
    module(batch)[:, 1].sum().backward()
    collection.step(0.1)
    moved = (collection.table_rows("item") - before).abs().sum(1) > 0
    assert moved[3:].all()
    assert not moved[:3].any()  # padding, missing and unknown are no candidates


MISTAKES = [
    (SASRec, {"dim": 6, "num_heads": 4}, ConfigError, "not a multiple"),
    (SASRec, {"negatives": "hist"}, ConfigError, "softmax='sampled'"),
    (HSTU, {"times": "item"}, SchemaError, "as long as the history"),
    (HSTU, {"softmax": "sampled", "negatives": "item"}, SchemaError, "bag of the item's ids"),
    (SASRec, {"history": "hits"}, SchemaError, "did you mean 'hist'"),
]


@pytest.mark.parametrize(("recipe", "options", "kind", "message"), MISTAKES)
def test_wrong_settings_say_what_to_do(recipe, options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        recipe(**options).nodes(schema())


def test_raw_ids_want_sampled_candidates() -> None:
    own = Schema(labels=[{"name": "y"}], categorical=[
        {"name": "hist", "num_ids": None, "kind": "sequence", "max_length": 4, "vocabulary": "item"},
        {"name": "item", "num_ids": None}])  # fmt: skip
    with pytest.raises(SchemaError, match=r"(?s)all_rows.*sample candidates"):
        plan_graph(SASRec(dim=8).nodes(own), own)
    assert plan_graph(SASRec(dim=8, softmax="sampled").nodes(own), own).losses


def test_sampled_negatives_are_candidates_and_no_targets() -> None:
    bag = {"name": "others", "num_ids": ITEMS + 3, "kind": "multi_hot", "max_length": 4, "vocabulary": "item"}
    own = schema(bag)
    model = Model(Solver(device="cpu"), own)
    model.add(HSTU(**SMALL, softmax="sampled", negatives="others"))
    model.compile()
    users = walks(8, 3)
    batch = Batch.from_columns(own, rows(users) | {"others": [[3, 4, 5, 6]] * 8})
    first = float(model.trainer.train_step(batch))
    for _ in range(20):
        last = float(model.trainer.train_step(batch))
    assert last < first
