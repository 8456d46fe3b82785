"""What a server answers is what a session predicts, bit for bit, whatever the protocol."""

import json
import threading

import numpy as np
import pytest
from clients import Http, binary_body, infer_fields, output_of, tensors_of

from viviane.serving.server import InferenceServer
from viviane.serving.server.example_rows import example_rows


def expected(server: InferenceServer, model: str, rows: list[dict]) -> dict[str, np.ndarray]:
    session = server.repository.get(model)
    scores = session.predict(rows)
    return scores if isinstance(scores, dict) else {"click": scores}


@pytest.mark.parametrize("count", [1, 7, 1024])
@pytest.mark.parametrize("model", ["deepfm", "mmoe"])
def test_raw_rows_get_the_bits_of_the_session(server, http, grpc_client, raw, model, count) -> None:
    rows = raw(count, seed=5)  # with values never seen in training, and missing ones
    truth = expected(server, model, rows)
    answer = http.post(f"/v1/models/{model}:predict", {"instances": rows})
    assert answer.status == 200, answer.body
    for name, scores in truth.items():
        listed = [one if len(truth) == 1 else one[name] for one in answer.json["predictions"]]
        np.testing.assert_array_equal(np.array(listed, np.float32), scores)
    tensors = tensors_of(rows, server.repository.get(model).inputs)
    body, headers = binary_body(tensors, parameters={"binary_data_output": True}, id="q")
    answer = http.post(f"/v2/models/{model}/infer", body, **headers)
    assert answer.status == 200, answer.body
    head, at = int(answer.headers["inference-header-content-length"]), 0
    content = json.loads(answer.body[:head])
    assert content["id"] == "q"
    for output in content["outputs"]:
        size = output["parameters"]["binary_data_size"]
        values = np.frombuffer(answer.body[head + at : head + at + size], "<f4")
        np.testing.assert_array_equal(values, truth[output["name"]])
        at += size
    assert head + at == len(answer.body)
    response = grpc_client.ask("ModelInfer", **infer_fields(model, tensors))
    for name, scores in truth.items():
        np.testing.assert_array_equal(output_of(response, name), scores[:, None])


