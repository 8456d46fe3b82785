"""Requests that are refused: each with the right status and a message that says what is wrong."""

import json
import socket
import struct
import time

import grpc
import httptools
import pytest
from clients import binary_body, infer_fields, raw_socket, tensors_of
from hypothesis import example, given
from hypothesis import strategies as st

from viviane.serving.server.connection import whole_request
from viviane.serving.server.json_wire import parse_request
from viviane.serving.server.status import RequestError

X = {"name": "price", "datatype": "FP64", "shape": [1], "data": [1]}


@pytest.fixture(scope="module")
def good(server, raw):
    """The inputs of a request that is answered, as JSON."""
    row = raw(1, seed=3)[0]
    return [
        {
            "name": one.name,
            "datatype": "BYTES",
            "shape": [1],
            "data": ["" if row[one.name] is None else str(row[one.name])],
        }
        for one in server.repository.get("deepfm").inputs
    ]


def changed(good, **change):
    return [{**good[0], **change}, *good[1:]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"inputs": [], "inputs": []}', "twice"),
        (b'{"inputs": [NaN]}', "no such number"),
        (b'{"inputs": [-Infinity]}', "no such number"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "list of inputs"),
        (b'{"inputs": {}}', "list of inputs"),
        (b'{"inputs": [1]}', "not a JSON object"),
        (b'{"inptus": []}', "unknown key"),
    ],
)
def test_malformed_bodies(http, body, said) -> None:
    answer = http.post("/v2/models/deepfm/infer", body)
    assert answer.status == 400
    assert said in answer.json["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "has a name"),
        ({"name": 3}, "has a name"),
        ({"name": "prise"}, "did you mean"),
        ({"shape": None}, "a shape is a list"),
        ({"shape": []}, "a shape is a list"),
        ({"shape": [-1]}, "sizes from 0"),
        ({"shape": [True]}, "sizes from 0"),
        ({"shape": [1.0]}, "sizes from 0"),
        ({"shape": [2**40]}, "sizes from 0"),
        ({"shape": [2**30]}, "number of elements"),
        ({"shape": [2]}, "number of elements"),
        ({"shape": [2], "data": ["1", "2"]}, "differ in their number of rows"),
        ({"shape": [1, 2], "data": ["1", "2"]}, "another shape"),
        ({"shape": [1, 1, 1]}, "another shape"),
        ({"datatype": "FP99"}, "no such datatype"),
        ({"datatype": None}, "no such datatype"),
        ({"datatype": "INT64", "data": ["1"]}, "another type than its tensor"),
        ({"datatype": "INT64", "data": [1.5]}, "another type than its tensor"),
        ({"datatype": "INT64", "data": [True]}, "another type than its tensor"),
        ({"datatype": "INT8", "data": [300]}, "out of range"),
        ({"datatype": "UINT64", "data": [-1]}, "out of range"),
        ({"datatype": "FP32", "data": [10**400]}, "out of range"),
        ({"datatype": "BYTES", "data": [1]}, "another type than its tensor"),
        ({"datatype": "BYTES", "data": ["\ud800"]}, "surrogate"),
        ({"data": {}}, "has data, a list"),
        ({"parameters": []}, "parameters are an object"),
        ({"parameters": {"binary_data_size": 5}}, "not both"),
        ({"parameters": {"shared_memory_region": "x"}}, "shared memory"),
    ],
)
def test_malformed_inputs(http, good, change, said) -> None:
    answer = http.post("/v2/models/deepfm/infer", {"inputs": changed(good, **change)})
    assert answer.status == 400, answer.body
    assert said in answer.json["error"]


