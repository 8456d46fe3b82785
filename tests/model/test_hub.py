"""A model goes to a Hub and comes back; the Hub is a small HTTP server of the same addresses."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import viviane as vv
from viviane.core.errors import ConfigError, RemoteError
from viviane.model.hub import model_card

pytest.importorskip("huggingface_hub")
SHA = "a" * 40
SCHEMA = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])


class Hub(BaseHTTPRequestHandler):
    """Keeps the files of commits in memory: the part of the Hub's protocol for small files."""

    files: dict[str, bytes]

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def place(self) -> str:
        return f"http://{self.headers['Host']}"

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.reply({"url": f"{self.place}/me/clicks", "id": "me/clicks", "name": "me/clicks"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self.reply(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.reply({"commitUrl": f"{self.place}/me/clicks/commit/{SHA}", "commitOid": SHA, "hookOutput": "",
                        "success": True})  # fmt: skip
        else:
            self.reply({}, 200)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            content = self.files.get(self.path.split(f"/resolve/{SHA}/")[1].split("?")[0])
            if content is None:
                self.reply({}, 404)
                return
            self.reply(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)
        elif self.path.startswith("/api/models/me/clicks/tree"):
            self.reply([{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                        for n, c in self.files.items()])  # fmt: skip
        elif self.path.startswith("/api/models/me/clicks"):
            listed = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            self.reply({"id": "me/clicks", "sha": SHA, "siblings": listed, "private": False, "tags": []})
        else:
            self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    handler = type("OwnHub", (Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def model() -> vv.Model:
    made = vv.Model(vv.Solver(device="cpu"), SCHEMA, name="clicks")
    made.add(vv.zoo.DeepFM(dim=2, deep_mlp=(4,)))
    made.compile()
    return made


def test_a_pushed_model_comes_back_with_the_same_bits(hub: str) -> None:
    made = model()
    made.push_to_hub(
        "me/clicks", endpoint=hub, token="hf_x", card=model_card(made, license="mit", figures={"auc": 0.7})
    )
    again = vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x", device="cpu")
    rows = {"c": [3, 4, 5]}
    assert np.array_equal(again.predict(rows), made.predict(rows))


def test_a_hub_that_fails_is_asked_again(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    made.push_to_hub("me/clicks", endpoint=hub, token="hf_x", card=model_card(made, license="mit"))
    failures = [1, 1]
    answer = Hub.do_GET

    def failing(self: Hub) -> None:
        if failures and "/resolve/" not in self.path:
            failures.pop()
            self.reply({"error": "busy"}, 503)
        else:
            answer(self)

    monkeypatch.setattr(Hub, "do_GET", failing)
    rows = {"c": [3, 4, 5]}
    again = vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x", device="cpu")
    assert np.array_equal(again.predict(rows), made.predict(rows))
    assert not failures
    failures += [1] * 1000
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "2")
    with pytest.raises(RemoteError):
        vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x", device="cpu")


def test_what_the_hub_refuses_is_an_error_of_ours(hub: str) -> None:
    with pytest.raises(RemoteError, match="does not give"):
        vv.Model.from_hub("me/other", endpoint=hub, token="hf_x")


def test_a_repository_without_a_model_is_refused(hub: str) -> None:
    with pytest.raises(ConfigError, match="no model of Viviane"):
        vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x", device="cpu")


@pytest.mark.parametrize("name", ["../outside", "/tmp/viviane-outside", "a\0b", "weights/../../outside", "\ud800"])
def test_a_repository_whose_files_lead_elsewhere_is_refused(hub: str, name: str, tmp_path: Path) -> None:
    made = model()
    made.push_to_hub("me/clicks", endpoint=hub, token="hf_x", card="card")
    with_crafted = json.dumps({"rfilename": name, "path": name, "size": 1, "oid": "0" * 40, "type": "file"})
    with pytest.MonkeyPatch.context() as patch:
        usual = Hub.reply

        def reply(self: Hub, content: Any, status: int = 200, **headers: str) -> None:
            if isinstance(content, dict) and "siblings" in content:
                content = {**content, "siblings": [*content["siblings"], json.loads(with_crafted)]}
            elif isinstance(content, list):
                content = [*content, json.loads(with_crafted)]
            usual(self, content, status, **headers)

        patch.setattr(Hub, "reply", reply)
        patch.setenv("VIVIANE_REMOTE_ATTEMPTS", "1")
        with pytest.raises(RemoteError, match="does not give"):
            vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x")
    assert not list(tmp_path.rglob("*outside*"))


@pytest.mark.parametrize("answer", [b"null", b"[1]", b"x", b'{"id": 3}', b"[" * 100_000, b"9" * 5000])
def test_answers_that_are_none_of_the_hub_are_errors_of_ours(
    hub: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model().push_to_hub("me/clicks", endpoint=hub, token="hf_x", card="card")
    monkeypatch.setattr(Hub, "do_GET", lambda self: self.reply(answer))
    monkeypatch.setenv("VIVIANE_REMOTE_ATTEMPTS", "1")
    with pytest.raises(RemoteError, match="does not give"):
        vv.Model.from_hub("me/clicks", endpoint=hub, token="hf_x")


def test_arguments_that_name_no_repository_are_errors_of_ours(hub: str) -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ("", {}), ("a/b/c", {}), (None, {}), (3, {}), ("me/clicks", {"revision": 3}), ("me/clicks", {"token": "x\n"}),
        ("me/clicks", {"endpoint": "ftp://x"}), ("me/clicks", {"endpoint": "\0"}),
    ]  # fmt: skip
    for name, more in wrong:
        with pytest.raises(RemoteError):
            vv.Model.from_hub(name, **{"endpoint": hub, "token": "hf_x", **more})


def test_the_card_names_columns_sizes_and_figures() -> None:
    card = model_card(model(), license="mit", text="For tests.", figures={"auc": 0.71})
    assert card.startswith("---\nlibrary_name: viviane\n")
    for part in (
        "license: mit",
        "# clicks",
        "For tests.",
        "| auc | 0.71000 |",
        "| `c` | one_hot | 9 |",
        "encoded rows",
    ):
        assert part in card
