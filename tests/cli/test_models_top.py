"""`viviane models` and `viviane top` against a running server; what is shown of statistics."""

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import viviane as vv
from viviane.cli import models, top
from viviane.cli.main import app
from viviane.core.errors import ConfigError, RemoteError


def say(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def server(tmp_path: Path) -> Any:
    schema = vv.Schema(labels=[{"name": "click"}], categorical=[{"name": "city", "num_ids": 9}])
    for version in (1, 2, 3):
        model = vv.Model(vv.Solver(device="cpu", seed=version), schema)
        model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[8]))
        model.compile()
        model.save(tmp_path / "ctr" / str(version))
    entry = {"name": "ctr", "path": str(tmp_path / "ctr"), "session": {"device": "cpu"}, "tables": {"host": {}}}
    config = {"http_port": 0, "grpc_port": None, "allow_load": True, "inference": {"models": [entry]}}
    with vv.Server(config) as running:
        yield running


def test_versions_are_listed_loaded_and_rolled_back(server: Any) -> None:
    url = server.url
    assert say("models", "list", url) == "ctr  3  READY\n"
    assert "version 2" in say("models", "rollback", url, "ctr")  # read from the folder
    assert say("models", "list", url) == "ctr  2  READY\n"
    say("models", "load", url, "ctr", "--version", "3")
    assert server.rollback("ctr") == 2  # still loaded
    say("models", "load", url, "ctr", "--version", "3")
    assert "version 1" in say("models", "rollback", url, "ctr", "--version", "1")
    assert {one.version for one in server.index()} == {1}
    with pytest.raises(ConfigError, match="no earlier version"):
        models.rollback(url, "ctr")
    with pytest.raises(ConfigError, match="to an earlier version"):
        models.rollback(url, "ctr", 3)
    with pytest.raises(ConfigError, match="no such model"):
        models.unload(url, "cti")
    with pytest.raises(ConfigError, match="whole number"):
        models.ask(url, "/v2/repository/models/ctr/load", {"parameters": {"version": "2"}})
    say("models", "unload", url, "ctr", "--version", "1")
    assert say("models", "list", url) == ""


def test_a_version_that_cannot_be_loaded_is_refused_with_the_reason(server: Any, tmp_path: Path) -> None:
    url = server.url
    with pytest.raises(ConfigError, match="no such version") as found:
        models.load(url, "ctr", 9)
    assert (found.value.value, found.value.allowed) == ("9", "1, 2, 3")
    assert say("models", "list", url) == "ctr  3  READY\n"  # no line about versions that do not exist
    dense = tmp_path / "ctr" / "2" / "weights" / "dense.safetensors"
    dense.write_bytes(dense.read_bytes() + b"more")
    for change in (models.load, models.rollback):
        with pytest.raises(ConfigError, match="refuses the request: a file of the checkpoint was altered") as found:
            change(url, "ctr", 2)
        assert "dense.safetensors" in str(found.value)
    assert "ctr  2  UNAVAILABLE  a file of the checkpoint was altered" in say("models", "list", url)
    assert "ctr  3  READY" in say("models", "list", url)
    with pytest.raises(RemoteError) as unreachable:
        models.ask("http://127.0.0.1:1", "/v2/models/stats")
    assert unreachable.value.value == "[Errno 111] Connection refused"


def test_a_refusal_is_told_as_the_server_does(server: Any, tmp_path: Path) -> None:
    entry = {"name": "ctr", "path": str(tmp_path / "ctr"), "session": {"device": "cpu"}}
    closed = vv.Server({"http_port": 0, "grpc_port": None, "inference": {"models": [entry]}})
    with closed, pytest.raises(ConfigError) as refused:
        models.load(closed.url, "ctr", 3)
    lines = str(refused.value).splitlines()
    assert lines[0] == "the server refuses the request: this server loads and unloads nothing over the network"
    assert lines[-1] == "  do:      start it with --allow-load"


