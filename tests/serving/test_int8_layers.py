"""Sessions with layers of 8 bits: how far predictions move, that rows stay apart, and what is refused."""

import numpy as np
import pytest
import torch
from saved_models import ENCODED_ZOO, encoded_rows, encoded_schema

import viviane as vv
from viviane.core.errors import ConfigError
from viviane.ops.linear.cpu_int8 import reason_against_int8
from viviane.serving import InferenceSession, ModelEntry, ModelRepository, RepositorySettings
from viviane.serving.errors import RowsError

REASON = reason_against_int8()
needs_vnni = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def dcn(tmp_path_factory: pytest.TempPathFactory):
    """A DCN v2 whose layers are all large enough, and rows for it."""
    columns = [{"name": f"c{n}", "num_ids": 500} for n in range(4)]
    schema = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x", "dim": 16}], categorical=columns)
    model = vv.Model(vv.Solver(device="cpu", seed=1), schema)
    model.add(vv.Input(label="label", dense="dense", sparse="cats"))
    model.add(vv.DenseLayer("bottom", "MLP", bottom="dense", num_outputs=[64, 16]))
    model.add(vv.SparseEmbedding("emb", bottom="cats", dim=16))
    model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(vv.DenseLayer("x0", "Concat", bottom=["bottom", "flat"]))
    model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=2, projection_dim=24))
    model.add(vv.DenseLayer("top", "MLP", bottom="cross", num_outputs=[70, 1], activations=["relu", "none"]))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["top", "label"]))
    model.compile()
    for parameter in model.trainer.stepper.parameters.values():  # biases begin as zeros
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(300, 16)).astype("float32"), **{f"c{n}": rng.integers(0, 500, 300) for n in range(4)}}
    return model, model.save(tmp_path_factory.mktemp("dcn") / "model"), rows


def test_a_program_of_a_concatenation_whose_vectors_come_last(dcn) -> None:
    model, path, rows = dcn
    with InferenceSession(path, device="cpu") as session:
        assert session.execution == "program"
        assert np.array_equal(session.predict(rows), model.predict(rows)[:, 0])


@needs_vnni
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tables", ["model", "int8"])
def test_predictions_move_little_and_rows_stay_apart(dcn, threads, tables) -> None:
    model, path, rows = dcn
    with InferenceSession(
        path, device="cpu", layer_dtype="int8", table_dtype=tables, num_threads=threads, instances=2
    ) as session:
        assert session.execution == "program, layers of 8 bits"
        scores = session.predict(rows)
        for some in (slice(0, 1), slice(7, 70), slice(299, 300), slice(0, 200)):
            assert np.array_equal(session.predict({name: one[some] for name, one in rows.items()}), scores[some])
    exact = model.predict(rows)[:, 0]
    assert 0 < np.abs(scores - exact).max() < 0.02
    assert np.corrcoef(scores, exact)[0, 1] > 0.999


@needs_vnni
def test_a_model_of_the_zoo(tmp_path) -> None:
    model = vv.Model(vv.Solver(device="cpu", seed=3), encoded_schema("dlrm_one_hot"), name="dlrm_one_hot")
    model.add(ENCODED_ZOO["dlrm_one_hot"])
    model.compile()
    path, rows = model.save(tmp_path / "model"), encoded_rows(33, encoded_schema("dlrm_one_hot"))
    with InferenceSession(path, device="cpu", layer_dtype="int8") as session:
        assert np.abs(session.predict(rows) - model.predict(rows)[:, 0]).max() < 0.02


@needs_vnni
def test_a_key_out_of_range_is_refused_by_name(dcn) -> None:
    _, path, rows = dcn
    wrong = {name: one[:5].copy() for name, one in rows.items()}
    wrong["c2"][3] = 777
    with (
        InferenceSession(path, device="cpu", layer_dtype="int8") as session,
        pytest.raises(RowsError, match=r"row 3, column 'c2'[\s\S]*777"),
    ):
        session.predict(wrong)


@needs_vnni
def test_a_served_model_takes_the_setting(dcn) -> None:
    _, path, rows = dcn
    entry = ModelEntry(name="ctr", path=str(path), session={"device": "cpu", "layer_dtype": "int8"})
    repository = ModelRepository(RepositorySettings(models=(entry,)))
    with InferenceSession(path, device="cpu", layer_dtype="int8") as session:
        assert np.array_equal(repository.predict("ctr", rows), session.predict(rows))
    repository.close()


def test_what_has_no_layers_of_8_bits_is_refused(dcn, tmp_path, monkeypatch) -> None:
    _, path, _ = dcn
    with pytest.raises(ConfigError, match=r"8 bits[\s\S]*bf16[\s\S]*layer_dtype=\"model\""):
        InferenceSession(path, device="cpu", layer_dtype="int8", precision="bf16")
    model = vv.Model(vv.Solver(device="cpu"), encoded_schema("din"), name="din")
    model.add(ENCODED_ZOO["din"])
    model.compile()
    with pytest.raises(ConfigError, match=r"the model reads bags, masks or ids"):
        InferenceSession(model.save(tmp_path / "din"), device="cpu", layer_dtype="int8")
    monkeypatch.setattr("viviane.ops.linear.cpu_int8.factor_type", lambda: None)
    with pytest.raises(ConfigError, match=r"AVX-512 VNNI"):
        InferenceSession(path, device="cpu", layer_dtype="int8")
