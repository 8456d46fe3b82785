"""Artifact folders: damaged and crafted ones, other machines, wrong inputs, new weights."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch
from export_models import MANY, PAIR, ZOO, labels, made, rows, strengthen
from torch import nn

from viviane.batch import Batch
from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, DataError, ExportError, KeyRangeError, SchemaError, VivianeError
from viviane.embedding import EmbeddingBag
from viviane.export import export, load
from viviane.export.forms import aoti, torchscript
from viviane.export.machine import Requirements
from viviane.export.manifest import MANIFEST_FILE, _seal
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import DLRM, NCF, DeepFM


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A small model, saved, and exported as TorchScript."""
    folder = tmp_path_factory.mktemp("pair")
    model = made(ZOO["ncf"][0], PAIR)
    model.save(folder / "model")
    export(folder / "model", "torchscript", folder / "exported")
    return model, folder


@pytest.fixture
def copied(pair, tmp_path):
    shutil.copytree(pair[1] / "exported", tmp_path / "exported")
    return tmp_path / "exported"


def test_a_saved_model_and_its_artifact_agree(pair) -> None:
    model, folder = pair
    artifact = load(folder / "exported")
    given = rows(PAIR, 50)
    np.testing.assert_allclose(artifact.predict(given), model.predict(given), atol=1e-6)  # the order of sums differs
    batch = Batch.from_columns(PAIR, given)
    assert np.array_equal(artifact.run_batch(batch).numpy(), artifact(given))
    assert np.array_equal(artifact.run({"one_hot": batch.one_hot.numpy()}).numpy(), artifact(given))
    assert artifact.labels == ("click",)
    assert [one.name for one in artifact.inputs] == ["one_hot"]  # no dense columns, no bags
    assert load(folder / "exported", checksum=json.loads((folder / "exported" / MANIFEST_FILE).read_text())["sha256"])
    with pytest.raises(ExportError, match="not the expected one"):
        load(folder / "exported", checksum="0" * 64)


