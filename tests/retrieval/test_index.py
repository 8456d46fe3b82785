"""Indexes: what they find against exact search, their files, and what is refused."""

import copy
import importlib.util
import pickle

import numpy as np
import pytest

from viviane.core.errors import CheckpointError, ConfigError, SchemaError
from viviane.retrieval import IndexSettings, ItemIndex

HAS_FAISS = importlib.util.find_spec("faiss") is not None
KINDS = ["exact", *(["flat", "ivf", "hnsw", "sq8"] if HAS_FAISS else [])]


def made(kind, n=500, d=16, **options) -> tuple[ItemIndex, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, d))
    vectors = (centres[rng.integers(0, 10, n)] + 0.3 * rng.normal(size=(n, d))).astype("float32")
    ids = rng.permutation(2 * n)[:n] + 3
    settings = IndexSettings(kind=kind, num_lists=10, num_probes=4) if kind in ("ivf", "sq8") else kind
    return ItemIndex(vectors, ids, settings, num_items=2 * n + 3, **options), rng.normal(size=(40, d)).astype("float32")


@pytest.mark.parametrize("kind", KINDS)
def test_finds_the_nearest_and_survives_saving(kind, tmp_path):
    index, queries = made(kind, model="abc")
    truth = np.argsort(-(queries @ index.vectors.T), 1)[:, :10]
    found = index.search(queries, 10)
    hits = (found.items[:, :, None] == index.ids[truth][:, None, :]).any(2).mean()
    assert hits == 1.0 if kind in ("exact", "flat") else hits > 0.8
    assert (np.diff(found.scores, axis=1) <= 0).all()
    recall = index.measure_recall(queries, [1, 10, 100])
    assert recall["10"] >= hits - 1e-9
    index.save(tmp_path / "index")
    again = ItemIndex.load(tmp_path / "index", model="abc")
    assert again.recall == recall
    assert (again.search(queries, 10).items == found.items).all()
    for copied in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        assert copied.recall == recall
        assert (copied.search(queries, 10).items == found.items).all()
    # More than there are, from one query alone:
    few = again.search(queries[:1], 2000)
    assert few.items.shape == (1, 2000)
    if kind in ("exact", "flat"):
        assert sorted(few.items[0, :500]) == sorted(index.ids)
        assert (few.items[0, 500:] == -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_item_and_equal_vectors(kind):
    one = ItemIndex(np.ones((1, 2), dtype="float32"), [5], kind)
    assert one.search(np.ones((2, 2), dtype="float32"), 3).items.tolist() == [[5, -1, -1]] * 2
    equal = ItemIndex(np.ones((4, 2), dtype="float32"), [9, 8, 7, 6], kind)
    assert equal.search(np.ones((1, 2), dtype="float32"), 4).items.tolist() == [[6, 7, 8, 9]]
    assert equal.measure_recall(np.ones((1, 2), dtype="float32"), [2])["2"] == 1.0 or kind == "sq8"
    assert one.search(np.empty((0, 2), dtype="float32"), 3).items.shape == (0, 3)


def test_vectors_of_items():
    index, _ = made("exact")
    found = index.vectors_of(np.array([[index.ids[7], 0], [-1, index.ids[0]]]))
    assert (found[0, 0] == index.vectors[7]).all()
    assert (found[1, 1] == index.vectors[0]).all()
    assert not found[0, 1].any()
    assert not found[1, 0].any()


BAD = [
    ({"vectors": np.ones((2, 2)), "ids": [3, 3]}, "occurs twice"),
    ({"vectors": np.ones((2, 2)), "ids": [3]}, "one id per vector is needed"),
    ({"vectors": np.array([[1.0, np.nan]]), "ids": [3]}, "not finite"),
    ({"vectors": np.ones((0, 2)), "ids": []}, "needs vectors"),
    ({"vectors": np.ones((1, 2)), "ids": [-3]}, "out of range"),
    ({"vectors": np.ones((1, 2)), "ids": [9], "num_items": 9}, "out of range"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_wrong_vectors_are_refused(options, message):
    with pytest.raises(SchemaError, match=message):
        ItemIndex(**options)


def test_wrong_queries_are_refused():
    index, queries = made("exact")
    with pytest.raises(SchemaError, match="the width of the items"):
        index.search(queries[:, :3], 2)
    with pytest.raises(SchemaError, match=r"(?s)not finite.*row 1"):
        index.search(np.array([queries[0], queries[1] * np.inf]), 2)
    with pytest.raises(ConfigError, match="positive"):
        index.search(queries, 0)


def test_files_that_were_altered_are_refused(tmp_path):
    index, _ = made("exact", model="abc")
    folder = tmp_path / "index"
    index.save(folder)
    with pytest.raises(CheckpointError, match="another version of the model"):
        ItemIndex.load(folder, model="abd")
    with pytest.raises(CheckpointError, match="no index found"):
        ItemIndex.load(tmp_path)
    content = (folder / "index.json").read_text()
    for wrong, message in [
        (content.replace('"exact"', '"sq9"'), "cannot be read"),
        (content.replace('"exact"', '"ivf"'), "does not match its kind"),
        (content.replace('"ids.npy"', '"../ids.npy"'), "lacks ids.npy"),
        ("{", "cannot be read"),
    ]:
        (folder / "index.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=message):
            ItemIndex.load(folder)
    (folder / "index.json").write_text(content)
    data = bytearray((folder / "vectors.npy").read_bytes())
    data[-1] ^= 1
    (folder / "vectors.npy").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="checksum differs"):
        ItemIndex.load(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not replaced"):
        index.save(tmp_path / "other")


@pytest.mark.skipif(not HAS_FAISS, reason="needs faiss")
def test_more_lists_than_vectors_are_refused():
    with pytest.raises(ConfigError, match="more lists than vectors"):
        ItemIndex(np.ones((3, 2), dtype="float32"), [3, 4, 5], IndexSettings(kind="ivf", num_lists=4))
