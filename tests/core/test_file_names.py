"""Names that come from a file stay inside their folder: on this system and on Windows, by themselves and by links."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viviane.core.errors import CheckpointError, DataError
from viviane.core.file_names import check_file_name, file_inside

BAD = [
    "", ".", "..", "../a", "a/..", "a/../../b", "/etc/passwd", "//host/share", "a//b", "a/", "./a", "a/./b",
    "C:\\a", "c:a", "a:stream", "\\\\host\\share", "..\\a", "a\\b", "a\0b", "a\nb", "a\x7fb", "\u202eexe.txt",
    "a.", "a ", "dir./b", None, 3, b"a", ["a"], {"a": 1}, True,
]  # fmt: skip


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_names_that_lead_elsewhere_are_refused(name: object, tmp_path: Path) -> None:
    for call in (
        lambda: check_file_name(name, where="the manifest", error=CheckpointError),
        lambda: file_inside(tmp_path, name, where="the manifest", error=CheckpointError),
    ):
        with pytest.raises(CheckpointError, match="a file name") as caught:
            call()
        assert "the manifest" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a", "tables/emb.item.1-of-2.safetensors", "t/%2E%2E%2Fx", "...x", "Größe-ü/値", "a b"]
)
def test_names_inside_the_folder_pass(name: str, tmp_path: Path) -> None:
    assert check_file_name(name, where="x") == name
    assert file_inside(tmp_path, name, where="x") == tmp_path / name


@given(st.text(alphabet="ab./\\:~ \0é", max_size=12))
def test_no_name_that_passes_leaves_the_folder(name: str) -> None:
    try:
        check_file_name(name, where="x")
    except DataError:
        return
    assert os.path.normpath(f"/folder/{name}").startswith("/folder/")
    assert "\\" not in name


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("x")
    (folder / "real/file").write_text("y")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "dir").symlink_to(outside)
    (folder / "dangling").symlink_to(outside / "nothing")
    (folder / "within").symlink_to("real/file")
    for name in ("link", "dir/secret", "dangling", "dir/new"):
        with pytest.raises(DataError, match="a symbolic link points outside"):
            file_inside(folder, name, where="x")
    assert file_inside(folder, "within", where="x").read_text() == "y"
    (tmp_path / "alias").symlink_to(folder)  # the folder itself may be reached through a link
    assert file_inside(tmp_path / "alias", "real/file", where="x").read_text() == "y"


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        file_inside(tmp_path, "pipe", where="x")


def test_the_cache_of_hugging_face_links_to_its_blobs(tmp_path: Path) -> None:
    cache = tmp_path / "models--you--ctr"
    snapshot = cache / "snapshots" / "0f3a"
    for folder in (snapshot / "weights", cache / "blobs" / "deep", cache / "refs"):
        folder.mkdir(parents=True)
    for name in ("blobs/9c1e", "blobs/deep/9c1e", "refs/main"):
        (cache / name).write_text(name)
    (snapshot / "model.json").symlink_to("../../blobs/9c1e")
    (snapshot / "weights" / "dense").symlink_to("../../../blobs/9c1e")
    assert file_inside(snapshot, "model.json", where="x").read_text() == "blobs/9c1e"
    assert file_inside(snapshot, "weights/dense", where="x").read_text() == "blobs/9c1e"
    assert file_inside(snapshot / "weights", "dense", where="x").read_text() == "blobs/9c1e"
    (tmp_path / "alias").symlink_to(snapshot)
    assert file_inside(tmp_path / "alias", "model.json", where="x").read_text() == "blobs/9c1e"
    (cache / "blobs" / "onward").symlink_to("../refs/main")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").symlink_to(cache / "blobs" / "9c1e")
    for name, target in (("up", "../../refs/main"), ("under", "../../blobs/deep/9c1e"), ("on", "../../blobs/onward")):
        (snapshot / name).symlink_to(target)
        with pytest.raises(DataError, match="symbolic link"):
            file_inside(snapshot, name, where="x")
    with pytest.raises(DataError, match="symbolic link"):
        file_inside(tmp_path / "elsewhere", "file", where="x")
