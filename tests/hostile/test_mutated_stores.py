"""Mutated files of stores, outboxes, recommenders, indexes, exports and models: read, or refused by a VivianeError.

Where a file's checksum stands beside it, most cases correct it, as an attacker would.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import mutate, mutate_array, mutate_tensors

from viviane.config import Solver
from viviane.core.errors import VivianeError
from viviane.core.files import file_sha256
from viviane.data import Dataset, convert, write_dataset
from viviane.export import export
from viviane.export import load as load_artifact
from viviane.model import Model
from viviane.retrieval import Histories, ItemIndex, ItemKNN, Popularity, Recommender
from viviane.schema import Schema
from viviane.store import Column, FileTier, RowLayout, SortedRunTier
from viviane.store.delta import Delta, DeltaHeader
from viviane.store.outbox import Outbox, read_outbox
from viviane.zoo import DeepFM

SLOW_CASES = int(os.environ.get("VIVIANE_FUZZ_CASES", "10000"))
LAYOUT = RowLayout([Column("weight", "float32", 2), Column("accumulator", "float32", 1)])
KNOWN = Histories.of([[3, 4, 5], [4, 5, 6], [6, 3]])
ROW = {"price": [0.5], "user": [3], "item": [4]}


@dataclass(frozen=True)
class Target:
    """A file, what reads it, and how the checksums beside it are corrected.

    Args:
        file: path inside the folder of all samples; its first part is copied for each case.
        load: gets the folder.
        seal: gets the folder.
        structured: a mutation that knows the format.
    """

    file: str
    load: Callable[[Path], Any]
    seal: Callable[[Path], None] | None = None
    structured: Callable[[bytes, random.Random], bytes] | None = None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)

    def rows(count: int) -> np.ndarray:
        return rng.integers(0, 255, (count, LAYOUT.row_bytes)).astype(np.uint8)

    known = [ItemKNN.count(KNOWN, 8), Popularity.count(KNOWN, 8)]
    Recommender(known, fallback=Popularity.count(KNOWN, 8), num_candidates=3).save(folder / "rec")
    ItemIndex(rng.normal(size=(20, 4)).astype(np.float32)).save(folder / "index")
    with contextlib.closing(FileTier(folder / "file", LAYOUT, 50)) as tier:
        tier.put(np.arange(20), rows(20))
    with contextlib.closing(SortedRunTier(folder / "runs", LAYOUT, memory_rows=8)) as runs:
        runs.put(rng.integers(-100, 100, 20), rows(20))
    shutil.copytree(folder / "file", folder / "open")
    journaled = FileTier(folder / "open", LAYOUT, 50)
    journaled.put(np.arange(5), rows(5))
    shutil.copytree(folder / "open", folder / "crashed")
    journaled.close()
    with Outbox(folder / "outbox", "m") as outbox:
        for seq in range(1, 5):
            header = DeltaHeader("m", "t", 1, 0, seq, seq - 1, publication=seq)
            outbox.append([Delta(header, np.arange(3), rows(3)).encode()])
        outbox.confirm(2)
    schema = Schema(
        labels=[{"name": "click"}], dense=[{"name": "price"}],
        categorical=[{"name": "user", "num_ids": 9}, {"name": "item", "num_ids": 9}],
    )  # fmt: skip
    columns = {"click": rng.integers(0, 2, 64).astype(np.float32), "price": rng.normal(size=64).astype(np.float32)}
    data = write_dataset(folder / "parquet", schema, columns | {n: rng.integers(3, 9, 64) for n in ("user", "item")})
    for kind in ("norm", "raw", "viviane"):
        convert(data, folder / kind, kind)
    model = Model(Solver(batch_size=16, device="cpu", max_steps=1), data)
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile()
    model.fit(data)
    model.save(folder / "model")
    export(folder / "model", ["torch-export", "torchscript"], folder / "exported", tables="beside")
    return folder


def seal_manifest(file: Path) -> None:
    """Recompute a manifest's checksum of itself."""
    body = json.loads(file.read_text())
    if body.pop("sha256", None) is not None:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps(body))


def seal_files(folder: Path) -> None:
    """Recompute sizes and checksums of a folder's files in its manifest."""
    body = json.loads((folder / "manifest.json").read_text())
    files = body["files"]
    for entry in files if isinstance(files, list) else files.values():
        name = entry["name"] if isinstance(files, list) else next(n for n, one in files.items() if one is entry)
        entry |= {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(body))
    seal_manifest(folder / "manifest.json")


def seal_sums(file: Path) -> None:
    """Recompute the checksums of an index or a recommender."""
    body = json.loads(file.read_text())
    body["sha256"] = {name: file_sha256(file.parent / name) for name in body["sha256"]}
    file.write_text(json.dumps(body))


