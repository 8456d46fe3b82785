"""What spares a small input its fixed costs gives the same bytes: rows held in memory, queries planned once."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from raw_files import config, data_bytes, text

from viviane.etl import criteo, pipeline, run, stage
from viviane.etl.cells import convert
from viviane.etl.columns import CategoricalSpec, DenseSpec, Input, InputColumn
from viviane.etl.engine import DuckDbEngine
from viviane.etl.expressions import exploded
from viviane.etl.fitting import Fitter
from viviane.etl.gpu import GpuEngine
from viviane.etl.held import Counting, HeldRows
from viviane.etl.operators import chain, chain_column
from viviane.etl.sources import find_sources
from viviane.etl.text import Chunk, parse_block, text_layout

EVERYTHING = config(
    [
        {"name": "click", "type": "int"},
        {"name": "price", "type": "float"},
        {"name": 'shop "A"', "type": "hex"},
        {"name": "at", "type": "timestamp"},
        {"name": "item"},
        {"name": "tags", "list": True, "separator": "|"},
        {"name": "scores", "type": "float", "list": True, "separator": "|"},
    ],
    labels=[{"name": "click"}],
    filters=[{"column": "price", "keep": "!=", "value": 3}],
    dense=[{"name": "price", "operators": [{"type": "fill", "value": "median"}, {"type": "standardize"}]}],
    categorical=[
        {"name": "shop", "source": 'shop "A"', "encoding": {"type": "categorify", "min_count": 2}},
        {"name": "item", "vocabulary": "things", "encoding": {"type": "categorify", "max_values": 30}},
        {
            "name": "tags",
            "kind": "multi_hot",
            "vocabulary": "things",
            "encoding": {"type": "categorify", "max_values": 30},
            "hotness": "auto",
        },
        {"name": "pair", "source": ["item", "tags"], "kind": "sequence", "max_length": 2},
        {"name": "level", "source": "price", "encoding": {"type": "bucketize", "quantiles": 5}},
        {"name": "rough", "source": "price", "operators": [{"type": "log_square"}]},
    ],
    ignored=["at", "scores"],
)


def raw_file(path: Path, rows: int = 4000) -> Path:
    noise = random.Random(1)
    lines = ['click,price,shop "A",at,item,tags,scores']
    for _ in range(rows):
        tags = "|".join(f"t{int(noise.expovariate(0.1))}" for _ in range(noise.randint(1, 3)))
        lines.append(
            f"{noise.randint(0, 1)},{noise.choice(['', noise.randint(0, 9), noise.gauss(50, 90)])},"
            f"{noise.choice(['', f'{noise.randint(0, 300):08x}'])},2014-05-{noise.randint(1, 31):02} 10:00:00,"
            f"{noise.choice(['', f't{noise.randint(0, 60)}'])},{tags},{noise.choice(['', '1|2.5'])}"
        )
    return text(path, "\n".join(lines) + "\n")


def shape(monkeypatch: pytest.MonkeyPatch, shard_bytes: int, hold_bytes: int) -> list[int]:
    """Small shards of small blocks, of which this many bytes are held; returns what will be the numbers held."""
    first, run_stager, blocks = pipeline._Run.__init__, stage.Stager.run, stage.text_blocks
    held: list[int] = []

    def init(self: Any, *args: Any) -> None:
        first(self, *args)
        self.shard_bytes, self.hold_bytes = shard_bytes, hold_bytes

    def staged(self: Any) -> Any:
        shards = run_stager(self)
        held.append(len(self.held))
        return shards

    monkeypatch.setattr(pipeline._Run, "__init__", init)
    monkeypatch.setattr(stage.Stager, "run", staged)
    monkeypatch.setattr(stage, "text_blocks", lambda *args, **rest: blocks(*args, **rest, block_bytes=20_000))
    return held


@pytest.mark.parametrize("engine", ["duckdb", "gpu"])
@pytest.mark.parametrize("split", ["rows:train=0.7,test=0.3", "hash:at:train=0.5,test=0.5"])
def test_held_rows_give_the_bytes_of_rows_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, engine: Any
) -> None:
    raw = raw_file(tmp_path / "raw.csv")
    device = "cpu" if engine == "gpu" else None
    found = {}
    for name, hold_bytes, expected in (("none", 0, False), ("all", 1 << 30, True), ("some", 90_000, False)):
        with monkeypatch.context() as patch:
            held = shape(patch, 60_000, hold_bytes)
            run(EVERYTHING, raw, tmp_path / name, split=split, engine=engine, device=device, threads=2)
        assert (held[0] > 2) if expected else held == [0]
        found[name] = data_bytes(tmp_path / name)
    assert found["all"] == found["none"]
    assert found["some"] == found["none"]
    assert len(found["all"]) == 5  # a data file and the fitted ETL of each part, and the latter once more


def test_a_run_that_goes_on_holds_nothing_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_file(tmp_path / "raw.csv")
    run(EVERYTHING, raw, tmp_path / "whole")

    def cut_off(self: Any, *_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Fitter, "_quantiles", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run(EVERYTHING, raw, tmp_path / "out")
    assert len(list((tmp_path / ".out.etl/learned").iterdir())) == 1  # of the cross; the others are counted again
    run(EVERYTHING, raw, tmp_path / "out")
    assert data_bytes(tmp_path / "out") == data_bytes(tmp_path / "whole")


def test_queries_over_like_columns_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ibis

    def plans(num: int) -> int:
        calls: list[Any] = []
        plan = ibis.to_sql
        with monkeypatch.context() as patch:
            patch.setattr(ibis, "to_sql", lambda *args, **rest: calls.append(0) or plan(*args, **rest))
            raw = text(tmp_path / "raw.tsv", ("\t".join(["1", "2", *(["0000000a"] * num)]) + "\n") * 9)
            shape(patch, 60_000, 0)  # nothing is held: all is computed by the engine
            summary = run(criteo(num_dense=1, num_categorical=num), raw, tmp_path / str(num))
        assert summary.num_ids == {f"C{i + 1}": 4 for i in range(num)}
        return len(calls)

    assert plans(2) == plans(9) > 0


def test_eight_digits_of_any_bytes_are_read_as_int_reads_them() -> None:
    digits = set(b"0123456789abcdefABCDEF")
    column = InputColumn(name="h", type="hex")
    for place in range(8):
        for byte in range(128):
            word = bytearray(b"1aF09fA2")
            word[place] = byte
            values, bad = convert(pa.array(["12345678", word.decode(), None]), column, ())
            expected = int(word.decode(), 16) if byte in digits else None
            assert (values.to_pylist(), len(bad)) == ([0x12345678, expected, None], int(byte not in digits))
    sliced = pa.array(["zz", "deadBEEF", None, "00000001"]).slice(1)  # digits that begin at an odd byte
    assert convert(sliced, column, ())[0].to_pylist() == [0xDEADBEEF, None, 1]


@pytest.mark.parametrize("quote", ['"', None])
def test_a_block_in_pieces_is_the_block_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quote: str | None
) -> None:
    columns = (InputColumn(name="a"), InputColumn(name="b"))
    settings = Input(columns=columns, delimiter=",", header=False, quote=quote)
    noise = np.random.default_rng(5)

    def line() -> str:
        word = "x" * noise.integers(7) + ("," if noise.random() < 0.99 else "") + "y" * noise.integers(9)
        return word + str(noise.choice(["", "", "", "", "", "", "", '"', '"z"', "\n"]))

    def parsed(content: str, piece_bytes: int) -> Chunk:
        source = find_sources(text(tmp_path / "raw.csv", content))[0]
        monkeypatch.setattr("viviane.etl.text._PIECE_BYTES", piece_bytes)
        return parse_block(next(stage.text_blocks(source)), text_layout(source, settings, columns))

    for _ in range(60):
        content = "\n".join(line() for _ in range(noise.integers(1, 50))) + "\nx,y\n"
        whole = parsed(content, 1 << 20)
        for piece_bytes in (9, 20, 37, 64):
            chunk = parsed(content, piece_bytes)
            assert chunk.table.equals(whole.table)
            assert (chunk.bad, chunk.unparsed) == (whole.bad, whole.unparsed)
            assert (chunk.lines == whole.lines).all()


def test_the_gpu_engine_holds_too() -> None:
    engine = GpuEngine(device="cpu")
    with engine.held(pa.table({"x": ["b", "a", "b", None]})) as rows:
        picked = engine.pick(rows, ["x"])
        counts = engine.count(picked.select(value=picked.value0).filter(picked.value0.notnull()))
    assert counts.to_pydict() == {"value": ["b", "a"], "count": [2, 1]}
    engine.close()


def test_the_command_runs_without_torch(tmp_path: Path) -> None:
    """Importing torch takes longer than the ETL of a small file."""
    raw = raw_file(tmp_path / "raw.csv", rows=50)
    (tmp_path / "etl.json").write_text(json.dumps(EVERYTHING.to_dict()))
    program = (
        "import sys; from typer.testing import CliRunner; from viviane.cli.main import app\n"
        "done = CliRunner().invoke(app, sys.argv[1:]); assert done.exit_code == 0, done.output\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    words = ["etl", str(raw), "--config", str(tmp_path / "etl.json"), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_small_input_of_plain_columns_needs_no_engine(tmp_path: Path) -> None:
    """DuckDB, ibis and pandas, which Arrow loads where it can, take longer to load than 50 rows to clean."""
    text(tmp_path / "raw.tsv", "1\t2\t0000000a\n0\t\t\n" * 25)
    program = (
        "import sys; from viviane.etl import criteo, run\n"
        "run(criteo(num_dense=1, num_categorical=1), sys.argv[1], sys.argv[2], split='rows:train=0.8,test=0.2')\n"
        "assert not {'duckdb', 'ibis', 'pandas'} & set(sys.modules)"
    )
    words = [str(tmp_path / "raw.tsv"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_in_memory_have_the_bits_of_the_engine() -> None:
    noise = np.random.default_rng(3)
    numbers = np.concatenate([noise.lognormal(2, 4, 3000), -noise.lognormal(1, 3, 500), np.arange(-9.0, 9.5, 0.5)])
    x = pa.array(numbers, mask=noise.random(len(numbers)) < 0.1)
    state = {"mean": 3.7, "std": 0.3, "min": -2.5, "max": 1.25, "median": 2.0}
    engine = DuckDbEngine()
    settings: list[dict[str, Any]] = [
        {"type": "fill", "value": "median"}, {"type": "fill", "value": -2}, {"type": "clip", "min": -1, "max": 5},
        {"type": "clip", "max": 0.5}, {"type": "log"}, {"type": "log_square"}, {"type": "standardize"},
        {"type": "min_max"}, {"type": "threshold", "at": 2},
    ]  # fmt: skip
    for one in settings:
        (operator,) = DenseSpec(name="x", operators=(one,)).operators  # type: ignore[arg-type]
        found = chain_column(x, (operator,), {0: state})
        made = engine.evaluate(pa.table({"x": x}), lambda t, o=operator: {"y": chain(t["x"], (o,), {0: state})})  # type: ignore[misc]
        expected = made.column("y").combine_chunks()
        assert found.is_null().equals(expected.is_null()), one
        bits = [np.asarray(one.drop_null()).view(np.int64) for one in (found, expected)]
        assert (bits[0] == bits[1]).all(), one
    engine.close()


@pytest.mark.parametrize("name", ["text", "number", "time", "list"])
def test_values_in_memory_are_counted_as_the_engine_counts_them(name: str) -> None:
    noise = np.random.default_rng(4)
    values: dict[str, list[Any]] = {
        "text": ["b", "Z", "\u00e9", "a", "\U0001f600", None], "number": [5, -3, 2**40, 0, None],
        "time": [np.datetime64("2020-01-01", "us"), np.datetime64("1969-01-01", "us"), None],
        "list": [["b", "a"], [], None, ["c", None]],
    }  # fmt: skip
    tables = [pa.table({"x": [values[name][i] for i in noise.integers(0, len(values[name]), n)]}) for n in (40, 0, 60)]
    tables[1] = tables[0].slice(0, 0)
    training = [noise.random(table.num_rows) < 0.7 for table in tables]
    spec = CategoricalSpec(name="x") if name != "list" else CategoricalSpec(name="x", kind="multi_hot")
    found = HeldRows(tables, training).counts(Counting([spec], 2, 4))
    rows = pa.concat_tables([table.filter(pa.array(mask)) for table, mask in zip(tables, training, strict=True)])
    engine = DuckDbEngine()
    with engine.held(rows) as held:
        picked = exploded(engine.pick(held, ["x"]), ["value0"])
        expected = engine.count(
            picked.select(value=picked.value0).filter(picked.value0.notnull()), min_count=2, max_values=4
        )
    assert found.equals(expected.cast(found.schema))
    engine.close()


def test_a_hexadecimal_value_that_is_no_text_is_refused_by_its_digits(tmp_path: Path) -> None:
    """The same message whether its block is parsed at once or line by line."""
    columns = criteo(num_dense=0, num_categorical=1)
    lines = b"1\t0000000a\n0\t\xff\xfe\n"
    problems = []
    for name, data in (("at_once", lines), ("by_line", lines + b"no row\n")):
        (tmp_path / name).write_bytes(data)
        run(columns, tmp_path / name, tmp_path / f"{name}_out", on_bad_row="reject")
        first = (tmp_path / f"{name}_out" / "rejects.jsonl").read_text().splitlines()[0]
        problems.append({**json.loads(first), "file": ""})
    assert problems[0] == problems[1]
    assert problems[0]["problem"] == "not 1 to 16 hexadecimal digits"
    assert problems[0]["value"] == "\\xff\\xfe"
