"""Which models a folder holds, and what the command refuses before it starts a server."""

import json

import pytest
from typer.testing import CliRunner

from viviane.cli.main import app
from viviane.core.errors import CheckpointError, ConfigError
from viviane.serving.server import ServerSettings
from viviane.serving.server.found_models import find_entries
from viviane.serving.server.messages import message
from viviane.serving.triton.config_text import Word, text_of


def test_models_of_a_folder(models, tmp_path) -> None:
    one = models.path("deepfm")
    (entry,) = find_entries(one)
    assert (entry.name, entry.path, entry.versions) == ("deepfm", str(one), "all")
    assert find_entries(one, name="ctr")[0].name == "ctr"
    versions = tmp_path / "models" / "shop"
    versions.mkdir(parents=True)
    (versions / "1").symlink_to(one)
    (versions / "3").symlink_to(one)
    assert find_entries(versions)[0].name == "shop"
    (tmp_path / "models" / "mmoe").symlink_to(models.path("mmoe"))
    (tmp_path / "models" / "notes").mkdir()
    assert [one.name for one in find_entries(tmp_path / "models")] == ["mmoe", "shop"]
    with pytest.raises(ConfigError, match="one name for several models"):
        find_entries(tmp_path / "models", name="x")
    with pytest.raises(ConfigError, match="cannot name this model"):
        find_entries(one, name="a/b")
    with pytest.raises(CheckpointError):
        find_entries(tmp_path / "models" / "notes")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no model to serve"),
        (["nowhere"], "no such folder"),
        (["--engine", "tensorrt", "x"], "no such engine"),
        (["--set", "batchng.max_rows=3", "MODEL"], "did you mean 'batching'"),
        (["--set", "max_rows=-1", "MODEL"], "greater than or equal to 1"),
        (["--port", "70000", "MODEL"], "less than or equal to 65535"),
        (["--config", "settings.json", "MODEL"], "did you mean 'http_port'"),
        (["a=MODEL", "a=MODEL"], "used twice"),
        (["--engine", "triton", "--set", "max_delay=3", "MODEL"], "did you mean 'max_delay_ms'"),
    ],
)
def test_what_the_command_refuses(models, tmp_path, monkeypatch, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIVIANE_TRITON_ENV", str(tmp_path))
    (tmp_path / "settings.json").write_text(json.dumps({"htp_port": 1}))
    given = [one.replace("MODEL", str(models.path("deepfm"))) for one in arguments]
    done = CliRunner().invoke(app, ["serve", *given])
    assert isinstance(done.exception, ConfigError | CheckpointError), done.output
    assert said in str(done.exception)


def test_a_written_repository_is_named_by_the_command(models, tmp_path) -> None:
    done = CliRunner().invoke(
        app, ["serve", f"ctr={models.path('deepfm')}", "--write-only", str(tmp_path / "repository")]
    )
    assert done.exit_code == 0, done.exception
    assert "ctr" in done.output
    assert (tmp_path / "repository" / "ctr" / "1" / "model" / "model.json").exists()


def test_settings_survive_json(models) -> None:
    settings = ServerSettings(http_port=1234, batching={"max_delay_ms": 2}, inference={"models": []})
    assert ServerSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert ServerSettings(host="127.0.0.2").is_local
    assert not ServerSettings(host="0.0.0.0").is_local


@pytest.mark.filterwarnings("ignore:.*gencode version.*:UserWarning")
def test_messages_are_those_of_the_protocol() -> None:
    """Every field that we have has the number, type and label of NVIDIA's own definition."""
    pytest.importorskip("tritonclient", reason="NVIDIA's definitions: pip install tritonclient")
    from tritonclient.grpc import model_config_pb2, service_pb2

    from viviane.serving.server.messages import _MESSAGES

    compared = 0
    for name in _MESSAGES:
        ours, theirs = (
            message(name).DESCRIPTOR,
            service_pb2 if hasattr(service_pb2, name.split(".")[0]) else model_config_pb2,
        )
        for part in name.split("."):
            theirs = getattr(theirs, part)
        known = {field.name: field for field in theirs.DESCRIPTOR.fields}
        for field in ours.fields:
            other = known[field.name]
            same = (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            assert same, (name, field.name)
            compared += 1
    assert compared > 100
    whole = message("ModelInferRequest")(
        model_name="a", parameters={"p": {"int64_param": 3}}, inputs=[{"name": "x", "shape": [1, 2]}]
    )
    again = service_pb2.ModelInferRequest.FromString(whole.SerializeToString())
    assert again.parameters["p"].int64_param == 3
    assert list(again.inputs[0].shape) == [1, 2]


def test_text_of_a_config_is_quoted() -> None:
    assert (
        text_of({"name": 'a"b\n', "kind": Word("KIND_CPU"), "on": True})
        == 'name: "a\\"b\\n"\nkind: KIND_CPU\non: true\n'
    )
