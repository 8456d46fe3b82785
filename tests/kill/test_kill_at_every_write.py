"""kill -9 at every write of what writes outputs (train, etl, generate, convert, save, export, index, tune, Triton's
repository, a store), new and over older ones.

Afterwards the older or the new output is whole, the next run works, and nothing is left behind. The quick tests kill.
The slow ones run a program once and keep what its folder holds before each write, which is what a kill at that moment
leaves; the next run starts from each of these states, and some of them are compared with those of real kills.
"""

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kill.killed import restore
from viviane.cli.main import app
from viviane.core.errors import VivianeError
from viviane.data import Dataset
from viviane.etl import FittedEtl
from viviane.export import load as load_artifact
from viviane.model.saving import verify_model
from viviane.retrieval import ItemIndex, Recommender
from viviane.serving.triton.repository import ModelPart
from viviane.training import verify_checkpoint
from warm import Warm

KILLED = Path(__file__).with_name("killed.py")
COMMAND = "from viviane.cli.main import main; main()"
SAVE = "from viviane.model import Model; Model.load('one', device='cpu').save('out')"
SAVE_CHECKPOINT = """
from viviane.model import Model
Model.load('one', device='cpu').trainer.save_checkpoint('out')
"""
SAVE_INDEX = """
import numpy as np
from viviane.retrieval import ItemIndex
vectors = np.random.default_rng(0).normal(size=(40, 4)).astype('float32')
ItemIndex(vectors, np.arange(3, 43), 'hnsw').save('out')
"""
SAVE_RECOMMENDER = """
from viviane.retrieval import ItemKNN, Popularity, Recommender
from viviane.retrieval.histories import Histories
users = Histories.of([[3, 4, 5], [4, 5], [3, 5]])
Recommender([ItemKNN.count(users, 6)]).save('out')
"""
SAVE_TOWERS = """
from viviane import Schema, Solver
from viviane.model import Model
from viviane.zoo import TwoTower
columns = [{'name': 'item', 'num_ids': 30}]
columns += [{'name': 'seen', 'num_ids': 30, 'kind': 'sequence', 'max_length': 3, 'vocabulary': 'item'}]
schema = Schema(labels=[{'name': 'click'}], categorical=columns)
model = Model(Solver(batch_size=16, device='cpu', max_steps=1), schema)
model.add(TwoTower(user='seen', item='item', dim=2, user_mlp=[2], item_mlp=[2], out_dim=2))
model.compile()
model.save('towers')
"""
SEQUENCES = """
from viviane.etl import SequenceConfig, sequences
columns = [{'name': name, 'type': 'int'} for name in ('label', 'I1')]
config = SequenceConfig(
    input={'header': False, 'delimiter': '\\t', 'columns': [*columns, {'name': 'I2'}, {'name': 'C1'}, {'name': 'C2'}]},
    by='C1', order_by='I1', columns=[{'name': 'seen', 'source': 'C2', 'last': 3}])
sequences(config, 'raw.txt', 'out', threads=1, overwrite=True)
"""
SMALL = ["--rows", "300", "--num-dense", "2", "--num-categorical", "2", "--max-cardinality", "20", "--threads", "1"]
COLUMNS = ["--preset", "criteo", "--num-dense", "2", "--num-categorical", "2"]
ETL = ["etl", "raw.txt", *COLUMNS, "--threads", "1", "-o", "out"]
CONFIG = {
    "data": {"train": "data", "validation": "data"},
    "solver": {"batch_size": 100, "lr": 0.01, "device": "cpu", "checkpoint_every": 2, "keep_checkpoints": 1},
    "model": {"zoo": "dcn_v2", "dim": 2, "deep_mlp": [4], "num_cross_layers": 1},
    "metrics": ["log_loss"],
}


@dataclass(frozen=True)
class Case:
    """A program, and what it writes.

    Args:
        words: of the program; the first is code, or a command.
        older: a program that writes an older output before, or None.
        again: the next run, where it is not the same.
        outputs: what it writes, each old or new after a kill.
        then: what one more run says, which has nothing left to do.
    """

    words: tuple[str, ...]
    older: tuple[str, ...] | None = None
    again: tuple[str, ...] | None = None
    outputs: tuple[str, ...] = ("out",)
    then: str | None = None