@pytest.mark.parametrize("name", ["torchscript.pt", "schema.json", "parity.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "append"])
def test_damage_is_found_and_named(copied, name, damage) -> None:
    file = copied / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        if damage == "truncate":
            del content[len(content) // 2 :]
        elif damage == "flip":
            content[len(content) // 2] ^= 1
        else:
            content += b"x"
        file.write_bytes(bytes(content))
    with pytest.raises(ExportError):
        load(copied)


def rewrite(folder, change) -> None:
    """Alter a manifest as somebody would who knows how it is sealed."""
    body = json.loads((folder / MANIFEST_FILE).read_text())
    body.pop("sha256")
    change(body)
    (folder / MANIFEST_FILE).write_text(json.dumps({**body, "sha256": _seal(body)}))


def test_a_crafted_manifest_reads_nothing_outside(copied, tmp_path) -> None:
    (tmp_path / "secret.pt").write_bytes(b"x")

    whole = (copied / MANIFEST_FILE).read_bytes()

    def outside(name):
        def change(body):
            body["forms"]["torchscript"]["files"] = [name]
            body["files"][name] = {"bytes": 1, "sha256": "0" * 64}

        return change

    for name in ("../secret.pt", str(tmp_path / "secret.pt"), "a/../../secret.pt", ""):
        rewrite(copied, outside(name))
        with pytest.raises(ExportError):
            load(copied)
        (copied / MANIFEST_FILE).write_bytes(whole)
    rewrite(copied, outside("link.pt"))
    (copied / "link.pt").symlink_to(tmp_path / "secret.pt")
    with pytest.raises(ExportError, match="symbolic link"):
        load(copied)


CRAFTED = [
    (lambda b: b.update(version=2), "unsupported format version"),
    (lambda b: b.update(format="pickle"), "not an exported model"),
    (lambda b: b.update(surprise=1), "unknown key"),
    (lambda b: b.update(forms={}), "at least 1"),
    (lambda b: b.update(inputs=[]), "at least 1"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(torch_from="99.0"), "another version of torch"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(torch_below="1.0"), "another version of torch"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(torch_from="new"), "match pattern"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(device="tpu"), "'cpu' or 'cuda'"),
    (lambda b: b["inputs"][0].update(columns=[]), "not one of its columns"),
    (lambda b: b["inputs"][0].update(kind="values", columns=[]), "not one of its columns"),
    (lambda b: b["inputs"][0].update(shape=["batch", 1 << 40]), "not one of its columns"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(architecture="vax"), "processor of another kind"),
    (lambda b: b["forms"]["torchscript"]["requires"].update(cpu_flags=["avx1024"]), "avx1024"),
]


@pytest.mark.parametrize(("change", "message"), CRAFTED)
def test_crafted_manifests_are_refused(copied, change, message) -> None:
    rewrite(copied, change)
    with pytest.raises(VivianeError, match=message):
        load(copied)


def test_deep_and_huge_manifests_are_refused(copied) -> None:
    (copied / MANIFEST_FILE).write_text("[" * 100_000)
    with pytest.raises(ExportError, match="truncated or altered"):
        load(copied)
    (copied / "surprise.py").write_text("x")
    shutil.copy(copied / "surprise.py", copied / MANIFEST_FILE)
    with pytest.raises(ExportError):
        load(copied)


def test_files_that_do_not_belong_are_refused(copied) -> None:
    (copied / "more.bin").write_bytes(b"x")
    with pytest.raises(ExportError, match="does not belong"):
        load(copied)


def test_another_gpu_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ExportError, match=r"(?s)another architecture.*capability 8\.0.*capability 9\.0"):
        Requirements(device="cuda", capability="9.0").check("aoti", tmp_path)
    Requirements(device="cuda", capability="8.0").check("aoti", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExportError, match="it has no GPU"):
        Requirements(device="cuda").check("aoti", tmp_path)


WRONG = [
    ({"one_hot": np.zeros((2, 3), dtype="int64")}, "input's shape differs"),
    ({"one_hot": np.zeros((2, 2), dtype="float32")}, "must be integers"),
    ({"one_hot": np.zeros(2, dtype="int64")}, "input's shape differs"),
    ({}, "missing"),
    ({"one_hot": np.zeros((1, 2), dtype="int64"), "ids": np.zeros(1)}, "unknown input"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_inputs_are_named(pair, given, message) -> None:
    with pytest.raises(DataError, match=message):
        load(pair[1] / "exported").run(given)


def test_wrong_keys_name_column_and_row(pair) -> None:
    artifact = load(pair[1] / "exported")
    with pytest.raises(KeyRangeError, match=r"(?s)column 'item'.*row 1 of the batch.*43"):
        artifact.predict({"user": [3, 4], "item": [5, 43]})
    with pytest.raises(KeyRangeError, match=r"(?s)column 'user'.*-1"):
        artifact.run({"one_hot": torch.tensor([[-1, 0]])})
    with pytest.raises(SchemaError):
        artifact.predict({"user": [3, 4]})
    with pytest.raises(ConfigError, match="has no ETL"):
        artifact.predict(pa.table({"user": [3]}), raw=True)


def test_bags_of_wrong_lengths_are_named(tmp_path) -> None:
    export(made(ZOO["din"][0], MANY), "torchscript", tmp_path / "e")
    artifact = load(tmp_path / "e")
    given = rows(MANY, 3)
    with pytest.raises(DataError, match=r"(?s)longer than.*column 'hist'.*row 1.*at most 8"):
        artifact.predict(given | {"hist": [[1], [2] * 9, [3]]})
    named = {one.name: one for one in artifact.inputs}
    inputs = {name: np.zeros([2 if size == "batch" else size if isinstance(size, int) else 3 for size in one.shape],
                             dtype=one.dtype) for name, one in named.items()}  # fmt: skip
    lengths = {name: np.array([1, 2]) for name in named if name.startswith("lengths/")}
    assert artifact.run(inputs | lengths).shape == (2, 1)
    for bad in ([1, 1], [-1, 4], [2**62, 2**62]):
        with pytest.raises(DataError, match="add up"):
            artifact.run(inputs | lengths | {"lengths/hist": np.array(bad)})
    with pytest.raises(DataError, match="differ in size"):
        artifact.run(inputs | lengths | {"lengths/hist": np.array([1, 1, 1])})


class Wide(nn.Module):
    """A module of one's own that reads everything, with a name that nn.Module uses."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        from viviane.config import SGD
        from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig

        columns = schema.categorical
        tables = [TableConfig(name=c.name, num_rows=c.id_range, dim=3, padding_id=0) for c in columns]
        features = [FeatureConfig(name=c.name, table=c.name, combiner="mean") for c in columns]
        self.tables = EmbeddingCollection(tables, features, SGD())
        self.out = nn.Linear(self.tables.width + schema.num_dense, len(schema.labels))

    def forward(self, batch):
        return self.out(torch.cat([self.tables(batch).flat, batch.dense], 1))


ODD = Schema(
    labels=[{"name": "click/any"}, {"name": "é"}],
    dense=[{"name": "dense"}, {"name": "a b"}],
    categorical=[
        {"name": "one_hot", "num_ids": 3},
        {"name": "values/x", "num_ids": 5, "kind": "multi_hot"},
        {"name": "lengths/values/x", "num_ids": 1, "kind": "multi_hot"},
        {"name": "x.y:z", "num_ids": 4, "kind": "sequence", "max_length": 2},
        {"name": "'; --", "num_ids": 1},
    ],
)


@pytest.mark.parametrize("form", ["torch-export", "torchscript", pytest.param("onnx", marks=pytest.mark.slow)])
def test_odd_names_and_tables_of_one_row(form, tmp_path) -> None:
    torch.manual_seed(0)
    model = Model(Solver(device="cpu"), ODD, module=Wide(ODD))
    model.compile(Adam())
    strengthen(model)
    export(model, form, tmp_path / "e")
    given = rows(ODD, 9)
    np.testing.assert_allclose(load(tmp_path / "e").predict(given), model.predict(given), atol=1e-6)


def test_a_saved_module_of_ones_own_is_exported_with_the_module(tmp_path) -> None:
    model = Model(Solver(device="cpu"), ODD, module=Wide(ODD))
    model.compile(Adam())
    model.save(tmp_path / "model")
    export(tmp_path / "model", "torchscript", tmp_path / "e", module=Wide(ODD))
    given = rows(ODD, 4)
    np.testing.assert_allclose(load(tmp_path / "e").predict(given), model.predict(given), atol=1e-6)
    with pytest.raises(ConfigError, match="made from a torch module"):
        export(tmp_path / "model", "torchscript", tmp_path / "e")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)

    def forward(self, batch):
        return self.out(batch.dense if batch.dense.sum() > 0 else -batch.dense)


class Wrong(nn.Module):
    """Another result when traced."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)

    def forward(self, batch):
        return self.out(batch.dense) + (0.01 if torch.compiler.is_compiling() or torch.jit.is_tracing() else 0.0)


DENSE = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])


def dense_model(module: nn.Module) -> Model:
    model = Model(Solver(device="cpu"), DENSE, module=module)
    model.compile(Adam())
    return model


def test_what_cannot_be_traced_is_said_and_nothing_is_written(tmp_path) -> None:
    with pytest.raises(ExportError, match=r"(?s)cannot be traced.*Branches"):
        export(dense_model(Branches()), "torch-export", tmp_path / "e")
    for form in ("torch-export", "torchscript"):
        with pytest.raises(ExportError, match=r"differs from the model, so it is not written"):
            export(dense_model(Wrong()), form, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_models_without_sparse_features(tmp_path) -> None:
    model = dense_model(nn.Sequential(DenseOnly(), nn.Linear(1, 1)))
    export(model, ["torch-export", "torchscript"], tmp_path / "e")
    for form in ("torch-export", "torchscript"):
        np.testing.assert_allclose(load(tmp_path / "e", form).predict({"x": [1.0]}), model.predict({"x": [1.0]}))


class DenseOnly(nn.Module):
    def forward(self, batch):
        return batch.dense


def test_a_form_that_answers_for_refused_keys_is_not_written(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("viviane.export.plain.BEYOND", 0)
    with pytest.raises(ExportError, match="accepts a key that its table refuses"):
        export(made(ZOO["ncf"][0], PAIR), "torchscript", tmp_path / "e")


def test_a_folder_of_something_else_is_not_replaced(pair, tmp_path) -> None:
    model, _ = pair
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an exported model"):
        export(model, "torchscript", tmp_path / "mine")
    export(model, "torchscript", tmp_path / "e")
    before = (tmp_path / "e" / MANIFEST_FILE).read_bytes()
    monkey = torchscript.write
    try:
        torchscript.write = lambda trace, folder: (_ for _ in ()).throw(ExportError("no"))
        with pytest.raises(ExportError):
            export(model, "torchscript", tmp_path / "e")
    finally:
        torchscript.write = monkey
    assert (tmp_path / "e" / MANIFEST_FILE).read_bytes() == before
    export(model, "torchscript", tmp_path / "e")  # an older export is replaced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "onxx"}, "did you mean 'onnx'"),
        ({"to": []}, "at least one form"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"tables": "nowhere"}, "unknown tables"),
        ({"operators": "mine"}, "unknown operators"),
        ({"tables": "model"}, "needs a saved model"),
        ({"tables": "beside", "dense_only": True}, "has no tables"),
    ],
)
def test_wrong_options_are_named(pair, tmp_path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        export(pair[0], **{"to": "torchscript", "output": tmp_path / "e", **options})


@pytest.mark.parametrize("form", ["torch-export", "torchscript", pytest.param("onnx", marks=pytest.mark.slow)])
def test_tables_beside_and_in_the_models_folder(form, tmp_path) -> None:
    model = made(DeepFM(dim=4, deep_mlp=[8]), MANY)
    model.save(tmp_path / "model")
    given = rows(MANY, 20)
    for where in ("beside", "model"):
        export(tmp_path / "model", form, tmp_path / f"exported_{where}", tables=where)
        artifact = load(tmp_path / f"exported_{where}", **({"model": tmp_path / "model"} if where == "model" else {}))
        np.testing.assert_allclose(artifact.predict(given), model.predict(given), atol=1e-6)
    with pytest.raises(ConfigError, match="reads its tables from the saved model"):
        load(tmp_path / "exported_model")
    other = made(ZOO["ncf"][0], PAIR)
    other.save(tmp_path / "other")
    with pytest.raises(ExportError, match="differs from the artifact"):
        load(tmp_path / "exported_model", model=tmp_path / "other")


@pytest.mark.parametrize("form", ["torch-export", "torchscript"])
def test_new_weights(form, pair, tmp_path) -> None:
    model = pair[0]
    export(model, form, tmp_path / "e")
    artifact = load(tmp_path / "e")
    second = made(ZOO["ncf"][0], PAIR)
    strengthen(second, seed=9)
    given = rows(PAIR, 20)
    assert not np.allclose(second.predict(given), model.predict(given))
    artifact.update(second)
    np.testing.assert_allclose(artifact.predict(given), second.predict(given), atol=1e-6)
    assert np.array_equal(model.predict(given), pair[0].predict(given))
    with pytest.raises(ExportError, match="weight differs"):
        artifact.update(made(NCF(dim=4), PAIR))
    np.testing.assert_allclose(artifact.predict(given), second.predict(given), atol=1e-6)


def test_new_weights_of_a_dynamic_table_with_other_keys_are_refused(tmp_path) -> None:
    model = made(DLRM(dim=4, bottom_mlp=[4], top_mlp=[4]), MANY)
    export(model, "torchscript", tmp_path / "e")
    artifact = load(tmp_path / "e")
    model.trainer.train_step(Batch.from_columns(MANY, rows(MANY, 64, 7, raw_range=10**9) | labels(MANY, 64)))
    with pytest.raises(ExportError, match="shape or type of a weight differs"):
        artifact.update(model)


def test_averaged_weights_are_what_is_exported(tmp_path) -> None:
    model = made(ZOO["ncf"][0], PAIR, solver={"ema_decay": 0.9})
    for seed in range(3):
        model.trainer.train_step(Batch.from_columns(PAIR, rows(PAIR, 16, seed) | labels(PAIR, 16)), lr=0.5)
    export(model, "torchscript", tmp_path / "e")
    given = rows(PAIR, 20)
    np.testing.assert_allclose(load(tmp_path / "e").predict(given), model.predict(given), atol=1e-6)


def test_a_fresh_process_loads_it(pair, warm, tmp_path) -> None:
    model, folder = pair
    np.save(tmp_path / "expected.npy", model.predict(rows(PAIR, 5)))
    program = f"""
import numpy as np
import viviane as vv
found = vv.export.load({str(folder / "exported")!r}).predict({{"user": {rows(PAIR, 5)["user"].tolist()},
                                                              "item": {rows(PAIR, 5)["item"].tolist()}}})
assert np.array_equal(found, np.load("expected.npy")), found
"""
    done = warm.run(["-c", program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_compiler_is_said_before_anything_is_done(monkeypatch, pair, tmp_path) -> None:
    import torch._inductor.cpp_builder as builder

    def nothing():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(builder, "get_cpp_compiler", nothing)
    with pytest.raises(ExportError, match=r"(?s)none was found.*g\+\+"):
        export(pair[0], "aoti", tmp_path / "e")


def test_machine_code_that_ends_the_process_is_an_error(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(aoti, "_LOADER", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(ExportError, match=r"(?s)ends the process that loads it.*SIGSEGV.*torch-export"):
        aoti.check_loads(tmp_path / "program")
    monkeypatch.setattr(aoti, "_LOADER", "raise ValueError('no such file')")  # which loading it here says better
    aoti.check_loads(tmp_path / "program")


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = EmbeddingBag(43, 4, mode="sum")
        self.out = nn.Linear(4, 1)

    def forward(self, batch):
        return self.out(self.bag(batch.one_hot))


def test_an_embedding_bag_in_a_module_of_ones_own(tmp_path) -> None:
    model = Model(Solver(device="cpu"), PAIR, module=Pooled())
    model.compile(Adam())
    strengthen(model)
    export(model, "torchscript", tmp_path / "e")
    given = rows(PAIR, 9)
    np.testing.assert_allclose(load(tmp_path / "e").predict(given), model.predict(given), atol=1e-6)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "mean", "scale_grad_by_freq": True}])
def test_an_embedding_bag_that_pools_single_vectors(tmp_path, options) -> None:
    module = Pooled()
    module.bag = EmbeddingBag(43, 4, **options)
    model = Model(Solver(device="cpu"), PAIR, module=module)
    model.compile(Adam())
    strengthen(model)
    export(model, "torchscript", tmp_path / "e")
    given = rows(PAIR, 9)
    np.testing.assert_allclose(load(tmp_path / "e").predict(given), model.predict(given), atol=1e-6)


def test_an_embedding_bag_that_changes_rows_is_not_exported(tmp_path) -> None:
    module = Pooled()
    module.bag = EmbeddingBag(43, 4, max_norm=1.0)
    model = Model(Solver(device="cpu"), PAIR, module=module)
    model.compile(Adam())
    with pytest.raises(ConfigError, match="max_norm"):
        export(model, "torchscript", tmp_path / "e")


def test_several_threads_predict_at_once(pair) -> None:
    model, folder = pair
    artifact = load(folder / "exported")
    expected = {seed: artifact.predict(rows(PAIR, seed + 1, seed)) for seed in range(20)}
    np.testing.assert_allclose(expected[19], model.predict(rows(PAIR, 20, 19)), atol=1e-6)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: artifact.predict(rows(PAIR, seed + 1, seed)), [*range(20)] * 3))
    assert all(np.array_equal(one, expected[i % 20]) for i, one in enumerate(found))
