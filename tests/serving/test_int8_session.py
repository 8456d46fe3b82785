"""Sessions with tables of 8 bits: how far predictions move, how they are computed, and what is refused."""

import numpy as np
import pytest
import torch
from saved_models import ENCODED_ZOO, MULTI_TASK, encoded_rows, encoded_schema

import viviane as vv
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicOptions
from viviane.embedding.module_parts import collections_of
from viviane.ops import int8_rows
from viviane.serving import InferenceSession, ModelEntry, ModelRepository, RepositorySettings


def saved(name: str, folder, **solver):
    model = vv.Model(vv.Solver(device="cpu", seed=3, **solver), encoded_schema(name), name=name)
    model.add(ENCODED_ZOO[name])
    model.compile()
    return model, model.save(folder / name)


def dequantized(model) -> None:
    """Replace a model's rows by what their 8-bit form stands for."""
    for collection in collections_of(model.module).values():
        for storage in collection.all_storages():
            storage.weight.copy_(int8_rows.dequantize(int8_rows.quantize(storage.weight), storage.dim))


def stacked(scores) -> np.ndarray:
    return np.stack(list(scores.values()), 1) if isinstance(scores, dict) else scores[:, None]


FAST = ("dlrm", "dlrm_one_hot", "mmoe", "din")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in ENCODED_ZOO]
)
def test_predictions_are_those_of_the_rounded_tables(name, tmp_path) -> None:
    """Of every model: the same layers on the numbers that the 8-bit rows stand for; sums may be fused otherwise."""
    model, path = saved(name, tmp_path)
    rows = encoded_rows(33, encoded_schema(name))
    exact = model.predict(rows)
    dequantized(model)
    with InferenceSession(path, device="cpu", table_dtype="int8") as session:
        scores = stacked(session.predict(rows))
    assert scores.shape[1] == (2 if name in MULTI_TASK else 1)
    np.testing.assert_allclose(scores, model.predict(rows), rtol=2e-5, atol=2e-6)
    assert np.abs(scores - exact).max() < 0.02


def test_a_program_runs_them_and_tables_take_a_quarter(tmp_path) -> None:
    columns = [{"name": f"c{n}", "num_ids": 500} for n in range(4)]
    schema = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=columns)
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.DLRM(dim=64, bottom_mlp=[16], top_mlp=[16]))
    model.compile()
    path = model.save(tmp_path / "model")
    ids = np.random.default_rng(0).integers(0, 500, (300, 4))
    rows = {"x": np.linspace(-1, 1, 300, dtype="float32"), **{f"c{n}": ids[:, n] for n in range(4)}}
    dequantized(model)
    sizes = {}
    for kind in ("model", "int8"):
        with InferenceSession(path, device="cpu", table_dtype=kind, num_threads=2) as session:
            assert session.execution == "program"
            scores = session.predict(rows)
            assert np.array_equal(scores[:7], session.predict({name: values[:7] for name, values in rows.items()}))
            sizes[kind] = session.table_bytes
    np.testing.assert_allclose(scores, model.predict(rows)[:, 0], rtol=2e-5, atol=2e-6)
    assert sizes["int8"] / sizes["model"] == (64 + 8) / 256


def test_dense_layers_of_16_bits(tmp_path) -> None:
    model, path = saved("dlrm_one_hot", tmp_path)
    rows = encoded_rows(20, encoded_schema("dlrm_one_hot"))
    with InferenceSession(path, device="cpu", table_dtype="int8", precision="bf16") as session:
        assert np.abs(session.predict(rows) - model.predict(rows)[:, 0]).max() < 0.02


def test_what_has_no_8_bit_form_is_refused(tmp_path) -> None:
    _, path = saved("deepfm", tmp_path)
    with pytest.raises(ConfigError, match="tables in tiers"):
        InferenceSession(path, device="cpu", table_dtype="int8", tables={"cache": {"rows": 10}})
    with pytest.raises(ConfigError, match="table_dtype"):
        InferenceSession(path, device="cpu", table_dtype="int4")
    net = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="torch module"):
        InferenceSession(path, device="cpu", table_dtype="int8", module=net)
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "user", "kind": "one_hot", "num_ids": 50}])
    model = vv.Model(vv.Solver(device="cpu"), schema)
    model.add(vv.zoo.WideDeep(dim=4, deep_mlp=[8], dynamic=DynamicOptions()))
    model.compile()
    dynamic = model.save(tmp_path / "dynamic")
    with pytest.raises(ConfigError, match="only tables of fixed size"):
        InferenceSession(dynamic, device="cpu", table_dtype="int8")
    broken, path = saved("dcn", tmp_path)
    for collection in collections_of(broken.module).values():
        for storage in collection.all_storages():
            storage.weight[5, 1] = float("inf")
    path = broken.save(tmp_path / "broken")
    with pytest.raises(ConfigError, match="not finite") as error:
        InferenceSession(path, device="cpu", table_dtype="int8")
    assert "row 5" in error.value.where


def test_a_server_s_settings_ask_for_them(tmp_path) -> None:
    _, path = saved("dlrm_one_hot", tmp_path)
    clause = {"models": [{"name": "ctr", "path": str(path), "session": {"device": "cpu", "table_dtype": "int8"}}]}
    repository = ModelRepository(RepositorySettings.from_dict(clause))
    wanted = InferenceSession(path, device="cpu", table_dtype="int8")
    rows = encoded_rows(5, encoded_schema("dlrm_one_hot"))
    assert np.array_equal(repository.predict("ctr", rows), wanted.predict(rows))
    repository.close()
    assert ModelEntry.from_dict(clause["models"][0]).session.table_dtype == "int8"