def test_inputs_given_twice_missing_or_without_their_column(http, good) -> None:
    def said(inputs) -> str:
        answer = http.post("/v2/models/deepfm/infer", {"inputs": inputs})
        assert answer.status == 400
        return answer.json["error"]

    assert "given twice" in said([*good, good[0]])
    assert "an input is missing" in said(good[1:])
    assert "no such input" in said([*good, {"name": "price:lengths", "datatype": "INT32", "shape": [1], "data": [1]}])
    wrong_mark = {"name": "price:missing", "datatype": "INT32", "shape": [1], "data": [1]}
    assert "one BOOL a row" in said([*good, wrong_mark])


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([5], "not a length from 0 to 2"),
        ([-1], "not a length from 0 to 2"),
        ([1, 1], "number of rows"),
        ([0.5], "type"),
    ],
)
def test_wrong_lengths(server, http, lengths, said) -> None:
    inputs = []
    for column in server.repository.get("encoded").inputs:
        shape, data = ([1, 2], [3, 4]) if column.is_ragged else ([1], [3])
        datatype = "FP32" if column.dtype == "float32" else "INT32"
        inputs.append({"name": column.name, "datatype": datatype, "shape": shape, "data": data})
    assert http.post("/v2/models/encoded/infer", {"inputs": inputs}).status == 200
    mark = {"name": "tags:lengths", "datatype": "INT32", "shape": [len(lengths)], "data": lengths}
    answer = http.post("/v2/models/encoded/infer", {"inputs": [*inputs, mark]})
    assert answer.status == 400
    assert said in answer.json["error"]


def test_an_encoded_model_says_which_row_column_and_value(server, http) -> None:
    example = http.get("/v1/models/encoded").json["example"]
    rows = [example, {**example, "user": 10**6}, {**example, "age": None}]
    answer = http.post("/v1/models/encoded:predict", {"instances": rows})
    assert answer.status == 400
    assert [(one["row"], one["column"]) for one in answer.json["problems"]] == [(1, "user"), (2, "age")]
    assert answer.json["problems"][0]["value"] == "1000000"


def test_rows_that_are_no_rows(http) -> None:
    for body in ({"instances": 3}, {}, [], {"instances": [], "partial": 1}, {"instances": [], "x": 1}):
        assert http.post("/v1/models/deepfm:predict", body).status == 400
    for row in (3, None, [], "x", {}):
        answer = http.post("/v1/models/deepfm:predict", {"instances": [row]})
        assert answer.status == 400
        assert answer.json["problems"][0]["row"] == 0


def test_an_error_is_never_much_longer_than_the_request(http) -> None:
    """A message lists the columns of a row; a row may have thousands, and a request thousands of rows."""
    body = {"instances": [{f"column{number}": number for number in range(200)}] * 100}
    answer = http.post("/v1/models/deepfm:predict", body)
    assert answer.status == 400
    assert len(answer.body) < 100_000
    partial = http.post("/v1/models/deepfm:predict", {**body, "partial": True})
    assert partial.json["predictions"] == [None] * 100
    assert len(partial.body) < 100_000


def test_requests_that_share_their_json_part_keep_their_own_numbers(server, http, raw) -> None:
    """The JSON part is parsed once for all that share it, also for one that is malformed behind it."""
    session = server.repository.get("deepfm")

    def scores(number: int) -> bytes:
        body, headers = binary_body(tensors_of(raw(1, seed=number), session.inputs))
        return http.post("/v2/models/deepfm/infer", body, **headers).body

    numbers = st.integers(-1000, 1000)

    @given(values=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=4))
    def parsed_again(values) -> None:
        inputs = [
            {"name": "a", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}},
            {"name": "b", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "c", "datatype": "INT64", "shape": [1], "data": [7]},
        ]
        head = json.dumps({"inputs": inputs}).encode()
        requests = [struct.pack("<iif", *row) for row in values]
        found = [parse_request(head + one, str(len(head))) for one in requests]
        for one, row in zip(found, values, strict=True):
            assert [tensor.values.tolist() for tensor in one.tensors] == [row[:2], row[2:], [7]]
        for cut in (requests[0][:-1], requests[0] + b"x"):
            with pytest.raises(RequestError):
                parse_request(head + cut, str(len(head)))
        with pytest.raises(ValueError, match="read-only"):
            found[0].tensors[2].values[0] = 8

    parsed_again()
    assert len({scores(number) for number in range(5)}) == 5
    assert scores(0) == scores(0)


