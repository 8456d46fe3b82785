"""Exports with tables of 8 bits: every form against a session with the same tables, sizes, and what is refused."""

import numpy as np
import pytest
from export_models import ZOO, made, rows

from viviane.core.errors import ConfigError, ExportError
from viviane.export import FORMS, export, load
from viviane.schema import Schema
from viviane.serving import InferenceSession
from viviane.zoo import DLRM

FIXED = {
    name: (recipe, Schema.from_dict({**schema.to_dict(), "categorical": [
        one.to_dict() for one in schema.categorical if one.num_ids is not None
    ]}))
    for name, (recipe, schema) in ZOO.items()
}  # fmt: skip
FAST = {("mmoe", "onnx"), ("dlrm", "torchscript"), ("din", "torch-export")}
CASES = [
    pytest.param(name, form, marks=[] if (name, form) in FAST else [pytest.mark.slow])
    for name in FIXED
    for form in FORMS
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_predicts_what_a_session_with_such_tables_does(name, form, tmp_path) -> None:
    recipe, schema = FIXED[name]
    model = made(recipe, schema)
    model.save(tmp_path / "model")
    export(tmp_path / "model", form, tmp_path / "exported", table_dtype="int8")
    artifact = load(tmp_path / "exported")
    assert artifact.manifest.table_dtype == "int8"
    with InferenceSession(tmp_path / "model", device="cpu", table_dtype="int8") as session:
        for count, seed in ((1, 1), (7, 2), (1024, 3)):
            given = rows(schema, count, seed)
            wanted = session.predict(given)
            wanted = np.stack(list(wanted.values()), 1) if isinstance(wanted, dict) else wanted[:, None]
            np.testing.assert_allclose(artifact.predict(given), wanted, rtol=0, atol=5e-6)
    assert np.abs(wanted - model.predict(given)).max() > 0  # or the tables would be those of the model


def test_files_are_smaller_and_the_saved_model_stays(tmp_path) -> None:
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 3000}])
    model = made(DLRM(dim=64, bottom_mlp=[16, 64], top_mlp=[16]), schema)
    model.save(tmp_path / "model")
    sizes = {}
    for kind in ("model", "int8"):
        export(tmp_path / "model", "torchscript", tmp_path / f"{kind}-out", table_dtype=kind)
        sizes[kind] = (tmp_path / f"{kind}-out" / "torchscript.pt").stat().st_size
    assert 3000 * 64 * 3 * 0.9 < sizes["model"] - sizes["int8"] < 3000 * 64 * 3
    given = rows(schema, 5)
    with InferenceSession(tmp_path / "model", device="cpu") as session:
        assert np.array_equal(session.predict(given), model.predict(given)[:, 0])
    artifact = load(tmp_path / "int8-out")
    with pytest.raises(ExportError, match="cannot be replaced"):
        artifact.update(tmp_path / "model")


def test_what_they_do_not_go_with_is_refused(tmp_path) -> None:
    recipe, schema = ZOO["dcn"]
    model = made(recipe, schema)
    folder = model.save(tmp_path / "model")
    for change, said in (
        ({"tables": "beside"}, "tables 'beside'"), ({"tables": "model"}, "tables 'model'"),
        ({"dense_only": True}, "no tables"), ({}, "only tables of fixed size"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            export(folder, "onnx", tmp_path / "out", table_dtype="int8", **change)
    with pytest.raises(ConfigError, match="a model in memory"):
        export(model, "onnx", tmp_path / "out", table_dtype="int8")
    with pytest.raises(ConfigError, match="unknown table_dtype"):
        export(folder, "onnx", tmp_path / "out", table_dtype="int4")
    assert not (tmp_path / "out").exists()