def test_words_that_cannot_be_are_refused() -> None:
    for words, message in (
        (["lode", "http://a", "ctr"], "did you mean 'load'"),
        (["http://a", "list"], "the action comes first: viviane models list http://a"),  # the older order
        (["http://a", "load", "ctr", "--version", "7"], "viviane models load http://a ctr --version 7"),
        (["list", "http://a", "ctr"], "unexpected extra argument"),
        (["load", "http://a"], "Missing argument 'MODEL'"),
    ):
        result = CliRunner().invoke(app, ["models", *words], prog_name="viviane", env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert message in result.output
    with pytest.raises(ConfigError, match="not the address"):
        models.list_models("127.0.0.1:8000")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but nothing listens
        with pytest.raises(RemoteError, match="no server responds"):
            models.list_models(f"http://127.0.0.1:{held.getsockname()[1]}")


def test_top_shows_a_server_once(server: Any) -> None:
    server.predict("ctr", {"city": [3, 4, 3]})
    shown = say("top", server.url, "--once")
    assert "hits" in shown
    assert [word for word in ("host", "snapshot", "cache") if word in shown] == ["host", "snapshot", "cache"]


def stats(hits: int, degraded: int) -> list[Any]:
    tier = {"tier": "host", "hits": hits, "misses": 10, "bytes_read": hits * 10**6, "available": True,
            "fetch_p50_ms": 0.5, "fetch_p99_ms": 2.0}  # fmt: skip
    updates = {"connected": False, "publication": 7, "staleness_s": 1.5, "rows": 1234, "gaps": [{}]}
    tables = [{"table": "item", "degraded": degraded, "tiers": [tier]}]
    return [{"name": "ctr", "version": "1", "parameter_server": {"tables": tables, "updates": updates}}]


def test_top_shows_rates_between_two_readings() -> None:
    before, now = top.counts_of(stats(100, 1)), top.counts_of(stats(300, 5))
    cells = [next(iter(column.cells)) for column in top.table_of(now, before, 2.0, "").columns]
    assert cells == ["ctr 1", "item", "host", "ok", "100", "0", "100.0%", "100.0", "0.500", "2.000", "2"]
    again = [next(iter(column.cells)) for column in top.table_of(before, now, 2.0, "").columns]
    assert again[4] == "0"  # a version that was loaded again counts from 0
    line = "ctr 1: not connected, publication 7, staleness 1.50 s, 1,234 rows, gaps 1"
    assert top.updates_of(stats(1, 0)) == line
    refusing = stats(1, 0)
    refusing[0]["parameter_server"]["updates"] |= {"refused": 3, "last_error": "deltas of another publisher"}
    assert top.updates_of(refusing) == f"{line}, refused 3: deltas of another publisher"
    assert "no tables in tiers" in list(top.table_of({}, {}, None, "").columns[0].cells)


@pytest.mark.parametrize("reply", [
    {}, [], [[]], 3, None, {"model_stats": 3}, {"model_stats": [3]}, {"model_stats": [{"name": "m"}]},
    {"model_stats": [{"name": "m", "version": "1", "parameter_server": []}]},
    {"model_stats": [{**stats(1, 1)[0], "version": 3}]},
    {"model_stats": [{**stats(1, 1)[0], "parameter_server": {"tables": [{"table": "t", "degraded": 0}]}}]},
    {"model_stats": stats(-1, 0)}, {"model_stats": stats(2**64, 0)},
])  # fmt: skip
def test_top_refuses_replies_of_another_form(reply: Any) -> None:
    with pytest.raises(RemoteError, match="statistics have another form"):
        top.checked_stats(reply, "http://a")


def test_top_takes_replies_of_other_servers_and_shows_no_control_characters() -> None:
    assert top.counts_of(top.checked_stats({"model_stats": [{"name": "m", "version": "1", "more": 3}]}, "u")) == {}
    hostile = {**stats(1, 1)[0], "name": "m\x1b[2J"}
    assert "\x1b" not in top.updates_of(top.checked_stats({"model_stats": [hostile]}, "u"))


def test_addresses_that_cannot_be_are_refused() -> None:
    for url in ("http://a..b:80", "http://[::1", "http://[x]:3", f"http://{'x' * 5000}"):
        with pytest.raises(ConfigError, match=r"not (the address of a server|a valid host)"):
            models.ask(url, "/v2/models/stats")
