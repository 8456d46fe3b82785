"""Every reference model in every form predicts what the model predicts, for batches of any size."""

import json

import numpy as np
import pytest
from export_models import ZOO, made, rows

from viviane.export import FORMS, export, load
from viviane.zoo import ZOO as REGISTERED

FAST = {("dcn_v2", "torch-export"), ("din", "onnx"), ("mmoe", "torchscript")}
CASES = [
    pytest.param(name, form, marks=[] if (name, form) in FAST else [pytest.mark.slow]) for name in ZOO for form in FORMS
]


def test_every_reference_model_is_in_the_matrix() -> None:
    assert {type(recipe) for recipe, _ in ZOO.values()} == set(REGISTERED.values())


@pytest.mark.parametrize(("name", "form"), CASES)
def test_predicts_what_the_model_predicts(name, form, tmp_path) -> None:
    recipe, schema = ZOO[name]
    model = made(recipe, schema)
    export(model, form, tmp_path / "exported")
    artifact = load(tmp_path / "exported")
    for count, seed in ((1, 1), (7, 2), (1024, 3)):
        given = rows(schema, count, seed)
        expected, found = model.predict(given), artifact.predict(given)
        assert found.shape == expected.shape == (count, len(schema.labels))
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
        assert count == 1 or np.ptp(expected) > 0.05  # rows matter, or nothing would be compared
    parity = json.loads((tmp_path / "exported" / "parity.json").read_text())
    assert {case["rows"] for case in parity["forms"][form]["cases"]} == {1, 7, 1024}
    assert artifact.predict({key: value[:0] for key, value in given.items()}).shape == (0, len(schema.labels))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "din" else [pytest.mark.slow]) for name in ZOO]
)
def test_the_dense_part_alone_takes_vectors(name, tmp_path) -> None:
    recipe, schema = ZOO[name]
    model = made(recipe, schema)
    export(model, "torchscript" if name != "din" else "torch-export", tmp_path / "exported", dense_only=True)
    artifact = load(tmp_path / "exported")
    kinds = {"dense", "one_hot", "values", "lengths", "weights", "vectors", "mask"}
    assert {one.kind for one in artifact.inputs} <= kinds
    assert any(one.kind == "vectors" for one in artifact.inputs)
    if name == "dlrm":  # no layer reads ids
        assert [one.kind for one in artifact.inputs] == ["dense", "vectors"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dlrm", "din", "mmoe"])
def test_16_bit_products(name, form, precision, tmp_path) -> None:
    if (form, precision) == ("onnx", "bf16"):
        pytest.skip("ONNX Runtime's CPU kernels know no bfloat16")
    recipe, schema = ZOO[name]
    model = made(recipe, schema)
    export(model, form, tmp_path / "exported", precision=precision)
    given = rows(schema, 64, 5)
    found, exact = load(tmp_path / "exported").predict(given), model.predict(given)
    assert 0 < np.abs(found - exact).max() < 0.1