def test_binary_tensors_whose_sizes_lie(server, http, raw) -> None:
    tensors = tensors_of(raw(2), server.repository.get("deepfm").inputs)
    name, kind, shape, data = tensors[0]

    def status(body: bytes, headers: dict[str, str]) -> int:
        answer = http.post("/v2/models/deepfm/infer", body, **headers)
        assert "error" in answer.json
        return answer.status

    body, headers = binary_body(tensors)
    assert status(body + b"x", headers) == 400
    assert status(body[:-1], headers) == 400
    for length in ("0", "-1", "x", "9" * 30, str(len(body) + 1), "1e3", "\u0663".encode().decode("latin-1")):
        assert status(body, {**headers, "inference-header-content-length": length}) == 400
    for wrong in (data[:-1], data + b"\0", struct.pack("<I", 2**32 - 1) + data[4:], b"\0" * 3, b""):
        assert status(*binary_body([(name, kind, shape, wrong), *tensors[1:]])) == 400
    assert status(*binary_body([(name, "FP64", shape, b"\0" * 15), *tensors[1:]])) == 400
    assert status(*binary_body([(name, "BOOL", shape, b"\2\0"), *tensors[1:]])) == 400
    bad_text = struct.pack("<I", 1) + b"\xff"
    body, headers = binary_body([*tensors[:-1], (*tensors[-1][:3], bad_text * 2)])
    answer = http.post("/v2/models/deepfm/infer", body, **headers)
    assert answer.status == 400
    assert answer.json["problems"][0]["problem"] == "not UTF-8 text"


def test_unknown_names_paths_and_methods(http, good) -> None:
    for path in (
        "/v2/models/nothing/infer",
        "/v2/models/deepfm/versions/9/infer",
        "/v2/models/deepfm/versions/x/infer",
    ):
        assert http.post(path, {"inputs": good}).status == 404
    assert http.post("/v1/models/nothing:predict", {"instances": []}).status == 404
    assert (
        http.get("/v2/models/nothing").status
        == http.get("/nothing").status
        == http.get("/v2/models/a%2F..").status
        == 404
    )
    assert http.get("/v2/models/deepfm/infer").status == 405
    outputs = http.post("/v2/models/deepfm/infer", {"inputs": good, "outputs": [{"name": "clack"}]})
    assert outputs.status == 400
    assert "no such output" in outputs.json["error"]
    text = http.get("/metrics").body.decode()
    assert "nothing" not in text  # names that a client makes up are no labels


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models/deepfm:predict", "POST"), ("/v1/models/deepfm/versions/1:predict", "POST"),
        ("/v1/recommenders/any:recommend", "POST"), ("/v2/models/deepfm/infer", "POST"),
        ("/v2/models/deepfm/versions/1/infer", "POST"), ("/v2/repository/index", "POST"),
        ("/v2/repository/models/deepfm/load", "POST"), ("/v1/models", "GET, HEAD"), ("/v1/models/deepfm", "GET, HEAD"),
        ("/v1/recommenders", "GET, HEAD"), ("/v2", "GET, HEAD"), ("/v2/health/live", "GET, HEAD"),
        ("/v2/models/deepfm", "GET, HEAD"), ("/v2/models/deepfm/ready", "GET, HEAD"), ("/v2/models/stats", "GET, HEAD"),
        ("/v2/models/deepfm/versions/1/config", "GET, HEAD"), ("/metrics", "GET, HEAD"), ("/", "GET, HEAD"),
    ],
)  # fmt: skip
def test_another_method_is_refused_with_those_that_are_allowed(http, path, allowed) -> None:
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - set(allowed.split(", ")):
        answer = http.ask(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None, {})
        assert answer.status == 405, method
        assert sorted(answer.headers["allow"].split(", ")) == allowed.split(", ")
        assert method in answer.json["error"]
        assert path in answer.json["error"]