@pytest.mark.parametrize("model", ["encoded", "matrices"])
def test_encoded_rows_as_typed_tensors(server, http, grpc_client, model) -> None:
    session = server.repository.get(model)
    rows = example_rows(session.inputs, 3, seed=4)
    rows[1]["tags"], rows[2]["tags"] = [3], []
    truth = session.predict({name: [row[name] for row in rows] for name in rows[0]})
    inputs, fields = [], []
    for column in session.inputs:
        values = [row[column.name] for row in rows]
        datatype = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}[column.dtype]
        if column.is_ragged:
            width = max(map(len, values))
            lengths = list(map(len, values))
            inputs.append({"name": f"{column.name}:lengths", "datatype": "INT32", "shape": [3], "data": lengths})
            fields.append((f"{column.name}:lengths", "INT32", [3, 1], np.array(lengths, np.int32).tobytes()))
            values = [one + [0] * (width - len(one)) for one in values]
        array = np.array(values, {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[datatype])
        shape = list(array.reshape(3, -1).shape)
        inputs.append({"name": column.name, "datatype": datatype, "shape": shape, "data": values})
        fields.append((column.name, datatype, shape, array.tobytes()))
    answer = http.post(f"/v2/models/{model}/infer", {"inputs": inputs})
    assert answer.status == 200, answer.body
    np.testing.assert_array_equal(np.array(answer.json["outputs"][0]["data"], np.float32), truth)
    assert answer.json["outputs"][0]["shape"] == [3, 1]
    np.testing.assert_array_equal(
        output_of(grpc_client.ask("ModelInfer", **infer_fields(model, fields)), "click")[:, 0], truth
    )
    typed = [dict(zip(("name", "datatype", "shape"), one[:3], strict=True)) for one in fields]
    for entry, (_, datatype, _, data) in zip(typed, fields, strict=True):
        field, kind = {"FP32": ("fp32_contents", "<f4"), "INT32": ("int_contents", "<i4"),
                       "INT64": ("int64_contents", "<i8")}[datatype]  # fmt: skip
        entry["contents"] = {field: np.frombuffer(data, kind).tolist()}
    response = grpc_client.ask("ModelInfer", model_name=model, inputs=typed)
    np.testing.assert_array_equal(output_of(response, "click")[:, 0], truth)


def test_missing_values_are_marked_or_null(server, http, raw) -> None:
    rows = raw(4, seed=0)
    for row in rows:
        row["price"], row["age"] = None, None
    truth = expected(server, "deepfm", rows)["click"]
    inputs = []
    for column in server.repository.get("deepfm").inputs:
        values = [row[column.name] for row in rows]
        mark = {"name": f"{column.name}:missing", "datatype": "BOOL", "shape": [4], "data": [v is None for v in values]}
        datatype = {"float64": "FP64", "int64": "INT64", "string": "BYTES"}[column.dtype]
        if column.name == "price":
            data = values  # null in JSON
        else:
            inputs.append(mark)
            data = [("" if datatype == "BYTES" else 7) if one is None else one for one in values]
        inputs.append({"name": column.name, "datatype": datatype, "shape": [4], "data": data})
    answer = http.post("/v2/models/deepfm/infer", {"inputs": inputs})
    assert answer.status == 200, answer.body
    np.testing.assert_array_equal(np.array(answer.json["outputs"][0]["data"], np.float32), truth)


def test_requests_that_wait_are_predicted_together_and_each_gets_its_own(server, http, raw) -> None:
    rows = raw(160, seed=6)
    truth = expected(server, "deepfm", rows)["click"]
    rows[40]["price"] = "not a number"
    found: dict[int, object] = {}
    start = threading.Barrier(16)

    def ask(place: int) -> None:
        client = Http(server)
        start.wait()
        for first in range(place, 160, 16):
            found[first] = client.post("/v1/models/deepfm:predict", {"instances": [rows[first]]})
        client.close()

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[40].status == 400
    assert found[40].json["problems"] == [
        {"row": 0, "column": "price", "value": "not a number", "problem": found[40].json["problems"][0]["problem"]}
    ]
    good = [place for place in range(160) if place != 40]
    scores = [found[place].json["predictions"][0] for place in good]
    # Beside other rows a product of matrices may be summed in another order.
    np.testing.assert_allclose(scores, truth[good], rtol=0, atol=1e-6)
    text = http.get("/metrics").body.decode()
    batches = [
        line for line in text.splitlines() if line.startswith('viviane_batch_rows_bucket{le="1.0",model="deepfm"}')
    ]
    everything = [line for line in text.splitlines() if line.startswith('viviane_batch_rows_count{model="deepfm"}')]
    assert float(batches[0].split()[-1]) < float(everything[0].split()[-1])  # some were predicted together


def test_partial_answers_name_refused_rows(server, http, raw) -> None:
    rows = raw(3, seed=1)
    truth = expected(server, "deepfm", rows)["click"]
    rows[1]["age"] = "old"
    answer = http.post("/v1/models/deepfm:predict", {"instances": rows, "partial": True})
    assert answer.status == 200
    assert answer.json["predictions"][1] is None
    assert [(one["row"], one["column"], one["value"]) for one in answer.json["problems"]] == [(1, "age", "old")]
    np.testing.assert_array_equal(np.float32([answer.json["predictions"][place] for place in (0, 2)]), truth[[0, 2]])


def test_no_rows_get_no_predictions(server, http, grpc_client) -> None:
    assert http.post("/v1/models/deepfm:predict", {"instances": []}).json["predictions"] == []
    tensors = tensors_of([], server.repository.get("deepfm").inputs)
    response = grpc_client.ask("ModelInfer", **infer_fields("deepfm", tensors))
    assert list(response.outputs[0].shape) == [0, 1]


def test_chosen_outputs(server, http, raw) -> None:
    tensors = tensors_of(raw(2), server.repository.get("mmoe").inputs)
    body, headers = binary_body(tensors, outputs=[{"name": "buy"}])
    content = http.post("/v2/models/mmoe/infer", body, **headers).json
    assert [one["name"] for one in content["outputs"]] == ["buy"]
    assert len(content["outputs"][0]["data"]) == 2


def test_metadata_health_and_index(server, http, grpc_client) -> None:
    assert http.get("/v2").json["name"] == "viviane"
    assert http.get("/v2").json["version"] == grpc_client.ask("ServerMetadata").version == "1.2.3"
    assert http.get("/v2/health/live").status == http.get("/v2/health/ready").status == 200
    assert grpc_client.ask("ServerLive").live
    assert grpc_client.ask("ServerReady").ready
    assert http.get("/v2/models/mmoe/versions/1/ready").status == 200
    assert http.get("/v2/models/mmoe/versions/2/ready").status == 404
    assert not grpc_client.ask("ModelReady", name="nothing").ready
    metadata = http.get("/v2/models/encoded").json
    assert {"name": "tags", "datatype": "INT32", "shape": [-1, -1]} in metadata["inputs"]
    found = grpc_client.ask("ModelMetadata", name="encoded")
    assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [
        (one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]
    ]
    assert [one["name"] for one in http.post("/v2/repository/index", {}).json] == [
        "deepfm", "encoded", "matrices", "mmoe",
    ]  # fmt: skip
    assert {one.state for one in grpc_client.ask("RepositoryIndex", ready=True).models} == {"READY"}
    assert http.get("/v2/models/mmoe/config").json["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert grpc_client.ask("ModelStatistics", name="mmoe").model_stats[0].name == "mmoe"


@pytest.mark.parametrize("model", ["deepfm", "mmoe", "encoded"])
def test_the_example_of_a_model_is_a_row_that_it_takes(http, model) -> None:
    example = http.get(f"/v1/models/{model}").json["example"]
    assert http.post(f"/v1/models/{model}:predict", {"instances": [example]}).status == 200


@pytest.mark.filterwarnings("ignore:.*gencode version.*:UserWarning")
def test_tritonclient_talks_to_it(server, raw) -> None:
    pytest.importorskip("tritonclient", reason="NVIDIA's client: pip install tritonclient geventhttpclient")
    import tritonclient.grpc
    import tritonclient.http

    rows = raw(5, seed=2)
    truth = expected(server, "mmoe", rows)
    columns = server.repository.get("mmoe").inputs
    for library, target in ((tritonclient.grpc, server.grpc_target), (tritonclient.http, server.http_url[7:])):
        client = library.InferenceServerClient(target)
        assert client.is_server_live()
        assert client.is_model_ready("mmoe")
        assert client.get_model_metadata("mmoe")
        assert client.get_model_config("mmoe")
        assert client.get_inference_statistics("mmoe")
        inputs = []
        for column in columns:
            texts = ["" if row[column.name] is None else str(row[column.name]) for row in rows]
            tensor = library.InferInput(column.name, [5, 1], "BYTES")
            tensor.set_data_from_numpy(np.array(texts, object).reshape(5, 1))
            inputs.append(tensor)
        result = client.infer("mmoe", inputs)
        for name, scores in truth.items():
            np.testing.assert_array_equal(result.as_numpy(name), scores[:, None])
        client.close()
