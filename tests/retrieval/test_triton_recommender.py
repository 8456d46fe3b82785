"""A recommender in Triton's model repository: what is written, and the real server where it is installed."""

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import viviane as vv
from viviane.cli.main import app
from viviane.cli.served_recommender import ServedRecommender
from viviane.cli.triton_recommender import answer_tensors, triton_model
from viviane.core.errors import ConfigError, MissingExtraError
from viviane.etl import EtlConfig, run
from viviane.retrieval import ItemKNN, Recommender, VectorSource
from viviane.serving.server import InferenceServer, ServerSettings
from viviane.serving.triton import TritonEnvironment, TritonServer, TritonSettings, write_repository

sys.path.append(str(Path(__file__).parents[1] / "serving"))

INIT = {"type": "normal", "std": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved recommender of raw rows: an age, and items by name."""
    place = tmp_path_factory.mktemp("shop")
    random = np.random.default_rng(0)
    lines = ["taken,age,item,history"]
    for _ in range(400):
        history = "|".join(f"i{item}" for item in random.integers(0, 40, random.integers(1, 6)))
        lines.append(f"{random.integers(2)},{random.integers(18, 90)},i{random.integers(0, 40)},{history}")
    (place / "rows.csv").write_text("\n".join(lines) + "\n")
    columns = [{"name": "taken", "type": "int"}, {"name": "age", "type": "float"}, {"name": "item"},
               {"name": "history", "separator": "|"}]  # fmt: skip
    history = {"name": "history", "kind": "sequence", "max_length": 8, "vocabulary": "item"}
    config = EtlConfig.from_dict({
        "input": {"columns": columns}, "labels": [{"name": "taken"}],
        "dense": [{"name": "age", "operators": [{"type": "fill", "value": 0}]}],
        "categorical": [{"name": "item"}, history],
    })  # fmt: skip
    run(config, place / "rows.csv", place / "data")
    data = vv.Dataset(place / "data" / "train")
    models = []
    for block in (vv.zoo.HSTU(dim=8, num_blocks=1, init=INIT),
                  vv.zoo.DIN(dim=4, attention_mlp=[4], top_mlp=[8], init=INIT)):  # fmt: skip
        model = vv.Model(vv.Solver(device="cpu"), data)
        model.add(block)
        model.compile()
        models.append(model)
    batch = next(iter(data.reader(400)))
    bag = batch.bags["history"]
    lists = [bag.values[a:b].tolist() for a, b in zip(bag.offsets[:-1].tolist(), bag.offsets[1:].tolist(), strict=True)]
    num_items = data.schema.categorical_column("item").num_ids
    known = ItemKNN.count(vv.retrieval.Histories.of(lists), num_items)
    Recommender([VectorSource(models[0], name="hstu"), known], models[1], num_candidates=10).save(place / "saved")
    return place / "saved"


ROWS = [{"age": 33.0, "history": "i3|i4|i9"}, {"age": None, "history": ""}, {"age": 70.5, "history": "i1|never seen"}]


def free_ports() -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    names = ("http_port", "grpc_port", "metrics_port")
    found = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return found


def test_the_command_writes_a_repository_that_holds_the_recommender(folder: Path, tmp_path: Path) -> None:
    command = ["serve", f"shop={folder}", "--engine", "triton", "--write-only", str(tmp_path / "r"), "--device", "cpu",
               "--set", "max_queued=7"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exception is None, done.output
    assert done.output.strip().endswith("shop")
    config = (tmp_path / "r" / "shop" / "config.pbtxt").read_text()
    assert '  name: "history"\n  data_type: TYPE_STRING\n' in config
    assert '  name: "age:missing"\n  data_type: TYPE_BOOL\n  dims: [1]\n  optional: true\n' in config
    assert '"item"' not in config  # it is the answer
    for output, kind in (("items", "INT64"), ("scores", "FP32"), ("values", "STRING")):
        assert f'  name: "{output}"\n  data_type: TYPE_{kind}\n  dims: [-1]\n}}' in config
    version = tmp_path / "r" / "shop" / "1"
    assert "from viviane.cli.triton_recommender import TritonPythonModel" in (version / "model.py").read_text()
    part = json.loads((version / "session.json").read_text())
    assert part["max_queued"] == 7
    inside = ServedRecommender(version / part["path"], "cpu")  # whole, and apart from where it came from
    assert inside.recommend(ROWS, 5, keep_seen=False) == ServedRecommender(folder, "cpu").recommend(
        ROWS, 5, keep_seen=False
    )
    with pytest.raises(ConfigError, match="two models of one name"):
        write_repository(tmp_path / "s", [], others=[triton_model("shop", folder, "cpu")] * 2)


def test_rows_with_fewer_items_are_filled_up() -> None:
    answers = [
        {"items": [5, 3], "scores": [0.5, 0.25], "values": ["a", None]},
        {"items": [], "scores": [], "values": []},
    ]
    found = answer_tensors(answers, 2, with_values=True)
    assert found["items"].tolist() == [[5, 3], [-1, -1]]
    assert found["scores"][0].tolist() == [0.5, 0.25]
    assert np.isnan(found["scores"][1]).all()
    assert found["values"].tolist() == [[b"a", b""], [b"", b""]]


@pytest.mark.slow
def test_triton_answers_as_the_local_server_does(folder: Path, tmp_path: Path) -> None:
    from clients import Grpc, Http, text_bytes

    try:
        TritonEnvironment.find()
    except MissingExtraError:
        pytest.skip("Triton is not installed: viviane serve --install-triton")
    with InferenceServer(
        ServerSettings(http_port=0, grpc_port=None), "1", {"shop": ServedRecommender(folder, "cpu")}
    ) as local:
        http = Http(local)
        wanted = {
            keep: http.post("/v1/recommenders/shop:recommend", {"instances": ROWS, "k": 4, "keep_seen": keep}).json
            for keep in (False, True)
        }
        http.close()
    settings = TritonSettings(**free_ports(), log=str(tmp_path / "log.txt"))
    write_repository(tmp_path / "repository", [], settings, others=[triton_model("shop", folder, "cpu")])
    fields = {
        "model_name": "shop",
        "inputs": [{"name": "age", "datatype": "BYTES", "shape": [3, 1]},
                   {"name": "history", "datatype": "BYTES", "shape": [3, 1]}],
        "raw_input_contents": [text_bytes([None if row["age"] is None else str(row["age"]) for row in ROWS]),
                               text_bytes([row["history"] for row in ROWS])],
    }  # fmt: skip
    fields["inputs"][0]["datatype"] = "FP64"
    fields["raw_input_contents"][0] = np.array([33.0, np.nan, 70.5]).tobytes()
    with TritonServer(tmp_path / "repository", settings) as server:

        class Target:
            grpc_target = server.grpc_target

        client = Grpc(Target())
        for keep, answer in wanted.items():
            parameters = {"k": {"int64_param": 4}, "keep_seen": {"bool_param": keep}}
            found = client.ask("ModelInfer", **fields, parameters=parameters)
            outputs = {
                one.name: (one.shape, data) for one, data in zip(found.outputs, found.raw_output_contents, strict=True)
            }
            items = np.frombuffer(outputs["items"][1], "<i8").reshape(outputs["items"][0])
            scores = np.frombuffer(outputs["scores"][1], "<f4").reshape(items.shape)
            values = outputs["values"][1]
            assert items.shape == (3, 4)
            for row, one in enumerate(answer["recommendations"]):
                count = len(one["items"])
                assert items[row].tolist() == one["items"] + [-1] * (4 - count)
                np.testing.assert_array_equal(scores[row, :count], np.array(one["scores"], np.float32))
                assert all(str(value).encode() in values for value in one["values"] if value is not None)
        import grpc

        with pytest.raises(grpc.RpcError, match="a wrong number of items") as error:
            client.ask("ModelInfer", **fields, parameters={"k": {"int64_param": 0}})
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        client.close()
