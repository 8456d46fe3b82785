"""Save and load: equal bits, and no file that was touched gets through."""

import hashlib
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from viviane.config import AdaGrad, Adam, Solver
from viviane.core.errors import CheckpointError, ConfigError, DataError, VivianeError
from viviane.data import Dataset
from viviane.etl import EtlConfig, run
from viviane.model import DenseLayer, Model, SparseEmbedding, read_model_file
from viviane.serving import InferenceSession
from viviane.zoo import DLRM


@pytest.fixture
def trained(build, data) -> Model:
    model = build()
    model.compile(Adam(lr=0.01), embedding_optimizer=AdaGrad(lr=0.1), metrics=["auc"])
    model.fit(data)
    return model


@pytest.fixture
def folder(trained, tmp_path):
    return trained.save(tmp_path / "saved")


def test_a_loaded_model_predicts_the_same_bits(trained, folder, valid) -> None:
    again = Model.load(folder, device="cpu")
    assert np.array_equal(again.predict(valid), trained.predict(valid))
    assert again.evaluate(valid) == trained.evaluate(valid)
    assert (again.name, again.metrics) == ("small", ("auc",))
    assert (again.optimizer, again.embedding_optimizer) == (trained.optimizer, trained.embedding_optimizer)
    assert again.nodes == trained.nodes


def test_a_loaded_model_trains_on_and_saves_over_itself(folder, data, valid) -> None:
    model = Model.load(folder, device="cpu")
    before = model.predict(valid)
    model.fit(data)
    model.save(folder)
    again = Model.load(folder, device="cpu").predict(valid)
    assert np.array_equal(again, model.predict(valid))
    assert not np.array_equal(again, before)


def test_frozen_and_untrainable_tables_are_saved_too(build, data, valid, tmp_path) -> None:
    model = build()
    model.nodes[1] = SparseEmbedding("emb", "cats", 4, tables={"user": {"trainable": False}})
    model.compile()
    model.freeze_embedding()
    model.fit(data)
    model.save(tmp_path / "m")
    assert np.array_equal(Model.load(tmp_path / "m", device="cpu").predict(valid), model.predict(valid))


def files_of(folder) -> list:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_every_file_that_is_altered_truncated_or_missing_is_named(folder, tmp_path) -> None:
    names = files_of(folder)
    assert {"model.json", "schema.json", "files.json", "weights/manifest.json"} < set(names)
    for name in names:
        for harm in ("alter", "cut", "remove"):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            file = copy / name
            content = file.read_bytes()
            if harm == "remove":
                file.unlink()
            else:
                middle = len(content) // 2
                changed = bytes([content[middle] ^ 1])
                file.write_bytes(content[:middle] + (changed + content[middle + 1 :] if harm == "alter" else b""))
            with pytest.raises(VivianeError) as caught:
                Model.load(copy, device="cpu")
            # files.json that was altered in one place accuses the file it speaks of; all others name themselves
            told = str(caught.value)
            assert name in told or (name == "files.json" and harm == "alter"), f"{harm} {name}: {told}"
            shutil.rmtree(copy)