def test_bodies_that_are_too_large_or_of_another_type(server, http, raw) -> None:
    answer = http.post("/v2/models/deepfm/infer", b"x" * (3 << 19))
    assert answer.status == 413
    rows = raw(1)
    http.close()
    assert http.post("/v1/models/deepfm:predict", {"instances": rows[:1] + [{"price": 1}] * 2000}).status == 413
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert http.post("/v1/models/deepfm:predict", b"{}", content_type=kind).status == 415
    assert http.post("/v1/models/deepfm:predict", b"{}", content_encoding="gzip").status == 415


def test_what_a_page_of_another_site_sends_is_refused(server, http) -> None:
    example = http.get("/v1/models/deepfm").json["example"]
    body = {"instances": [example]}
    assert http.post("/v1/models/deepfm:predict", body, origin="http://evil.example").status == 403
    assert http.post("/v1/models/deepfm:predict", body, origin=server.http_url).status == 200
    assert http.get("/v2", host="evil.example:8000").status == 403  # a name that resolves to 127.0.0.1
    assert http.get("/v2", host=f"localhost:{server.http_port}").status == 200


def test_models_are_not_loaded_over_the_network_unless_allowed(http, grpc_client) -> None:
    assert http.post("/v2/repository/models/deepfm/unload", {}).status == 403
    with pytest.raises(grpc.RpcError) as error:
        grpc_client.ask("RepositoryModelUnload", model_name="deepfm")
    assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_codes_of_grpc(server, grpc_client, raw) -> None:
    tensors = tensors_of(raw(2), server.repository.get("deepfm").inputs)
    fields = infer_fields("deepfm", tensors)

    def code(**change) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as error:
            grpc_client.ask("ModelInfer", **{**fields, **change})
        assert error.value.details()
        return error.value.code()

    assert code(model_name="nothing") == grpc.StatusCode.NOT_FOUND
    assert code(model_version="7") == grpc.StatusCode.NOT_FOUND
    assert code(inputs=[]) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(raw_input_contents=[b""]) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(inputs=[{**one, "shape": [-1]} for one in fields["inputs"]]) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(inputs=[*fields["inputs"], fields["inputs"][0]]) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(raw_input_contents=[b"x" * (2 << 20)]) == grpc.StatusCode.RESOURCE_EXHAUSTED
    huge = {"name": "age", "datatype": "INT8", "shape": [1], "contents": {"int_contents": [300]}}
    assert code(inputs=[huge], raw_input_contents=[]) == grpc.StatusCode.INVALID_ARGUMENT
    wrong = {"name": "age", "datatype": "INT64", "shape": [1], "contents": {"int_contents": [3]}}
    assert code(inputs=[wrong], raw_input_contents=[]) == grpc.StatusCode.INVALID_ARGUMENT


class Parsed:
    """What httptools reads in bytes."""

    def __init__(self, data: bytes) -> None:
        self.paths, self.ended = [], 0
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(data)
        self.keeps_alive = parser.should_keep_alive()

    def on_url(self, url: bytes) -> None:
        self.paths.append(url)

    def on_message_complete(self) -> None:
        self.ended += 1


LINES = st.sampled_from([
    b"host: a", b"Content-Length: 2", b"content-length:3", b"content-length: 2, 2", b"content-length : 2",
    b"x: content-length", b"connection: close", b"Connection: keep-alive", b"transfer-encoding: chunked",
    b"Expect: 100-continue", b"upgrade: h2c", b" folded", b"content-length: 99999", b"content-length:",
    b"x: y\nconnection: close", b"", b"x:\x00", b"Inference-Header-Content-Length: 1",
    b"inference-header-content-length : 1", b"x-inference-header-content-length: 1",
])  # fmt: skip
STARTS = st.sampled_from([
    b"POST /v1/x HTTP/1.1", b"GET / HTTP/1.1", b"POST /a HTTP/1.0", b"POST / a HTTP/1.1", b"POST * HTTP/1.1",
])  # fmt: skip


