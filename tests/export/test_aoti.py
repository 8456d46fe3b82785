"""AOTInductor: new weights reach every constant, none is built into the code. Compiling takes long: all are slow."""

import json

import numpy as np
import pytest
import torch
from export_models import BINARY, MANY, made, rows

from viviane.core.errors import ConfigError, ExportError
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.export import export, load
from viviane.export.manifest import MANIFEST_FILE, _seal
from viviane.zoo import DLRM, SharedBottom

pytestmark = pytest.mark.slow


def test_every_weight_can_be_replaced_and_counts(tmp_path) -> None:
    model = made(SharedBottom(dim=4, bottom_mlp=[6], tower_mlp=[4]), BINARY)
    export(model, "aoti", tmp_path / "e")
    artifact, given = load(tmp_path / "e"), rows(BINARY, 40)
    before = artifact.predict(given)
    weights = [parameter.data for parameter in dense_parameters(model.module).values()]
    weights += [collection.table_rows(name) for collection in collections_of(model.module).values()
                for name in collection.tables]  # fmt: skip
    assert any(one.numel() == 1 for one in weights)  # the bias of a logit, which would be folded into the code
    for weight in weights:
        kept = weight.clone()
        weight.add_(0.5)
        if weight.dim() == 2 and len(weight) in (12, 43, 20):
            weight[0] = 0.0  # of padding
        artifact.update(model)
        found = artifact.predict(given)
        np.testing.assert_allclose(found, model.predict(given), atol=1e-6)
        assert np.abs(found - before).max() > 1e-5
        weight.copy_(kept)
    artifact.update(model)
    assert np.array_equal(artifact.predict(given), before)


def test_a_level_of_instructions_and_another_machine(tmp_path) -> None:
    model = made(DLRM(dim=4, bottom_mlp=[4], top_mlp=[4]), MANY)
    with pytest.raises(ConfigError, match="unknown instruction level"):
        export(model, "aoti", tmp_path / "e", cpu="x86-64-v9")
    export(model, "aoti", tmp_path / "e", cpu="x86-64-v3", tables="beside")
    needs = load(tmp_path / "e").manifest.forms["aoti"].requires
    assert "avx2" in needs.cpu_flags
    assert not any("512" in flag or "amx" in flag for flag in needs.cpu_flags)
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (needs.torch_from, needs.torch_below) == (f"{major}.{minor}", f"{major}.{minor + 1}")
    body = json.loads((tmp_path / "e" / MANIFEST_FILE).read_text())
    body.pop("sha256")
    body["forms"]["aoti"]["requires"]["cpu_flags"] = ["avx2", "avx10_2"]
    (tmp_path / "e" / MANIFEST_FILE).write_text(json.dumps({**body, "sha256": _seal(body)}))
    with pytest.raises(ExportError, match=r"(?s)instructions that this processor lacks.*avx10_2"):
        load(tmp_path / "e")
