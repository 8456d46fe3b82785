"""Every command, with mutated words, options and input files: success, or a VivianeError, which exits with 2.

The command line runs in this process. A case is drawn from a seed, and the seed is in the message of a failure:
`run_case(seed, ...)` repeats it. A server of the fixture answers `models`, `top` and `load-test` with mutated JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_counts import tell
from mutations import mutate
from typer.main import get_command
from typer.testing import CliRunner

from viviane.cli import main
from viviane.config import Solver
from viviane.core.machine_errors import as_own_error
from viviane.data import convert, write_dataset
from viviane.model import Model
from viviane.schema import Schema
from viviane.serving.server import InferenceServer
from viviane.zoo import TwoTower

SLOW_CASES = int(os.environ.get("VIVIANE_FUZZ_CASES", "10000"))
MOST_SECONDS = 10
WORDS = [
    "", "0", "-1", "1e999", "nan", "inf", "9" * 400, "\0", "\ud800", "../x", ".", "a=b",
    "=", "--", "-", "x" * 5000, "cuda:99", "cpu", "hash:click:train=2",
    "time:x:y@z", "rows:train=1e999", "4GB", "-4GB", "1.5.2 GB", "s3://", "s3://a:b@c/d", "file://", "http://", "{}",
    "[]", "solver.lr=NaN", "solver.seed=1e999", "model=3", "data.train.x=1", "solver=[]", "model.zoo=[]",
    "model.zoo=\"dlrm\"", "solver.plan=3", "metrics=3", "solver.lr=1e-4:0.1:log", "solver.lr=0:nan", "model.dim=2,x",
    "1,2,x", "0x", "-1x,nan", "é", "*", "[", "/dev/null", "/proc/self/mem", "1", "3", "18446744073709551616", "--help",
]  # fmt: skip
LIKELY = [
    "1", "2", "7", "0.5", "cpu", "auto", "csv", "parquet", "npy", "safetensors", "viviane", "norm", "raw", "criteo",
    "exact", "ivf", "hnsw", "sq8", "skip", "reject", "fail", "duckdb", "rows:a=0.5,b=0.5", "fp32", "fp16", "bf16",
    "int8", "plain", "kernels", "onnx", "torchscript", "aoti", "http", "grpc", "sgd", "adam", "uniform", "zipf", "item",
    "click", "solver.lr=0.5", "m", "file", "3,4",
]  # fmt: skip
"""Values that some options take, so that a case comes beyond the command line."""
NOT_DRAWN = {"--processes", "--gpus", "--max-restarts", "--install-triton", "--spark", "--master", "--seconds"}
"""Options that start processes, install, or only prolong."""
FILES = {
    "etl": ["raw.csv", "etl.json", "clean/etl.zip"],
    "check": ["clean/train/manifest.json", "clean/train/schema.json", "clean/train/part-00000.parquet"],
    "convert": ["clean/train/manifest.json", "clean/train/schema.json", "clean/train/part-00000.parquet",
                "clean/train/info.json"],
    "keyset": ["clean/train/manifest.json", "clean/train/schema.json"],
    "train": ["clean/train/schema.json", "clean/train/info.json"],
    "evaluate": ["run/model/model.json", "run/model/files.json", "run/model/weights/manifest.json"],
    "predict": ["run/model/model.json", "run/model/schema.json", "run/model/etl.zip", "raw.csv"],
    "serve": ["serve.json", "run/model/model.json", "run/model/weights/manifest.json"],
    "store": ["tiers.json", "run/model/model.json", "run/model/weights/manifest.json"],
    "index": ["towers/index/index.json", "towers/index/index.faiss", "towers/model.json"],
    "recommend": ["towers/index/index.json", "towers/index/vectors.npy", "towers/schema.json", "pairs/manifest.json"],
    "summary": ["train.json", "clean/train/schema.json"],
    "plan": ["train.json", "clean/train/schema.json"],
    "checkpoint": ["run/model/weights/manifest.json", "run/model/weights/dense.safetensors"],
    "report": ["run/metrics.jsonl", "run/stages.json", "run/config.json", "run/data_info.json", "run/machine.json",
               "run/schema.json", "run/valid_histogram.json", "run/tiers.json"],
    "compare": ["run/metrics.jsonl", "run/stages.json", "run/config.json", "run/machine.json"],
    "tune": ["clean/train/schema.json"],
    "hugectr": ["norm/train/file_list.txt", "train.json"],
}  # fmt: skip
"""The files that a command reads; one of them may be mutated."""


class Hostile(BaseHTTPRequestHandler):
    """Answers with the JSON that the real server would send, mutated by the counter of requests."""

    rng = random.Random(0)
    answers = (
        [{"name": "m", "version": "1", "state": "READY", "reason": ""}],
        {"model_stats": [{"name": "m", "version": "1", "tables": {"t": {"tiers": [{"name": "x", "hits": 1}]}}}]},
        {"version": 2}, {"error": "no such model"},
    )  # fmt: skip

    def do_GET(self) -> None:
        body = json.dumps(self.rng.choice(self.answers)).encode()
        if self.rng.random() < 0.7:
            body = mutate(body, self.rng)
        length = len(body) + (50 if self.rng.random() < 0.05 else 0)
        self.send_response(self.rng.choice([200, 200, 200, 200, 400, 404, 500, 503]))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def samples(place: Path) -> Path:
    """The common samples, and a model of two towers with its index and rows, a store, HugeCTR's files, settings."""
    schema = Schema(
        labels=[{"name": "click"}],
        categorical=[
            {"name": "item", "num_ids": 30},
            {"name": "seen", "num_ids": 30, "kind": "sequence", "max_length": 3, "vocabulary": "item"},
        ],
    )
    rng = np.random.default_rng(1)
    seen = [rng.integers(3, 30, rng.integers(4)) for _ in range(64)]
    rows = {"click": np.ones(64, dtype=np.float32), "item": rng.integers(3, 30, 64), "seen": seen}
    data = write_dataset(place / "pairs", schema, rows)
    model = Model(Solver(batch_size=16, device="cpu", max_steps=1), schema)
    model.add(TwoTower(user="seen", item="item", dim=2, user_mlp=[2], item_mlp=[2], out_dim=2))
    model.compile()
    model.fit(data)
    model.save(place / "towers")
    done = run_words(["index", "build", str(place / "towers"), "--kind", "hnsw"], place, seconds=300)
    assert done == "exit 0", done
    convert(data, place / "norm/train", "norm")
    shutil.copytree(place / "run", place / "other")
    (place / "tiers.json").write_text(json.dumps({"rocksdb": {"folder": "db"}}))
    served = {"http_port": 0, "grpc_port": 0, "inference": {"models": [
        {"name": "m", "path": str(place / "run/model"), "session": {"device": "cpu"}}]}}  # fmt: skip
    (place / "serve.json").write_text(json.dumps(served))
    (place / "script.py").write_text("import sys\nprint(len(sys.argv))\n")
    return place


