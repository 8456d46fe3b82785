"""Archives of torch.export that someone has altered: nothing in them is unpickled, and nothing is written elsewhere."""

import hashlib
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from export_models import PAIR, ZOO, made, rows

from viviane.core.errors import ExportError, VivianeError
from viviane.export import export, load
from viviane.export.forms.archive import check_archive

Entries = dict[str, bytes]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crafted") / "exported"
    export(made(ZOO["ncf"][0], PAIR), "torch-export", folder)
    return folder


def name_in(entries: Entries, ending: str) -> str:
    return next(name for name in entries if name.endswith(ending))


def sample_inputs(entries: Entries, payload: bytes) -> None:
    entries[name_in(entries, "data/sample_inputs/model.pt")] = payload


def pickled_weight(entries: Entries, payload: bytes) -> None:
    name = name_in(entries, "model_weights_config.json")
    content = json.loads(entries[name])
    one = next(iter(content["config"].values()))
    one["use_pickle"] = True
    entries[name] = json.dumps(content).encode()
    entries[f"{name.rsplit('/', 1)[0]}/{one['path_name']}"] = payload


def opaque_constant(entries: Entries, payload: bytes) -> None:
    name = name_in(entries, "model_constants_config.json")
    content = json.loads(entries[name])
    content["config"]["x"] = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
    entries[name] = json.dumps(content).encode()
    entries[f"{name.rsplit('/', 1)[0]}/opaque_obj_0"] = payload


def other_entry(name: str) -> Callable[[Entries, bytes], None]:
    def add(entries: Entries, payload: bytes) -> None:
        root = next(iter(entries)).split("/")[0]
        entries[f"{root}/{name}"] = payload

    return add


CRAFTED: dict[str, Callable[[Entries, bytes], None]] = {
    "sample inputs": sample_inputs,
    "a weight": pickled_weight,
    "an opaque constant": opaque_constant,
    "weights of an older form": other_entry("data/weights/model.pt"),
    "constants of an older form": other_entry("data/constants/model.pt"),
    "machine code": other_entry("data/aotinductor/model/x.so"),
    "another program": other_entry("models/other.json"),
    "outside": other_entry("../../outside"),
}


def write(path: Path, entries: Iterator[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in entries:
            archive.writestr(name, data)


def seal(folder: Path) -> None:
    """Correct checksums, as an attacker would."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    for name, entry in body["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


def entries_of(path: Path) -> Entries:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_archive_is_read_again_as_it_was_written(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "e")
    file = tmp_path / "e/torch-export.pt2"
    write(file, iter(entries_of(file).items()))
    seal(tmp_path / "e")
    given = rows(PAIR, 5)
    assert (load(tmp_path / "e").predict(given) == load(exported).predict(given)).all()


@pytest.mark.parametrize("kind", CRAFTED)
def test_nothing_is_unpickled_or_run(kind: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "e")
    file = tmp_path / "e/torch-export.pt2"
    entries = entries_of(file)
    CRAFTED[kind](entries, pickle.dumps((Touch(tmp_path / "touched"),)))
    write(file, iter(entries.items()))
    seal(tmp_path / "e")
    with pytest.raises(ExportError, match=r"could run code|points outside"):
        load(tmp_path / "e")
    assert not (tmp_path / "touched").exists()


def test_archives_that_are_no_plain_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt2"
    cases: dict[str, tuple[list[tuple[str, bytes]], int]] = {
        "occurs twice": ([("m/version", b"3"), ("m/version", b"4")], zipfile.ZIP_STORED),
        "is packed": ([("m/version", b"0" * 10**6)], zipfile.ZIP_DEFLATED),
        "points outside": ([("/etc/passwd", b"3")], zipfile.ZIP_STORED),
    }
    for message, (entries, kind) in cases.items():
        with pytest.warns(UserWarning, match="Duplicate") if "twice" in message else pytest.MonkeyPatch.context():
            write(file, iter(entries), kind)
        with pytest.raises(ExportError, match=message):
            check_archive(file)
    whole = file.read_bytes()
    for data in (whole[:-30], b"", b"PK\3\4" + bytes(100)):
        file.write_bytes(data)
        with pytest.raises(ExportError, match="not a readable archive"):
            check_archive(file)


def test_a_program_that_is_another_is_refused(exported: Path, tmp_path: Path) -> None:
    """A manifest without labels, and a program whose result has another shape or that fails."""
    shutil.copytree(exported, tmp_path / "e")
    manifest = tmp_path / "e/manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(body | {"labels": []}))
    seal(tmp_path / "e")
    with pytest.raises(VivianeError, match="labels"):
        load(tmp_path / "e")
    manifest.write_text(json.dumps(body | {"labels": [*body["labels"], "more"]}))
    seal(tmp_path / "e")
    with pytest.raises(ExportError, match="returns another shape"):
        load(tmp_path / "e").predict(rows(PAIR, 5))
    artifact = load(exported)

    def fail(tensors: Any) -> Any:
        raise RuntimeError("index out of range in self")

    artifact._run = fail  # as TorchScript fails where its constants were altered
    with pytest.raises(ExportError, match=r"(?s)program failed.*index out of range"):
        artifact.predict(rows(PAIR, 5))
