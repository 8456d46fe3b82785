"""Recommenders: two stages end to end, hostile requests, files, threads, and the commands."""

import copy
import json
import pickle
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.config import Adam, Solver
from viviane.core.errors import CheckpointError, ConfigError, SchemaError
from viviane.core.files import file_sha256
from viviane.data import write_dataset
from viviane.model import Model
from viviane.retrieval import (
    Candidates,
    Histories,
    ItemKNN,
    ItemKNNSettings,
    Popularity,
    Recommender,
    TwoStageSettings,
    VectorSource,
    fit_two_stage,
    ranking_schema,
)
from viviane.retrieval.ranking import features
from viviane.schema import Schema
from viviane.zoo import DIN, HSTU

ITEMS = 30
RING = ITEMS - 3


def users(count=300, seed=0) -> Histories:
    """Each item is mostly followed by the next one in a ring."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(4, 9, count):
        one = [int(rng.integers(RING))]
        while len(one) < length:
            one.append((one[-1] + 1) % RING if rng.random() < 0.8 else int(rng.integers(RING)))
        found.append(np.array(one) + 3)
    return Histories.of(found)


def schema() -> Schema:
    return Schema(
        labels=[{"name": "y"}],
        categorical=[
            {"name": "hist", "num_ids": ITEMS, "kind": "sequence", "max_length": 8, "vocabulary": "item"},
            {"name": "item", "num_ids": ITEMS},
        ],
    )


@pytest.fixture(scope="module")
def retrieval() -> Model:
    model = Model(Solver(device="cpu"), schema())
    model.add(HSTU(dim=8, num_blocks=1, init={"type": "normal", "std": 0.3}))
    model.compile(Adam())
    return model


@pytest.fixture(scope="module")
def two_stage(retrieval):
    every = users()
    known = every.before_last(1)
    sources = [VectorSource(retrieval, name="hstu"), ItemKNN.count(known, ITEMS), Popularity.count(known, ITEMS)]
    din = DIN(dim=4, attention_mlp=[4], top_mlp=[16], activation="relu", init={"type": "normal", "std": 0.1})
    solver = Solver(batch_size=128, lr=0.01, epochs=3, patience=2, restore_best=True, device="cpu")
    return fit_two_stage(every, sources, din, solver, TwoStageSettings(num_candidates=10, max_history=8))


def test_validation_chooses_the_best_way(two_stage) -> None:
    best = max(two_stage.validation, key=two_stage.validation.get)
    assert two_stage.chosen == best
    assert set(two_stage.validation) == {"hstu", "item_knn", "popularity", "two stages"}
    assert two_stage.validation["item_knn"] > 2 * two_stage.validation["popularity"]
    assert two_stage.validation["two stages"] > two_stage.validation["hstu"]


def test_any_request_is_answered_or_refused(two_stage) -> None:
    both = two_stage.both
    asked = [[], [3, 4, 5], [3, 3, 3], [4, 999, -5, 0], list(range(3, ITEMS)), [2**40]]
    found = both.recommend(asked, k=10)
    assert found.items.shape == (6, 10)
    for history, items, scores in zip(asked, found.items, found.scores, strict=True):
        shown = items[items >= 0]
        assert len(set(shown)) == len(shown)
        assert not set(shown) & set(history)
        assert ((items >= 0) == np.isfinite(scores)).all()
        assert (np.diff(scores[items >= 0]) <= 0).all()
        assert (shown >= 3).all()
    assert (found.items[4] == -1).all()  # all seen
    assert (found.items[0] >= 0).all()  # popular ones
    whole = both.recommend([[3]], k=1000)
    assert sorted(whole.items[0, : RING - 1]) == list(range(4, ITEMS))
    assert (whole.items[0, RING - 1 :] == -1).all()
    again = both.recommend([[3, 4]], k=5, remove_seen=False, exclude=[[7, 8]])
    assert not set(again.items[0]) & {7, 8}
    assert {3, 4} <= set(both.recommend([[3, 4]], k=ITEMS, remove_seen=False).items[0])
    assert both.recommend([], k=3).items.shape == (0, 3)
    for wrong, kind, message in [
        ({"histories": [[3]], "k": 0}, ConfigError, "positive"),
        ({"histories": [[0.5]]}, SchemaError, "integer item ids"),
        ({"histories": [[3]], "exclude": [[3], [4]]}, SchemaError, "one list per history"),
        ({"histories": [[3]], "rows": {"age": [1, 2]}}, SchemaError, "a wrong number of rows"),
    ]:
        with pytest.raises(kind, match=message):
            both.recommend(**wrong)


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(two_stage) -> None:
    every = users(40, 3)
    whole = two_stage.both.recommend(every, k=5)
    alone = [two_stage.both.recommend(every.take([row]), k=5).items[0] for row in range(40)]
    assert (whole.items == np.stack(alone)).all()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda row: two_stage.both.recommend(every.take([row]), k=5).items[0], range(40)))
    assert (whole.items == np.stack(parts)).all()


def test_saved_and_loaded_it_recommends_the_same(two_stage, tmp_path) -> None:
    two_stage.both.save(tmp_path / "made")
    again = Recommender.load(tmp_path / "made", device="cpu")
    asked = users(30, 4)
    a, b = two_stage.both.recommend(asked, 5), again.recommend(asked, 5)
    assert (a.items == b.items).all()
    assert np.array_equal(a.scores, b.scores)
    assert (again.similar([5], 3).items == two_stage.both.similar([5], 3).items).all()
    for copied in (pickle.loads(pickle.dumps(again)), copy.deepcopy(again)):
        c = copied.recommend(asked, 5)
        assert (c.items == a.items).all()
        assert np.array_equal(c.scores, a.scores)
    two_stage.both.save(tmp_path / "made")  # an older one is replaced
    with pytest.raises(SchemaError, match="not in the catalogue"):
        again.similar([ITEMS], 3)
    with pytest.raises(SchemaError, match=f"allowed: 3 to {ITEMS - 1}"):
        again.similar([5, 2], 3)  # a reserved id
    # A model put in place of the one that the index was built of:
    two_stage.both.sources[0].model.save(tmp_path / "made" / "retrieval-hstu" / "other")
    other = tmp_path / "made" / "retrieval-hstu"
    listed = json.loads((other / "files.json").read_text())
    (other / "files.json").write_text(json.dumps(listed, indent=1))
    with pytest.raises(CheckpointError, match="another version of the model"):
        Recommender.load(tmp_path / "made", device="cpu")
    two_stage.both.save(tmp_path / "altered")
    file = tmp_path / "altered" / "fallback" / "counts.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="checksum differs"):
        Recommender.load(tmp_path / "altered", device="cpu")
    with pytest.raises(CheckpointError, match="no recommender found"):
        Recommender.load(tmp_path, device="cpu")


def test_stages_of_different_catalogues_are_refused(retrieval) -> None:
    with pytest.raises(ConfigError, match="different sizes"):
        Recommender([VectorSource(retrieval), Popularity(np.ones(ITEMS + 1))])
    with pytest.raises(ConfigError, match="different names"):
        Recommender([Popularity(np.ones(9)), Popularity(np.ones(9))])
    model = Model(Solver(device="cpu"), ranking_schema([], ITEMS, 4))
    model.add(DIN(dim=4, attention_mlp=[4], top_mlp=[4], activation="relu"))
    model.compile()
    assert Recommender(VectorSource(retrieval), model).recommend([[3]], 2).items.shape == (1, 2)
    own = Model(Solver(device="cpu"), Schema(labels=[{"name": "y"}], dense=[{"name": "age"}],
                                             categorical=[c.to_dict() for c in schema().categorical]))  # fmt: skip
    own.add(DIN(dim=4, attention_mlp=[4], top_mlp=[4], activation="relu"))
    own.compile()
    with pytest.raises(SchemaError, match=r"(?s)missing.*'age'.*pass it with"):
        Recommender(VectorSource(retrieval), own).recommend([[3]], 2)
    assert Recommender(VectorSource(retrieval), own).recommend([[3]], 2, rows={"age": [30.0]}).items[0, 0] > 2


def plain_neighbours(sequences, num_items, s: ItemKNNSettings) -> np.ndarray:
    events, weight = np.zeros(num_items), np.zeros((num_items, num_items))
    for one in sequences:
        for place, item in enumerate(one):
            events[item] += 1
            for later in range(place + 1, len(one)):
                if s.max_gap is None or later - place <= s.max_gap:
                    decay = s.gap_decay ** (later - place - 1)
                    weight[item, one[later]] += decay
                    weight[one[later], item] += decay * s.backward
    weight *= (np.outer(events, events) + 1) ** -s.popularity_power
    np.fill_diagonal(weight, 0)
    return weight


@pytest.mark.parametrize("settings", [
    ItemKNNSettings(), ItemKNNSettings(max_gap=2, gap_decay=0.5, backward=0.0),
    ItemKNNSettings(max_gap=None, gap_decay=1, backward=1, popularity_power=0.5, age_decay=1),
    ItemKNNSettings(max_gap=None, gap_decay=0.9),
])  # fmt: skip
@pytest.mark.parametrize("dense", [True, False])
def test_item_neighbours_equal_their_definition(settings, dense, monkeypatch) -> None:
    if not dense:
        monkeypatch.setattr("viviane.retrieval.item_knn._MOST_DENSE", 0)
    monkeypatch.setattr("viviane.retrieval.item_knn._MOST_WAITING", 50)
    every = users(40, 5)
    weight = plain_neighbours(every.lists(), ITEMS, settings)
    knn = ItemKNN.count(every, ITEMS, settings)
    asked = [[4, 5, 6], [], [9, 1, 400, -2]]
    expected = np.zeros((3, ITEMS))
    for row, history in enumerate(asked):
        known = [i for i in history if 3 <= i < ITEMS]
        for age, item in enumerate(known[::-1]):
            expected[row] += settings.age_decay**age * weight[item]
    np.testing.assert_allclose(knn.scores(Histories.of(asked)), expected, rtol=1e-5, atol=1e-7)
    found = knn.candidates(Histories.of(asked), 5)
    assert found.items[1].tolist() == [-1] * 5
    assert not set(found.items[0]) & {4, 5, 6}
    score = knn.score(Histories.of(asked), found.items)
    assert np.allclose(np.where(found.items < 0, 0, found.scores.clip(0)), score)


def test_features_by_hand() -> None:
    popular = Popularity(np.array([0, 0, 0, 8.0, 4.0, 0.0]))
    found = features([popular], Histories.of([[5]]), np.array([[3, 4, -1, 5]]), among=3)
    assert found["popularity_score"][0, :2].tolist() == [1.0, -1.0]  # mean 6, deviation 2
    assert found["popularity_score"][0, 3] == -3.0  # compared with the candidates, of which it is none
    assert found["popularity_rank"][0, [0, 1, 3]].tolist() == pytest.approx([0, np.log(2), np.log(3)])
    assert found["popularity_level"][0, 1] == pytest.approx(np.arcsinh(4.0))
    assert found["history_length"][0, 0] == pytest.approx(np.log(2.0))


def test_candidates_have_no_item_twice() -> None:
    made = Candidates(np.array([[5, 5, -1]]), np.array([[1.0, 0.5, -np.inf]], dtype=np.float32))
    assert made.first(2).items.tolist() == [[5, 5]]
    assert Popularity(np.ones(5)).candidates(Histories.of([[], [3, 4]]), 9).items.tolist() == [
        [3, 4, *[-1] * 7],
        [-1] * 9,
    ]
    assert Popularity(np.ones(4)).candidates(Histories.of([[]]), 1).items.tolist() == [[3]]


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_commands(retrieval, tmp_path) -> None:
    retrieval.save(tmp_path / "model")
    some = users(20, 6)
    rows = {"hist": [one[:-1][-8:].astype("int32") for one in some], "item": np.full(20, 3, dtype="int32"),
            "y": np.ones(20, dtype="float32")}  # fmt: skip
    write_dataset(tmp_path / "rows", schema(), [rows])
    out = run("index", "build", tmp_path / "model", "--data", tmp_path / "rows", "--kind", "exact")
    assert re.search(r"27 items x 8, exact, recall@10 1\.000", out)
    assert json.loads(run("index", "inspect", tmp_path / "model"))["items"] == 27
    run("recommend", tmp_path / "model", tmp_path / "rows", "--output", tmp_path / "out.parquet", "-k", 4)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["row", "rank", "item", "score"]
    assert table.num_rows == 80
    truth = Recommender(VectorSource(retrieval)).recommend([one[:-1] for one in some], 4)
    assert table.column("item").to_numpy().reshape(20, 4).tolist() == truth.items.tolist()
    assert run("recommend", tmp_path / "model", "--similar", "5,6", "-k", 2).count(":") == 2
    with pytest.raises(ConfigError, match="the output exists"):
        run("recommend", tmp_path / "model", tmp_path / "rows", "--output", tmp_path / "out.parquet")
    with pytest.raises(ConfigError, match="whole numbers"):
        run("recommend", tmp_path / "model", "--similar", "pen")
    with pytest.raises(ConfigError, match="input or the output is missing"):
        run("recommend", tmp_path / "model")
    misspelt = CliRunner().invoke(app, ["index", "biuld", str(tmp_path / "model")])
    assert misspelt.exit_code == 2
    assert "did you mean 'build'" in misspelt.output
    retrieval.save(tmp_path / "other")
    assert not (tmp_path / "other" / "index").exists()
    (tmp_path / "model" / "index").rename(tmp_path / "kept")
    listed = json.loads((tmp_path / "model" / "files.json").read_text())
    (tmp_path / "model" / "files.json").write_text(json.dumps(listed, indent=1))
    (tmp_path / "kept").rename(tmp_path / "model" / "index")
    with pytest.raises(CheckpointError, match="another version of the model"):
        run("recommend", tmp_path / "model", tmp_path / "rows", "--output", tmp_path / "new.csv")


def test_served_it_answers_what_it_recommends_in_process(two_stage, tmp_path) -> None:
    from viviane.cli.serve import _recommenders
    from viviane.cli.served_recommender import ServedRecommender
    from viviane.serving.server import InferenceServer, ServerSettings

    folder = two_stage.both.save(tmp_path / "ring")
    assert _recommenders([str(folder), f"other={folder}", "runs/dcn"]) == (
        {"ring": str(folder), "other": str(folder)}, ["runs/dcn"],
    )  # fmt: skip
    wanted = Recommender.load(folder, device="cpu").recommend([[5, 6, 7], []], k=4)
    settings = ServerSettings(http_port=0, grpc_port=None, max_rows=3)
    with InferenceServer(settings, "1", {"ring": ServedRecommender(folder, "cpu")}) as server:

        def ask(path: str, content: object = None) -> tuple[int, dict]:
            body = None if content is None else json.dumps(content).encode()
            request = urllib.request.Request(server.http_url + path, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)

        rows, path = [{"hist": [5, 6, 7]}, {"hist": []}], "/v1/recommenders/ring:recommend"
        status, answer = ask(path, {"instances": rows, "k": 4})
        assert status == 200
        for one, items, scores in zip(answer["recommendations"], wanted.items, wanted.scores, strict=True):
            assert one["items"] == items[items >= 0].tolist()
            np.testing.assert_array_equal(np.array(one["scores"], np.float32), scores[items >= 0])
        assert ask(path, {"instances": []}) == (200, {"recommendations": []})
        assert ask("/v2/health/ready")[0] == 200
        assert ask("/v1/recommenders")[1] == {"recommenders": ["ring"]}
        assert [one["name"] for one in ask("/v1/recommenders/ring")[1]["inputs"]] == ["hist"]
        for content, wrong in (
            ({"instances": rows, "k": 0}, 400), ({"instances": rows, "many": 1}, 400), ({"instances": rows * 2}, 413),
            ({"instances": [{"hist": ["x"]}]}, 400), ({"instances": [{}]}, 400), ({"instances": [3]}, 400), ([], 400),
            ({"instances": rows, "keep_seen": 1}, 400),
        ):  # fmt: skip
            status, answer = ask(path, content)
            assert status == wrong, answer
            assert answer["error"]
        assert ask("/v1/recommenders/none:recommend", {"instances": rows})[0] == 404
        assert ask("/v1/recommenders/none")[0] == 404


def first_sources() -> Recommender:
    known = users(30).before_last(1)
    return Recommender(
        [ItemKNN.count(known, ITEMS), Popularity.count(known, ITEMS)],
        fallback=Popularity.count(known, ITEMS), num_candidates=5,
    )  # fmt: skip


BIG = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("retrieval-item_knn/start.npy", lambda a: a.astype(np.float64)),
        ("retrieval-item_knn/start.npy", lambda a: np.r_[0, BIG, -BIG + 7, a[3:]]),
        ("retrieval-item_knn/start.npy", lambda a: a[::-1].copy()),
        ("retrieval-item_knn/item.npy", lambda a: np.where(a == a.max(), BIG, a)),
        ("retrieval-item_knn/item.npy", lambda a: a.astype(np.float64) + 0.5),
        ("retrieval-item_knn/weight.npy", lambda a: np.where(a == a.max(), np.nan, a)),
        ("retrieval-item_knn/weight.npy", lambda a: a.astype("U5")),
        ("retrieval-popularity/counts.npy", lambda a: a.reshape(-1, 1)),
        ("fallback/counts.npy", lambda a: np.where(a == a.max(), np.inf, a)),
    ],
)
def test_arrays_made_to_do_harm_are_refused(file, change, tmp_path) -> None:
    """With the right checksum, as anyone can write it."""
    folder = tmp_path / "rec"
    first_sources().save(folder)
    np.save(folder / file, change(np.load(folder / file)))
    content = json.loads((folder / "recommender.json").read_text())
    content["sha256"][file] = file_sha256(folder / file)
    (folder / "recommender.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        Recommender.load(folder)


def test_links_out_of_the_folder_are_refused(tmp_path) -> None:
    folder = tmp_path / "rec"
    first_sources().save(folder)
    (folder / "fallback/counts.npy").rename(tmp_path / "counts.npy")
    (folder / "fallback/counts.npy").symlink_to(tmp_path / "counts.npy")
    with pytest.raises(CheckpointError, match="symbolic link"):
        Recommender.load(folder)