def test_a_file_that_the_list_does_not_know_is_refused(folder) -> None:
    listed = json.loads((folder / "files.json").read_text())
    del listed["files"]["schema.json"]
    (folder / "files.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"list of files lacks schema\.json"):
        Model.load(folder)


def test_a_graph_of_the_same_length_is_an_altered_file(folder) -> None:
    """Its size is right, its JSON valid: the check sum alone tells."""
    file = folder / "model.json"
    text = file.read_text()
    name = json.loads(text)["name"]
    changed = text.replace(f'"name": "{name}"', f'"name": "{"x" * len(name)}"', 1)
    assert changed != text
    file.write_text(changed)
    with pytest.raises(CheckpointError, match="its check sum differs") as caught:
        Model.load(folder, device="cpu")
    assert "model.json" in str(caught.value)


def resize(folder, name: str, old: str, new: str) -> None:
    """Change a file of a model and list it again, as anyone can."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    listed = json.loads((folder / "files.json").read_text())
    content = (folder / name).read_bytes()
    listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "files.json").write_text(json.dumps(listed))


def test_a_table_that_is_larger_than_its_weights_takes_no_memory(folder) -> None:
    """At 2^31 ids a table of 4 columns takes 32 GiB."""
    resize(folder, "schema.json", '"num_ids": 30', '"num_ids": 2147483646')
    for load in (Model.load, InferenceSession):
        with pytest.raises(CheckpointError, match="a table of the model has another size") as caught:
            load(folder, device="cpu")
        assert "'emb.user'" in str(caught.value)
        assert "30 x 4" in str(caught.value)


def test_a_layer_that_is_larger_than_all_weights_takes_no_memory(folder) -> None:
    resize(folder, "model.json", "16", "300000000")
    for load in (Model.load, InferenceSession):
        with pytest.raises(ConfigError, match="a weight is larger than the file of all weights") as caught:
            load(folder, device="cpu")
        assert "layer 'deep'" in str(caught.value)


def test_a_graph_that_got_more_nodes_is_not_bound_by_the_saved_weights(folder) -> None:
    model = Model.blueprint(folder, device="cpu")
    model.nodes.pop()
    model.add(DenseLayer("wide", "MLP", bottom="x", num_outputs=[400, 1], act_type="none"))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["wide", "label"]))
    model.compile()
    assert model.module.wide.layers[0].weight.shape[0] == 400


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..\\secret", "weights/../../secret", ""])
def test_names_in_the_list_stay_in_the_folder(folder, name) -> None:
    """With the right size and check sum, as an attacker who knows the file would list it."""
    secret = folder.parent / "secret"
    secret.write_text("x")
    listed = json.loads((folder / "files.json").read_text())
    listed["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / "files.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        Model.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["schema.json", "weights", "weights/dense.safetensors"])
def test_links_out_of_the_folder_are_refused(folder, name) -> None:
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="symbolic link"):
        Model.load(folder, device="cpu")


def test_a_model_in_the_cache_of_hugging_face_is_read_through_its_links(trained, folder, valid, tmp_path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0f3a"
    blobs.mkdir(parents=True)
    for number, name in enumerate(files_of(folder)):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to((folder / name).rename(blobs / str(number)))
    np.testing.assert_array_equal(Model.load(snapshot, device="cpu").predict(valid), trained.predict(valid))


def test_an_etl_that_is_not_listed_is_not_read(folder) -> None:
    """Else anybody could put another one next to the model."""
    (folder / "etl.zip").write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"lacks etl\.zip"):
        Model.load(folder, device="cpu")


def test_a_folder_that_is_no_model_is_neither_loaded_nor_replaced(model, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="no saved model here"):
        Model.load(tmp_path)
    model.compile()
    with pytest.raises(ConfigError, match="not a saved model, so it is not replaced"):
        model.save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_did_not_finish_says_how_to_go_on(tmp_path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="--resume"):
        Model.load(tmp_path)


def test_the_graph_as_json_builds_the_same_model(build, data, valid, tmp_path) -> None:
    model = build()
    text = model.to_json(tmp_path / "graph.json")
    assert (tmp_path / "graph.json").read_text() == text
    again = Model.from_json(tmp_path / "graph.json", build().solver, data)
    assert again.nodes == model.nodes
    assert again.name == "small"
    for one in (model, again):
        one.compile()
        one.fit(data)
    assert np.array_equal(again.predict(valid), model.predict(valid))
    assert again.to_json() == text
    assert Model.from_json(json.loads(text), Solver(), data).nodes == model.nodes


def test_json_mistakes_are_named(build, tmp_path) -> None:
    good = json.loads(build().to_json())
    file = tmp_path / "graph.json"

    def read(**changes):
        file.write_text(json.dumps({**good, **changes}))
        return read_model_file(file)

    with pytest.raises(ConfigError, match=r"(?s)graph\.json, nodse.*did you mean 'nodes'"):
        read(nodse=[])
    with pytest.raises(ConfigError, match=r"(?s)graph\.json, version"):
        read(version=2)
    with pytest.raises(ConfigError, match=r"(?s)graph\.json, format"):
        read(format="other")
    with pytest.raises(ConfigError, match=r"(?s)graph\.json, nodes\.1\.SparseEmbedding\.dim"):
        read(nodes=[good["nodes"][0], {**good["nodes"][1], "dim": 0}])
    with pytest.raises(ConfigError, match=r"(?s)unknown layer.*'deep'.*did you mean 'MLP'"):
        read(nodes=[{**good["nodes"][4], "type": "MPL"}])
    file.write_text('{"nodes": [')
    with pytest.raises(ConfigError, match=r"graph\.json, line 1"):
        read_model_file(file)


def test_the_etl_travels_with_the_model(tmp_path) -> None:
    raw = tmp_path / "raw.csv"
    lines = [f"{i % 2},{'ab'[i % 2]},{i}" for i in range(200)]
    raw.write_text("click,item,price\n" + "\n".join(lines) + "\n")
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]},
        labels=[{"name": "click"}],
        dense=[{"name": "price"}],
        categorical=[{"name": "item"}],
    )
    run(config, raw, tmp_path / "data")
    data = Dataset(tmp_path / "data" / "train")
    model = Model(Solver(batch_size=50, lr=0.1, device="cpu"), data)
    model.add(DLRM(dim=2, bottom_mlp=[], top_mlp=[4]))
    model.compile()
    model.fit(data)
    table = pa.table({"price": ["3", "4"], "item": ["b", "never seen"]})  # no label, text, another order
    expected = model.predict({"price": [3.0, 4.0], "item": [int(data.head(2).one_hot[1, 0]), 2]})
    assert np.array_equal(model.predict(table, raw=True), expected)
    model.save(tmp_path / "model")
    shutil.rmtree(tmp_path / "data")
    again = Model.load(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict(table, raw=True), expected)
    assert np.array_equal(again.predict(table.to_pandas(), raw=True), expected)
    again.save(tmp_path / "second")
    assert (tmp_path / "second" / "etl.zip").exists()
    with pytest.raises(DataError, match=r"(?s)ETL of the model's data is gone.*etl\.zip"):
        model.save(tmp_path / "third")
