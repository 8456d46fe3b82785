"""Clients of a server, as plain as can be: what they send is what a test says."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from viviane.serving.server.messages import SERVICE, message


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One HTTP connection."""

    def __init__(self, server, timeout: float = 30) -> None:
        self.port = server.http_port
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, content: Any, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.ask("POST", path, body, {"content-type": "application/json", **headers})

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        self.connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = self.connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())

    def close(self) -> None:
        self.connection.close()


class Grpc:
    """One gRPC channel."""

    def __init__(self, server) -> None:
        self.channel = grpc.insecure_channel(server.grpc_target, [("grpc.max_receive_message_length", -1)])

    def ask(self, call: str, timeout: float = 30, **fields: Any) -> Any:
        method = self.channel.unary_unary(
            f"/{SERVICE}/{call}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=message(f"{call}Response").FromString,
        )
        return method(message(f"{call}Request")(**fields), timeout=timeout)

    def close(self) -> None:
        self.channel.close()


def raw_socket(server, data: bytes, timeout: float = 10) -> bytes:
    """Send bytes, and return all that the server says until it closes the connection or says nothing more."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=timeout) as one:
        one.sendall(data)
        said = b""
        try:
            while part := one.recv(65536):
                said += part
        except TimeoutError:
            said += b"(timeout)"
        except ConnectionResetError:
            said += b"(reset)"
    return said


def text_bytes(values: list[str | None]) -> bytes:
    parts = [("" if one is None else one).encode() for one in values]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def tensors_of(rows: list[dict], inputs) -> list[tuple[str, str, list[int], bytes]]:
    """Return raw rows as tensors: every column as the text that a log holds, missing values as empty text."""
    found = []
    for column in inputs:
        texts = [None if row[column.name] is None else str(row[column.name]) for row in rows]
        found.append((column.name, "BYTES", [len(rows), 1], text_bytes(texts)))
    return found


def binary_body(tensors: list[tuple[str, str, list[int], bytes]], **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a request with the binary extension."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in tensors
    ]
    head = json.dumps({"inputs": inputs, **more}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    return head + b"".join(data for *_, data in tensors), headers


def infer_fields(model: str, tensors: list[tuple[str, str, list[int], bytes]]) -> dict[str, Any]:
    """Return the fields of a gRPC request."""
    inputs = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape, _ in tensors]
    return {"model_name": model, "inputs": inputs, "raw_input_contents": [data for *_, data in tensors]}


def output_of(response: Any, name: str) -> np.ndarray:
    """Return an output of a gRPC answer."""
    place = [one.name for one in response.outputs].index(name)
    return np.frombuffer(response.raw_output_contents[place], "<f4").reshape(response.outputs[place].shape)
