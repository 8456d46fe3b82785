"""Requests changed at random: each gets an answer or a proper error, never a status of 500, never silence."""

import json
import random
import struct
from collections import Counter

import grpc
import pytest
from clients import Grpc, Http, binary_body, infer_fields, tensors_of

from viviane.serving.server.messages import message

PROPER = {200, 400, 404, 405, 408, 411, 413, 415, 431}
VALUES = [None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 1e308, 1e-320, "", "x", "\x00", "\ud7ff",
          "9" * 400, [], [[]], [None], {}, {"a": 1}, "NaN", [1] * 50, "a|b|c", "ä" * 100]  # fmt: skip
NAMES = ["price", "age", "user", "item", "hist", "tags", "code", "when", "price:missing", "hist:lengths", "nothing", ""]
KINDS = ["BOOL", "INT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "BF16", None, 7]


class Fuzz:
    """Makes requests from one seed."""

    def __init__(self, seed: int, rows: list[dict], tensors) -> None:
        self.random, self.rows, self.tensors = random.Random(seed), rows, tensors

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        make = self.random.choice([self.row_request, self.json_request, self.binary_request, self.bytes_request])
        return make()

    def row_request(self) -> tuple[str, str, bytes, dict[str, str]]:
        rows = [dict(self.random.choice(self.rows)) for _ in range(self.random.randint(0, 3))]
        for row in rows:
            for _ in range(self.random.randint(0, 3)):
                row[self.random.choice(NAMES)] = self.random.choice(VALUES)
            if self.random.random() < 0.1:
                row.pop(self.random.choice(list(row)))
        content = {"instances": rows, "partial": self.random.choice([True, False, 1])}
        path = self.random.choice(
            ["/v1/models/deepfm:predict", "/v1/models/mmoe:predict", "/v1/models/encoded:predict"]
        )
        return "POST", path, json.dumps(content).encode(), {}

    def json_request(self) -> tuple[str, str, bytes, dict[str, str]]:
        inputs = []
        for name, kind, shape, _ in self.tensors:
            data = [str(self.random.choice(VALUES)) for _ in range(shape[0])]
            inputs.append({"name": name, "datatype": kind, "shape": shape, "data": data})
        for _ in range(self.random.randint(1, 3)):
            one = self.random.choice(inputs)
            key = self.random.choice(["name", "datatype", "shape", "data", "parameters", "extra"])
            one[key] = self.random.choice({"name": NAMES, "datatype": KINDS}.get(key, VALUES))
            if key == "shape" and self.random.random() < 0.5:
                one[key] = [self.random.choice([0, 1, 2, -1, 2**40, 1.0]) for _ in range(self.random.randint(0, 3))]
        content = {"inputs": inputs}
        if self.random.random() < 0.3:
            content[self.random.choice(["id", "outputs", "parameters", "inputs"])] = self.random.choice(VALUES)
        return "POST", "/v2/models/deepfm/infer", json.dumps(content).encode(), {}

    def binary_request(self) -> tuple[str, str, bytes, dict[str, str]]:
        body, headers = binary_body(self.tensors)
        return "POST", "/v2/models/deepfm/infer", self.damaged(body), headers

    def bytes_request(self) -> tuple[str, str, bytes, dict[str, str]]:
        _, path, body, headers = self.random.choice([self.row_request, self.json_request])()
        method = self.random.choice(["POST", "POST", "PUT", "GET", "DELETE"])
        path = self.random.choice([path, path + "/x", "/v2/models/%00/infer", "/v2/models/deepfm/versions/1e3/infer"])
        return method, path, self.damaged(body), headers

    def damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.randint(1, 6)):
            place = self.random.randrange(len(changed) + 1) if changed else 0
            what = self.random.randint(0, 3)
            if what == 0 and place < len(changed):
                changed[place] = self.random.randrange(256)
            elif what == 1:
                del changed[place : place + self.random.randint(1, 20)]
            elif what == 2:
                changed[place:place] = self.random.choice([b"[" * 50, b"NaN", b"\xff\xfe", b"1e999", b"{}", b"-", b'"'])
            elif len(changed) >= place + 4:
                changed[place : place + 4] = struct.pack("<i", self.random.choice([-1, 2**31 - 1, 0]))
        return bytes(changed)


def fuzz_http(server, seed: int, count: int, rows, tensors) -> Counter:
    fuzz, client, statuses = Fuzz(seed, rows, tensors), Http(server, timeout=20), Counter()
    for number in range(count):
        method, path, body, headers = fuzz.request()
        try:
            reply = client.ask(method, path, body, {"content-type": "application/json", **headers})
        except (ConnectionError, TimeoutError) as error:
            pytest.fail(f"request {number} of seed {seed}: {error!r}, {path}, {body[:500]!r}")
        assert reply.status in PROPER, (number, seed, reply.status, path, body[:2000], reply.body[:500])
        if reply.status != 200:
            assert reply.json["error"], (number, seed)
        statuses[reply.status] += 1
    client.close()
    return statuses


def fuzz_grpc(server, seed: int, count: int, tensors) -> Counter:
    fuzz, client, codes = Fuzz(seed, [], tensors), Grpc(server), Counter()
    whole = message("ModelInferRequest")(**infer_fields("deepfm", tensors)).SerializeToString()
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for number in range(count):
        data = fuzz.damaged(whole)
        code, said = "OK", ""
        try:
            call(data, timeout=20)
        except grpc.RpcError as error:
            code, said = error.code().name, error.details()
        codes[code] += 1
        proper = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")
        assert code in proper, (number, seed, code, said, data[:500])
    client.close()
    return codes


def run(server, raw, seeds: range, each: int) -> None:
    rows = raw(20, seed=1)
    tensors = tensors_of(rows[:2], server.repository.get("deepfm").inputs)
    statuses, codes = Counter(), Counter()
    for seed in seeds:
        statuses += fuzz_http(server, seed, each * 4 // 5, rows, tensors)
        codes += fuzz_grpc(server, seed, each // 5, tensors)
    assert statuses[200] > 0
    assert statuses[400] > 0
    assert codes["INVALID_ARGUMENT"] > 0
    cases, accepted = statuses.total() + codes.total(), statuses[200] + codes["OK"]
    print(f"\nmutated requests: {cases} cases, {accepted} accepted, {cases - accepted} refused")
    client = Http(server)
    assert client.post("/v1/models/deepfm:predict", {"instances": rows}).status == 200
    client.close()


def test_five_hundred_requests_changed_at_random(server, raw) -> None:
    run(server, raw, range(1), 500)


@pytest.mark.slow
def test_ten_thousand_requests_changed_at_random(server, raw) -> None:
    run(server, raw, range(1, 11), 1000)