def commands(folder: Path, url: str) -> dict[str, list[list[str]]]:
    """Command lines of every command that end by themselves; only such that are quick."""
    data, model, config = str(folder / "clean/train"), str(folder / "run/model"), str(folder / "train.json")
    weights, towers, pairs, run = f"{model}/weights", str(folder / "towers"), str(folder / "pairs"), str(folder / "run")
    other = str(folder / "other")
    raw, tiers = str(folder / "raw.csv"), ["--config", str(folder / "tiers.json")]
    return {
        "generate": [["made", "--rows", "50", "--valid-rows", "10", "--max-cardinality", "9"]],
        "etl": [[raw, "--output", "out", "--config", str(folder / "etl.json"), "--threads", "1"],
                [raw, "--output", "out", "--apply", str(folder / "clean"), "--threads", "1"],
                [raw, "--infer", "--label", "click", "--output", "out", "--threads", "1"]],
        "check": [[data], [raw], [model]],
        "keyset": [[data, "--output", "k"], [pairs, "--output", "k", "--hugectr", "--i64"]],
        "summary": [[config], [model, "--plot", "x.svg"]],
        "plan": [[config, "--processes", "2", "--memory-gb", "1", "--memory-gb-per-s", "10"]],
        "train": [[config, "--run-folder", "run", "--set", "solver.max_steps=1"]],
        "tune": [[config, "--output", "tuned", "--trials", "1", "--set", "data.validation=" + json.dumps(data),
                  "--search", "solver.lr=1e-4:0.1:log", "--set", "metrics=[\"auc\"]"]],
        "evaluate": [[model, data], [model, data, "--json"]],
        "predict": [[model, data, "--output", "out.csv"], [model, raw, "--output", "out.parquet"]],
        "export": [[model, "--output", "exported", "--to", "torchscript"]],
        "serve": [["--config", str(folder / "serve.json")], [model, "--port", "0", "--grpc-port", "0"],
                  [model, "--write-only", "triton"]],
        "models": [["list", url], ["load", url, "m"], ["unload", url, "m"], ["rollback", url, "m", "--version", "1"]],
        "top": [[url, "--once"]],
        "load-test": [[url, "--seconds", "0.1", "--concurrency", "1", "--rates", "", "--timeout-s", "1"]],
        "store": [["import", model, *tiers], ["inspect", model, *tiers], ["verify", model, *tiers],
                  ["export", model, *tiers, "--output", "rows"]],
        "index": [["build", towers, "--output", "i", "--data", pairs], ["inspect", towers]],
        "recommend": [[towers, pairs, "--output", "r.csv", "-k", "3"], [towers, "--similar", "3,5", "-k", "2"]],
        "convert": [[data, "made", "--to", "viviane"], [pairs, "made", "--to", "norm"]],
        "trace": [[config, "--steps", "1", "--output", "t"]],
        "bench": [["embedding", "--rows", "50", "--batch-size", "4", "--dim", "2", "--peers", "none",
                   "--seconds", "0.01"]],
        "checkpoint": [["inspect", weights, "--json"], ["diff", weights, weights], ["compact", weights, "c"],
                       ["reshard", weights, "c", "--processes", "2"], ["export", weights, "c", "--format", "npy"]],
        "report": [[run], [run, "--importance", data, "--rows", "20"]],
        "compare": [[run, other, "--output", "c.html"], [other, run, "--json"]],
        "schema": [["train"], ["etl", "--output", "s.json"]],
        "doctor": [["--json"]],
        "hugectr": [["--train", config], [str(folder / "script.py"), "a"]],
        "sok": [[str(folder / "script.py"), "a"]],
    }  # fmt: skip


