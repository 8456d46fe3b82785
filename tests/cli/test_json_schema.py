import json

import pytest
from typer.testing import CliRunner

from viviane.cli import main
from viviane.cli.json_schema import KINDS, json_schema

run = CliRunner().invoke


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_printed(kind):
    done = run(main.app, ["schema", kind])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["$schema"].startswith("https://json-schema.org/")
    assert found["additionalProperties"] is False
    references = {one for one in done.output.split('"') if one.startswith("#/$defs/")}
    assert references <= {f"#/$defs/{name}" for name in found.get("$defs", {})}


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(main.ConfigError, match="did you mean 'train'"):
        json_schema("trian")


def test_models_of_the_zoo_are_told_apart_by_name():
    forms = json_schema("train")["properties"]["model"]["anyOf"]
    names = {form["properties"]["zoo"]["const"]: form for form in forms if "zoo" in form["properties"]}
    assert "deep_mlp" in names["deepfm"]["properties"]
    assert "cross_layers" in names["dcn_v2"]["properties"] or "num_cross" in str(names["dcn_v2"]["properties"])
