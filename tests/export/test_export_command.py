"""`viviane export` from raw logs on; ONNX with weights in a file of their own."""

import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from export_models import PAIR, ZOO, made, rows

from viviane.cli.export import command
from viviane.config import Solver
from viviane.core.errors import ConfigError, DataError, ExportError
from viviane.data import Dataset
from viviane.etl import EtlConfig, run
from viviane.export import export, load
from viviane.model import Model
from viviane.zoo import DLRM


def exported(model, output, to, **options) -> None:
    defaults = {"precision": "auto", "dense_only": False, "tables": "inside", "operators": "viviane", "cpu": "native"}
    command(model, output, to, **{**defaults, "device": "cpu", **options})


def test_from_raw_logs_to_an_artifact_that_reads_them(tmp_path, capsys) -> None:
    raw = tmp_path / "raw.csv"
    lines = [f"{i % 2},{'ab'[i % 2]},{i}" for i in range(200)]
    raw.write_text("click,item,price\n" + "\n".join(lines) + "\n")
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]},
        labels=[{"name": "click"}],
        dense=[{"name": "price", "operators": [{"type": "fill", "value": 0}]}],
        categorical=[{"name": "item"}],
    )
    run(config, raw, tmp_path / "data")
    data = Dataset(tmp_path / "data" / "train")
    model = Model(Solver(batch_size=50, lr=0.1, device="cpu"), data)
    model.add(DLRM(dim=2, bottom_mlp=[], top_mlp=[4]))
    model.compile()
    model.fit(data)
    model.save(tmp_path / "model")
    exported(tmp_path / "model", tmp_path / "e", ["torchscript, torch-export"])
    assert "torchscript.pt" in capsys.readouterr().out
    table = pa.table({"price": ["3", None, "-1e30", ""], "item": ["b", "never seen", None, ""]})
    expected = model.predict(table, raw=True)
    known = model.predict(data)
    shutil.rmtree(tmp_path / "model")
    for form in ("torchscript", "torch-export"):
        artifact = load(tmp_path / "e", form)
        np.testing.assert_allclose(artifact.predict(table, raw=True), expected, atol=1e-6)
        np.testing.assert_allclose(artifact.predict(pd.DataFrame(table.to_pandas()), raw=True), expected, atol=1e-6)
        np.testing.assert_allclose(artifact.predict(data), known, atol=1e-6)
        with pytest.raises(DataError, match=r"(?s)malformed row.*row 0, column 'price'"):
            artifact.predict(pa.table({"price": ["x"], "item": ["a"]}), raw=True)


def test_a_wrong_form_is_named(tmp_path) -> None:
    model = made(ZOO["ncf"][0], PAIR)
    model.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="did you mean 'torchscript'"):
        exported(tmp_path / "model", tmp_path / "e", ["torchscrip"])
    exported(tmp_path / "model", tmp_path / "e", ["torchscript"], dense_only=True)
    with pytest.raises(ConfigError, match="needs vectors"):
        load(tmp_path / "e").predict(rows(PAIR, 2))


@pytest.mark.slow
def test_onnx_with_weights_in_a_file_of_their_own(monkeypatch, tmp_path) -> None:
    import onnx

    from viviane.export.forms import onnx as form

    monkeypatch.setattr(form, "LARGE_BYTES", 0)
    model = made(ZOO["ncf"][0], PAIR)
    export(model, "onnx", tmp_path / "e")
    artifact = load(tmp_path / "e")
    assert artifact.manifest.forms["onnx"].files == ("model.onnx", "model.onnx.data")
    np.testing.assert_allclose(artifact.predict(rows(PAIR, 9)), model.predict(rows(PAIR, 9)), atol=1e-6)
    crafted = onnx.load(tmp_path / "e" / "model.onnx", load_external_data=False)
    for tensor in crafted.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    onnx.save(crafted, tmp_path / "e" / "model.onnx")
    with pytest.raises(ExportError, match="not in the manifest"):
        form.load(tmp_path / "e", ("model.onnx", "model.onnx.data"), artifact.manifest.forms["onnx"].requires, 1)