@given(
    STARTS,
    st.lists(LINES, max_size=5),
    st.sampled_from([b"{}", b"", b"abc", b"{}POST /v1/x HTTP/1.1\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"]),
    st.sampled_from([b"\r\n", b"\n"]),
)
@example(b"POST /v1/x HTTP/1.1", [b"Content-Length: 2"], b"{}", b"\r\n")
def test_what_is_refused_unparsed_is_what_the_parser_takes_for_one_request(first, lines, body, end) -> None:
    data = end.join([first, *lines, b"", body])
    head = whole_request(data, 1000)
    if head is None:
        return
    assert data.startswith(head)
    try:
        parsed = Parsed(data)
    except httptools.HttpParserError:
        return  # it would be refused with another status
    assert (len(parsed.paths), parsed.ended, parsed.keeps_alive) == (1, 1, True)
    assert head[5:].startswith(parsed.paths[0] + b" ")


def test_a_binary_request_can_be_refused_unparsed() -> None:
    # Its second length, that of the JSON part, is in a header whose name ends like that of the first.
    head = b"POST /v2/models/a/infer HTTP/1.1\r\nInference-Header-Content-Length: 2\r\nContent-Length: 3\r\n\r\n"
    assert whole_request(head + b"{}x", 1000) == head
    assert whole_request(head + b"{}", 1000) is None


# Connections ----------------------------------------------------------------------------------------------


def test_headers_that_never_end_are_cut_off(server) -> None:
    start = time.monotonic()
    said = raw_socket(server, b"GET /v2 HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
    assert said.startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=10) as one:  # a byte now and then
        try:
            for _ in range(100):
                one.sendall(b"\r")
                time.sleep(0.05)
                one.setblocking(False)
                try:
                    if one.recv(100)[:12] == b"HTTP/1.1 408":
                        break
                except BlockingIOError:
                    pass
                one.settimeout(10)
            else:
                pytest.fail("the connection stays open")
        except OSError:
            pass  # closed
    assert time.monotonic() - start < 9


def test_bodies_that_never_come_are_cut_off(server) -> None:
    head = b"POST /v1/models/deepfm:predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{"
    assert raw_socket(server, head).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"v" * 40_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"431"),
        (b"GET /v2 HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 8000 + b"\r\n", b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01", b"400"),
        (b"POST /v2/repository/index HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n", b"400"),
        (
            b"POST /v2/repository/index HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
            b"400",
        ),
        (
            b"POST /v2/repository/index HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"POST /v2/repository/index HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999999\r\n\r\n", b"413"),
    ],
    ids=range(9),
)  # fmt: skip
def test_malformed_http(server, data, status) -> None:
    said = raw_socket(server, data)
    assert said.split(b" ")[1] == status, said[:200]


def test_a_chunked_body_is_counted_while_it_comes(server) -> None:
    head = b"POST /v1/models/deepfm:predict HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
    said = raw_socket(server, head + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 18)
    assert b"413" in said[:20] or b"(reset)" in said


def test_requests_on_one_connection_are_answered_in_order(server) -> None:
    one = b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    last = b"GET /v2 HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    said = raw_socket(server, one * 20 + last)
    assert said.count(b'{"live": true}') == 20
    assert said.endswith(b'"statistics"]}')


def test_the_server_answers_after_all_of_that(http) -> None:
    example = http.get("/v1/models/deepfm").json["example"]
    answer = http.post("/v1/models/deepfm:predict", {"instances": [example]})
    assert answer.status == 200
    assert 0 <= json.loads(answer.body)["predictions"][0] <= 1