TRAIN = ("train", "c.json", "--run-folder", "run")
TUNE = ("tune", "c.json", "-o", "out", "--trials", "2", "--search", "solver.lr=1e-4:0.1:log")
TIERS = ("--config", "tiers.json")
INCREMENTS = ("--set", "solver.incremental_checkpoints=2", "--set", "solver.checkpoint_every=1")
GENERATE = ("generate", "out", *SMALL)
CASES = {
    "generate": Case(GENERATE),
    "generate over": Case((*GENERATE, "--overwrite"), ("generate", "out", *SMALL, "--seed", "5")),
    "generate text over": Case(
        ("generate", "out.txt", *SMALL, "--format", "criteo", "--overwrite"),
        ("generate", "out.txt", *SMALL, "--format", "criteo", "--seed", "5"), outputs=("out.txt",),
    ),
    "convert": Case(("convert", "data", "out", "--to", "viviane")),
    "convert over": Case(
        ("convert", "data", "out", "--to", "norm", "--overwrite", "--columns", "label,I1,I2,C1,C2"),
        ("generate", "out", *SMALL, "--seed", "5"),
    ),
    "etl": Case(tuple(ETL)),
    "etl over": Case((*ETL, "--overwrite"), (*ETL, "--min-count", "2")),
    "etl split over": Case(
        (*ETL, "--overwrite", "--split", "rows:train=0.7,valid=0.3"), (*ETL, "--min-count", "2"),
        outputs=("out",),
    ),
    "save": Case((SAVE,)),
    "save over": Case((SAVE,), (SAVE.replace("'one'", "'two'"),)),
    "save checkpoint over": Case((SAVE_CHECKPOINT,), (SAVE_CHECKPOINT.replace("'one'", "'two'"),)),
    "reshard": Case(("checkpoint", "reshard", "one/weights", "out", "--processes", "2")),
    "export": Case(("checkpoint", "export", "one/weights", "out", "--format", "safetensors")),
    "compact": Case(("checkpoint", "compact", "increments/checkpoints/step-00000009", "out")),
    "artifact over": Case(
        ("export", "one", "--output", "out", "--to", "torchscript"),
        ("export", "two", "--output", "out", "--to", "torchscript"),
    ),
    "torch-export over": Case(
        ("export", "one", "--output", "out", "--to", "torch-export"),
        ("export", "two", "--output", "out", "--to", "torch-export"),
    ),
    "onnx over": Case(
        ("export", "one", "--output", "out", "--to", "onnx"), ("export", "two", "--output", "out", "--to", "onnx")
    ),
    "index over": Case((SAVE_INDEX,), (SAVE_INDEX.replace("hnsw", "exact"),)),
    "recommender over": Case((SAVE_RECOMMENDER,), (SAVE_RECOMMENDER.replace("ItemKNN.", "Popularity."),)),
    "index command": Case(("index", "build", "towers", "--kind", "hnsw"), outputs=("towers/index",)),
    "index command over": Case(
        ("index", "build", "towers", "--kind", "hnsw", "-o", "out"), ("index", "build", "towers", "-o", "out")
    ),
    "triton over": Case(
        ("serve", "one", "--write-only", "out", "--device", "cpu"),
        ("serve", "two", "--write-only", "out", "--device", "cpu"),
    ),
    "tune": Case(TUNE, outputs=("out/best.json",)),
    "store import": Case(
        ("store", "import", "one", "--config", "fresh.json"), outputs=("fresh",), then=": 0 rows written"
    ),
    "key set over": Case(
        ("keyset", "data", "-o", "out.keys"), ("keyset", "other", "-o", "out.keys"), outputs=("out.keys",)
    ),
    "store export": Case(("store", "export", "one", *TIERS, "--output", "out")),
    "report over": Case(
        ("report", "increments", "--importance", "data", "--repeats", "2"),
        ("report", "increments", "--importance", "other"),
        outputs=("increments/importance.json", "increments/report.html"),
    ),
    "compare over": Case(
        ("compare", "increments", "second", "-o", "out.html"), ("compare", "second", "increments", "-o", "out.html"),
        outputs=("out.html",),
    ),
    "sequences over": Case((SEQUENCES,), (SEQUENCES.replace("'last': 3", "'last': 2"),)),
    "predict over": Case(
        ("predict", "one", "data", "-o", "out.parquet", "--overwrite"), ("predict", "two", "data", "-o", "out.parquet"),
        outputs=("out.parquet",),
    ),
    "train": Case(TRAIN, again=(*TRAIN, "--resume"), outputs=("run/model",)),
    "train over": Case(
        (*TRAIN, "--resume", "--set", "solver.epochs=2"), TRAIN, outputs=("run/model",)
    ),
    "train increments over": Case(
        (*TRAIN, *INCREMENTS, "--resume", "--set", "solver.epochs=3"), (*TRAIN, *INCREMENTS), outputs=("run/model",)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process that has imported everything; our package too, since no test here is about importing."""
    started = Warm(tmp_path_factory.mktemp("forked"))
    more = ("viviane.model", "viviane.etl", "viviane.cli.main", "viviane.data.synthetic", "viviane.report")
    started.libraries = [*started.libraries, "duckdb", "ibis.backends.duckdb", *more]
    yield started
    started.close()


def program(words: tuple[str, ...]) -> list[str]:
    is_code = " import " in words[0]
    return [words[0], *words[1:]] if is_code else [COMMAND, *words]


def execute(forked: Warm, folder: Path, words: tuple[str, ...], limit: int | str = 0) -> tuple[int, str, list[str]]:
    """Return exit code, what was printed, and the writes."""
    done = forked.run([KILLED, str(limit), *program(words)], cwd=folder)
    lines = done.stdout.strip().splitlines()
    writes = json.loads(lines[-1]) if done.returncode >= 0 and lines and lines[-1].startswith("[") else []
    return done.returncode, done.stdout + done.stderr, writes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, forked: Warm) -> Path:
    """Data and raw text that programs begin with."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "c.json").write_text(json.dumps(CONFIG))
    (folder / "tiers.json").write_text(json.dumps({"rocksdb": {"folder": "db"}}))
    (folder / "fresh.json").write_text(json.dumps({"rocksdb": {"folder": "fresh"}}))
    for words in (("generate", "data", *SMALL), ("generate", "raw.txt", *SMALL, "--format", "criteo")):
        code, said, _ = execute(forked, folder, words)
        assert code == 0, said
    (folder / "raw.txt.info.json").unlink()
    return folder


@pytest.fixture(scope="module")
def inputs_with_models(tmp_path_factory: pytest.TempPathFactory, inputs: Path, forked: Warm) -> Path:
    """The same, and two models."""
    folder = tmp_path_factory.mktemp("with_models") / "inputs"
    shutil.copytree(inputs, folder)
    for name, more in (("one", ()), ("two", ("--set", "solver.seed=3"))):
        code, said, _ = execute(forked, folder, (*TRAIN[:-1], "run", *more))
        assert code == 0, said
        (folder / "run/model").rename(folder / name)
        shutil.rmtree(folder / "run")
    words = (*TRAIN[:-1], "increments", *INCREMENTS, "--set", "solver.epochs=3", "--set", "solver.keep_checkpoints=3")
    others = (("generate", "other", *SMALL, "--seed", "7"), ("store", "import", "one", *TIERS), (SAVE_TOWERS,))
    for more in (words, *others):
        code, said, _ = execute(forked, folder, more)
        assert code == 0, said
    shutil.copytree(folder / "increments", folder / "second")
    return folder


def served_rows(database: Path) -> str:
    """Return a hash of the rows that a server has with a store: those of the saved model where the store lacks them."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        shutil.copytree(database, "fresh")
        words = ["store", "export", str(database.parent / "one"), "--config", str(database.parent / "fresh.json")]
        done = CliRunner().invoke(app, [*words, "--output", "rows"])
        assert done.exit_code == 0, (done.output, done.exception)
        files = sorted(one for one in Path("rows").rglob("*") if one.is_file())
        assert sum(one.name == "rows.bin" and one.stat().st_size > 0 for one in files) == 2
        return fingerprint(*files)


def verified_repository(path: Path) -> None:
    """Check that a model repository of Triton holds each of its models, whole."""
    for name in json.loads((path / "viviane-triton.json").read_text())["models"]:
        assert (path / name / "config.pbtxt").stat().st_size > 0
        assert ModelPart.from_json_file(path / name / "1/session.json").path == "model"
        verify_model(path / name / "1/model")


LOADS: dict[str, Callable[[Path], object]] = {
    "parity.json": load_artifact, "viviane-triton.json": verified_repository, "index.json": ItemIndex.load,
    "recommender.json": Recommender.load,
    "emb.C1": lambda path: [np.fromfile(path / name / "keys.i64", "<i8") for name in ("emb.C1", "emb.C2")],
    "_sequences.json": lambda path: pq.read_table(path / "part-00000.parquet"),
}  # fmt: skip
"""How to verify other outputs, by a file in them."""


def content(path: Path) -> str | None:  # noqa: PLR0911
    """Return a hash of an output that is whole, None where there is none; a damaged one fails."""
    if path.suffix == ".html" and path.exists():  # without the minute in which it was written
        return hashlib.sha256(re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d", b"", path.read_bytes())).hexdigest()
    if not path.exists() or path.is_file():
        return fingerprint(path) if path.exists() else None
    if path.name == "fresh":
        return served_rows(path)
    if (path / "files.json").exists():
        verify_model(path)
        return fingerprint(path / "weights" / "dense.safetensors")
    if (path / "dense.safetensors").exists() and not (path / "manifest.json").exists():  # exported
        return fingerprint(*sorted(path.iterdir()))
    if (path / "dense.safetensors").exists():
        verify_checkpoint(path)
        return fingerprint(path / "dense.safetensors")
    for name, load in LOADS.items():
        if (path / name).exists():
            load(path)
            return fingerprint(*sorted(one for one in path.rglob("[!_]*") if one.is_file()))
    sets = [path] if (path / "schema.json").exists() else sorted(one for one in path.iterdir() if one.is_dir())
    assert sets, f"{path} holds nothing"
    for one in sets:
        data = Dataset(one)
        assert data.verify() > 0
        data.check()
    if (path / "etl.zip").exists():
        FittedEtl.load(path / "etl.zip")
    return fingerprint(*(file for one in sets for file in Dataset(one).files))


def fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def hidden(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob(".*"))


@dataclass(frozen=True)
class Prepared:
    """A folder to copy, what the program leaves in it, and its writes."""

    folder: Path
    old: tuple[str | None, ...]
    new: tuple[str | None, ...]
    writes: list[str]


def prepare(case: Case, inputs: Path, forked: Warm, place: Path) -> Prepared:
    before = place / "before"
    shutil.copytree(inputs, before)
    if case.older is not None:
        code, said, _ = execute(forked, before, case.older)
        assert code == 0, said
    whole = place / "whole"
    shutil.copytree(before, whole)
    code, said, writes = execute(forked, whole, case.words)
    assert code == 0, said
    assert hidden(whole) == [], "an undisturbed run leaves something behind"
    old, new = (tuple(content(one / name) for name in case.outputs) for one in (before, whole))
    assert old != new
    return Prepared(before, old, new, writes)


def kill_at(number: int, case: Case, prepared: Prepared, forked: Warm, place: Path) -> None:
    shutil.copytree(prepared.folder, place)
    code, said, _ = execute(forked, place, case.words, number)
    if code == 0:
        shutil.rmtree(place)
        return  # threads: this run had fewer writes
    assert code == -9, said
    check_next_run(case, prepared, forked, place)


def check_next_run(case: Case, prepared: Prepared, forked: Warm, place: Path) -> None:
    """Check what a kill has left in `place`, run the program again, check what that leaves, and remove it."""
    found = tuple(content(place / name) for name in case.outputs)
    for name, one, old, new in zip(case.outputs, found, prepared.old, prepared.new, strict=True):
        assert one in (old, new), f"{name} is neither the older nor the new one"
    code, said, _ = execute(forked, place, case.again or case.words)
    complete = found == prepared.new and code == 2 and "exists" in said  # nothing was left to do
    assert code == 0 or complete, said
    assert tuple(content(place / name) for name in case.outputs) == prepared.new
    assert hidden(place) == []
    if case.then is not None:
        assert case.then in execute(forked, place, case.again or case.words)[1]
    shutil.rmtree(place)


def chosen(writes: list[str], count: int) -> list[int]:
    """Return some writes: where the output takes its name, and around the middle."""
    names = ("exchange ends", "rename out", "rename run/model")
    switches = [n for n, one in enumerate(writes, 1) if one.startswith(names)]
    return sorted({*switches[:1], *(len(writes) * k // (count + 1) for k in range(1, count))})[:count]


FAST = {"generate over": 2, "etl over": 2, "train over": 1}


@pytest.mark.parametrize("name", FAST)
def test_some_writes(name: str, inputs: Path, forked: Warm, tmp_path: Path) -> None:
    prepared = prepare(CASES[name], inputs, forked, tmp_path)
    for number in chosen(prepared.writes, FAST[name]):
        kill_at(number, CASES[name], prepared, forked, tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_every_write(name: str, inputs_with_models: Path, forked: Warm, tmp_path: Path) -> None:
    case = CASES[name]
    prepared = prepare(case, inputs_with_models, forked, tmp_path)
    place, recorded = tmp_path / "killed", tmp_path / "recorded"
    shutil.copytree(prepared.folder, place)
    code, said, writes = execute(forked, place, case.words, f"record:{recorded}")
    assert code == 0, said
    shutil.rmtree(place)
    assert len(writes) > 5
    kept = json.loads((recorded / "states.json").read_text())
    assert len(kept["moments"]) == len(writes)
    for state, entries in enumerate(kept["states"]):
        restore(recorded, entries, place)
        try:
            check_next_run(case, prepared, forked, place)
        except (AssertionError, VivianeError) as error:
            number = kept["moments"].index(state) + 1
            where = f"killed at write {number} of {len(writes)}, {writes[number - 1]}"
            raise AssertionError(f"{where}: {error}") from error
    print(f"{name}: {len(writes)} writes, {len(kept['states'])} states")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["etl over", "etl split over", "train increments over"])
def test_kills_while_threads_write(name: str, inputs_with_models: Path, forked: Warm, tmp_path: Path) -> None:
    """Threads write in an order that changes from run to run, so kills leave states that no recording has."""
    prepared = prepare(CASES[name], inputs_with_models, forked, tmp_path)
    for number in range(1, len(prepared.writes) + 1, max(1, len(prepared.writes) // 24)):
        kill_at(number, CASES[name], prepared, forked, tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate over", "save over", "train"])
def test_a_kill_leaves_the_recorded_state(name: str, inputs_with_models: Path, forked: Warm, tmp_path: Path) -> None:
    case = CASES[name]
    prepared = prepare(case, inputs_with_models, forked, tmp_path)
    place, recorded = tmp_path / "killed", tmp_path / "recorded"
    shutil.copytree(prepared.folder, place)
    code, said, writes = execute(forked, place, case.words, f"record:{recorded}")
    assert code == 0, said
    kept = json.loads((recorded / "states.json").read_text())
    for number in [len(writes) * tenth // 10 for tenth in range(1, 10)]:
        shutil.rmtree(place)
        shutil.copytree(prepared.folder, place)
        code, said, _ = execute(forked, place, case.words, number)
        assert code == -9, said
        assert kinds(place) == kinds_of(kept["states"][kept["moments"][number - 1]]), writes[number - 1]


def interrupt_at(number: int, case: Case, prepared: Prepared, forked: Warm, place: Path) -> None:
    """Press Ctrl-C twice: no traceback, an older or a new output that is whole, and a next run that works."""
    shutil.copytree(prepared.folder, place)
    code, said, _ = execute(forked, place, case.words, f"interrupt:{number}")
    is_command = " import " not in case.words[0]  # Python prints a traceback of a program
    assert not is_command or "Traceback" not in said, said
    if code == 0:
        shutil.rmtree(place)
        return  # the output was complete, or the loop ended after its step
    assert code in ((130, -2) if is_command else (1, -2)), said  # -2 is SIGINT itself: a shell shows it as 130
    check_next_run(case, prepared, forked, place)


def test_ctrl_c_twice(inputs: Path, forked: Warm, tmp_path: Path) -> None:
    case = CASES["generate over"]
    prepared = prepare(case, inputs, forked, tmp_path)
    interrupt_at(len(prepared.writes) // 2, case, prepared, forked, tmp_path / "interrupted")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    ["generate over", "convert over", "etl over", "predict over", "save over", "reshard", "export", "train over"],
)
def test_ctrl_c_twice_at_many_writes(name: str, inputs_with_models: Path, forked: Warm, tmp_path: Path) -> None:
    case = CASES[name]
    prepared = prepare(case, inputs_with_models, forked, tmp_path)
    for number in range(1, len(prepared.writes) + 1, max(1, len(prepared.writes) // 12)):
        interrupt_at(number, case, prepared, forked, tmp_path / "interrupted")


def kinds(folder: Path) -> list[tuple[str, bool]]:
    """Return the names under a folder without what is drawn at random, and whether each is a folder."""
    found = sorted((str(one.relative_to(folder)), one.is_dir()) for one in folder.rglob("*"))
    return [(re.sub(r"[0-9a-f]{8,}|tfevents.*", "*", name), folder) for name, folder in found]


def kinds_of(entries: list[list]) -> list[tuple[str, bool]]:
    found = sorted((name, kind == "folder") for name, kind, *_ in entries)
    return [(re.sub(r"[0-9a-f]{8,}|tfevents.*", "*", name), folder) for name, folder in found]