class TooLong(BaseException):
    """A case asked for more work than the test has time for, such as a billion trials; not a fault."""


@contextlib.contextmanager
def within(seconds: float, memory_bytes: int = 4 << 30) -> Iterator[None]:
    """End a case that takes too long, and bound the addresses that it takes."""

    def ring(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def run_words(words: list[str], folder: Path, told: str = "", seconds: float = MOST_SECONDS) -> str:
    """Run one command line in this process; returns how it ended."""
    done = None
    with contextlib.chdir(folder), contextlib.suppress(TooLong), within(seconds):
        done = CliRunner().invoke(main.app, words)
    if done is None or isinstance(done.exception, TooLong):
        return "too long"
    error = done.exception
    if error is None or isinstance(error, SystemExit):
        assert done.exit_code in (0, 1, 2), (words, told, done.exit_code, done.output)
        return f"exit {done.exit_code}"
    own = as_own_error(error)
    if own is None and words[0] in ("hugectr", "sok") and not is_of_package(error):
        return "the script's own error"
    if own is None:
        text = "".join(traceback.format_exception(error))[-3000:]
        pytest.fail(f"{words!r}, {told}: {text}")
    return type(own).__name__


def is_of_package(error: BaseException) -> bool:
    """Whether an error was raised in a file of the package or of a library, not in a script."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return any(part in last for part in ("/viviane/", "/site-packages/", "/lib/python"))


def parsers(command: str) -> dict[str, Any]:
    """A command as Click sees it, by "", or its subcommands by name."""
    one: Any = get_command(main.app).get_command(None, command)  # type: ignore[attr-defined,arg-type]
    return getattr(one, "commands", {"": one})


def parser_of(command: str, words: list[str]) -> Any:
    """The command, or its subcommand that the first word names; None if there is none."""
    return parsers(command).get("" if "" in parsers(command) else words[0] if words else "")


def options(command: str, words: list[str]) -> list[Any]:
    """All options of a command line that may be drawn."""
    found = getattr(parser_of(command, words), "params", [])
    return [one for one in found if one.opts[0].startswith("-") and not NOT_DRAWN & {*one.opts}]


def drawn_option(one: Any, rng: random.Random) -> list[str]:
    """A flag, or an option with a value: one that some option takes, or a hostile word."""
    name = rng.choice([*one.opts, *one.secondary_opts])
    if getattr(one, "is_flag", False) and rng.random() < 0.8:
        return [name]
    return [name, rng.choice(LIKELY if rng.random() < 0.4 else WORDS)]


def run_case(seed: int, name: str, samples: Path, work: Path, url: str) -> str:
    """Run one command with a mutated file, mutated words, or both."""
    rng = random.Random(seed)
    Hostile.rng = random.Random(seed)
    words, changed = list(rng.choice(commands(work, url)[name])), None
    kind = rng.random()
    if kind < 0.5 and name in FILES:
        file = rng.choice(FILES[name])
        if (samples / file).exists():
            changed = work / file
            changed.write_bytes(mutate((samples / file).read_bytes(), rng))
    if changed is None or kind < 0.1:
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.6 and (known := options(name, words)):
                words += drawn_option(rng.choice(known), rng)
            else:
                words[rng.randrange(len(words))] = rng.choice(WORDS)
    folder = work / "one"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        return run_words([name, *words], folder, f"seed {seed}, command {name}, file {changed}")
    finally:
        if changed is not None:
            changed.write_bytes((samples / changed.relative_to(work)).read_bytes())


def fuzz(samples: Path, work: Path, url: str, cases: int, start: int = 0) -> Counter[str]:
    """Run cases over all commands in turn; returns how often each outcome occurred."""
    copied(samples, work)
    found: Counter[str] = Counter()
    every = list(main.COMMANDS)
    for number in range(cases):
        found[run_case(start + number, every[number % len(every)], samples, work, url)] += 1
    return found


def copied(samples: Path, work: Path) -> None:
    """Copy the samples; settings name the copy."""
    shutil.copytree(samples, work)
    for name in ("train.json", "serve.json"):
        file = work / name
        file.write_text(file.read_text().replace(str(samples), str(work)))


@pytest.fixture
def serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`viviane serve` starts and stops; it does not wait for requests."""
    monkeypatch.setattr(InferenceServer, "run", lambda self, started: self.start().stop())


def test_every_command_and_subcommand_is_driven_by_a_valid_line(samples: Path, url: str) -> None:
    """Those of groups were not, and the lines of `models` named none."""
    lines = commands(samples, url)
    assert set(lines) == set(main.COMMANDS)
    for name, words in lines.items():
        assert {line[0] for line in words} == set(parsers(name)) or "" in parsers(name), name
        for line in words:
            rest = line if "" in parsers(name) else line[1:]
            parser_of(name, line).make_context(name, list(rest))  # a usage error where the line is none


def test_every_option_may_be_drawn(samples: Path, url: str) -> None:
    rng = random.Random(1)
    for name, words in commands(samples, url).items():
        for line in words:
            every = {one for option in parser_of(name, line).params for one in option.opts if one.startswith("-")}
            known = options(name, line)
            found = {drawn_option(rng.choice(known), rng)[0] for _ in range(60 * len(known))} if known else set()
            secondary = {one for option in known for one in option.secondary_opts}
            assert every - NOT_DRAWN - {"--help"} <= found <= every | secondary, (name, line)


@pytest.mark.usefixtures("serves_nothing")
def test_mutated_commands_end_with_success_or_an_error_of_ours(samples: Path, tmp_path: Path, url: str) -> None:
    found = fuzz(samples, tmp_path / "work", url, 84)
    assert found.total() == 84
    assert len(found) > 3


def test_command_lines_that_once_ended_in_a_raw_error(samples: Path, tmp_path: Path, url: str) -> None:
    tune = commands(samples, url)["tune"][0]
    for words in (
        ["bench", "embedding", "--dim", str(2**64), "--rows", "50"], ["tune", *tune, "--seed", str(2**64)],
    ):  # fmt: skip
        assert run_words(words, tmp_path) == "exit 2"
    Hostile.answers, before = ([],), Hostile.answers
    Hostile.rng = random.Random(5)
    try:
        found = {run_words(["models", "rollback", url, "m"], tmp_path) for _ in range(8)}
    finally:
        Hostile.answers = before
    assert "RemoteError" in found
    (tmp_path / "s.py").write_text("print(false)\n")
    assert run_words(["sok", "s.py"], tmp_path) == "the script's own error"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an alarm left a new socket open
@pytest.mark.usefixtures("serves_nothing")
def test_many_mutated_commands(samples: Path, tmp_path: Path, url: str) -> None:
    start = random.SystemRandom().randrange(1 << 40)
    found = fuzz(samples, tmp_path / "work", url, SLOW_CASES, start)
    assert found.total() == SLOW_CASES
    tell("mutated command lines", found)