def seal_runs(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    for run in body["runs"]:
        run["crc32"] = zlib.crc32((folder / run["file"]).read_bytes())
    (folder / "manifest.json").write_text(json.dumps(body))


def use_tier(tier: Any) -> None:
    with contextlib.closing(tier):
        tier.fetch(np.arange(-3, 60), LAYOUT.empty(63))
        list(tier.scan(7))
        tier.put(np.array([3]), LAYOUT.zeros(1))
        tier.num_rows()


def use_outbox(folder: Path) -> None:
    with Outbox(folder / "outbox", "m") as outbox:
        list(outbox.frames(0))
    list(read_outbox(folder / "outbox", "t", 0, 1, 3))


def use_data(folder: Path) -> None:
    data = Dataset(folder)
    data.verify()
    with data.reader(16) as reader:
        list(reader)


def targets() -> dict[str, Target]:
    def recommend(folder: Path) -> None:
        Recommender.load(folder / "rec").recommend(KNOWN, 3)

    def search(folder: Path) -> None:
        ItemIndex.load(folder / "index").search(np.ones((2, 4), np.float32), 5)

    def predict(folder: Path) -> None:
        Model.load(folder / "model", device="cpu").predict(ROW)

    def run_form(form: Any) -> Callable[[Path], None]:
        def run(folder: Path) -> None:
            artifact = load_artifact(folder / "exported", form)
            assert artifact.inputs
            assert artifact.labels
            assert repr(artifact)
            artifact.parity.keys()
            artifact.predict(ROW)

        return run

    exported = {
        f"exported/{name}": Target(
            f"exported/{name}", run_form("torch-export"), lambda f: seal_files(f / "exported"), mutation
        )
        for name, mutation in {"torch-export.pt2": None, "schema.json": None, "parity.json": None,
                               "tables.safetensors": mutate_tensors}.items()
    }  # fmt: skip
    for form in ("torch-export", "torchscript"):
        exported[f"manifest of {form}"] = Target(
            "exported/manifest.json", run_form(form), lambda f: seal_manifest(f / "exported/manifest.json")
        )
    arrays = {
        f"rec/{name}.npy": Target(
            f"rec/{name}.npy", recommend, lambda f: seal_sums(f / "rec/recommender.json"), mutate_array
        )
        for name in ("fallback/counts", "retrieval-item_knn/start", "retrieval-item_knn/item",
                     "retrieval-item_knn/weight", "retrieval-popularity/counts")
    }  # fmt: skip
    vectors = {
        f"index/{name}.npy": Target(
            f"index/{name}.npy", search, lambda f: seal_sums(f / "index/index.json"), mutate_array
        )
        for name in ("vectors", "ids")
    }
    files = {
        f"file/{name}": Target(f"file/{name}", lambda f: use_tier(FileTier(f / "file", LAYOUT, 50)))
        for name in ("tier.json", "present.bin", "rows.bin")
    }
    log = {
        f"outbox/{name}": Target(f"outbox/{name}", use_outbox)
        for name in ("outbox.json", "sent.json", "0000000000000000.vvlog")
    }
    sets = {}
    for kind, part in {"parquet": "part-00000.parquet", "norm": "part-00000.norm", "raw": "data.bin",
                       "viviane": "part-00000.rows"}.items():  # fmt: skip
        for name in (part, "manifest.json"):
            seal = None if name == "manifest.json" else lambda f, kind=kind: seal_files(f / kind)
            sets[f"{kind}/{name}"] = Target(f"{kind}/{name}", lambda f, kind=kind: use_data(f / kind), seal)
    return {
        "recommender.json": Target("rec/recommender.json", recommend),
        **arrays,
        "index.json": Target("index/index.json", search),
        **vectors,
        **files,
        "journal": Target("crashed/journal.bin", lambda f: use_tier(FileTier(f / "crashed", LAYOUT, 50))),
        "runs": Target("runs/manifest.json", lambda f: use_tier(SortedRunTier(f / "runs", LAYOUT))),
        "run": Target(
            "runs/run-00000002.bin",
            lambda f: use_tier(SortedRunTier(f / "runs", LAYOUT)),
            lambda f: seal_runs(f / "runs"),
        ),
        **log,
        **sets,
        **exported,
        "manifest of weights": Target(
            "model/weights/manifest.json", predict, lambda f: seal_manifest(f / "model/weights/manifest.json")
        ),
        "dense weights": Target(
            "model/weights/dense.safetensors", predict, lambda f: seal_files(f / "model/weights"), mutate_tensors
        ),
        "table": Target(
            "model/weights/tables/emb.item.safetensors", predict, lambda f: seal_files(f / "model/weights"),
            mutate_tensors,
        ),
    }  # fmt: skip


def run_case(seed: int, place: Path, work: Path, name: str, target: Target) -> str:
    """Load a mutated file; returns "accepted" or the name of the error."""
    rng = random.Random(seed)
    top = target.file.split("/")[0]
    shutil.copytree(place / top, work / top)
    whole = (place / target.file).read_bytes()
    structured = target.structured is not None and rng.random() < 0.7
    data = target.structured(whole, rng) if structured and target.structured else mutate(whole, rng)
    (work / target.file).write_bytes(data)
    if target.seal is not None and rng.random() < 0.8:
        with contextlib.suppress(
            ValueError, KeyError, TypeError, AttributeError, OSError, StopIteration, RecursionError
        ):
            target.seal(work)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            target.load(work)
    except VivianeError as error:
        return type(error).__name__
    except BaseException:
        pytest.fail(f"{name}, seed {seed}: {traceback.format_exc()[-3000:]}")
    finally:
        shutil.rmtree(work / top)
    return "accepted"


def fuzz(place: Path, work: Path, cases: int, start: int = 0) -> Counter[str]:
    """Run cases over all files in turn; returns how often each outcome occurred."""
    work.mkdir()
    found: Counter[str] = Counter()
    every = targets()
    names = list(every)
    for number in range(cases):
        name = names[number % len(names)]
        found[run_case(start + number, place, work, name, every[name])] += 1
    return found


def test_mutated_stores_are_read_or_refused(place: Path, tmp_path: Path) -> None:
    found = fuzz(place, tmp_path / "work", 3 * len(targets()))
    assert found["accepted"]
    assert len(found) > 3


@pytest.mark.parametrize("kind", ["norm", "raw"])
def test_a_manifest_of_records_without_files(kind: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / kind, tmp_path / kind)
    body = json.loads((tmp_path / kind / "manifest.json").read_text())
    (tmp_path / kind / "manifest.json").write_text(json.dumps({**body, "files": []}))
    with pytest.raises(VivianeError):
        use_data(tmp_path / kind)


def test_a_stray_file_in_an_outbox_is_named(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "outbox", tmp_path / "outbox")
    (tmp_path / "outbox/notes.vvlog").write_text("x")
    with pytest.raises(VivianeError, match=r"notes\.vvlog"):
        use_outbox(tmp_path)


def test_keys_that_end_inside_a_number_are_refused(tmp_path: Path) -> None:
    """NumPy would leave out the last bytes: HugeCTR's tables of 32-bit keys, or a truncated copy."""
    from viviane.compat.hugectr.key_files import KeyFilesTier

    np.arange(3, dtype="<i8").tofile(tmp_path / "key")
    np.zeros((3, 2), "<f4").tofile(tmp_path / "emb_vector")
    assert KeyFilesTier(tmp_path, 2).num_rows() == 3
    with (tmp_path / "key").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(VivianeError, match="ends inside a number"):
        KeyFilesTier(tmp_path, 2)


@pytest.mark.parametrize("number", [0, -1, 10**12, 10**18])
def test_the_number_of_the_next_run_is_above_all_others(number: int, place: Path, tmp_path: Path) -> None:
    """A run that took the name of another would overwrite it; a very long name is none."""
    shutil.copytree(place / "runs", tmp_path / "runs")
    manifest = tmp_path / "runs/manifest.json"
    body = json.loads(manifest.read_text())
    assert body["runs"]
    manifest.write_text(json.dumps({**body, "next": number}))
    with pytest.raises(VivianeError, match=r"the number of the next run is out of range[\s\S]*manifest\.json, next"):
        SortedRunTier(tmp_path / "runs", LAYOUT)
    renamed = [{**body["runs"][0], "file": "manifest.json"}]
    manifest.write_text(json.dumps({**body, "runs": renamed}))
    with pytest.raises(VivianeError, match="not the name of a run"):
        SortedRunTier(tmp_path / "runs", LAYOUT)


def test_blocks_of_more_rows_than_numbers_have_bits(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "viviane", tmp_path / "viviane")
    manifest = tmp_path / "viviane/manifest.json"
    body = json.loads(manifest.read_text())
    found = json.dumps(body)
    rows = body["files"][0]["blocks"][0]["rows"]
    for many in (2**62, 2**63 - 1):
        manifest.write_text(found.replace(f'"rows": {rows}', f'"rows": {many}'))
        with pytest.raises(VivianeError):
            Dataset(tmp_path / "viviane")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_stores(place: Path, tmp_path: Path) -> None:
    found = fuzz(place, tmp_path / "work", SLOW_CASES, random.SystemRandom().randrange(1 << 40))
    assert found.total() == SLOW_CASES
    accepted = found["accepted"]
    print(f"\nmutated stores: {found.total()} cases, {accepted} accepted, {found.total() - accepted} refused")
