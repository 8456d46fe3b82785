"""Outputs are exchanged in one step; where that cannot be, an older output comes back after a kill."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from viviane.core import exchange as module
from viviane.core.errors import ConfigError
from viviane.core.exchange import exchange, recover, reserved, sync_tree, tidy
from viviane.core.files import replace_file, replace_folder, write_bytes_atomic
from viviane.core.locks import hidden_name, locked


class Killed(BaseException):
    """Stands for a process that ends at once: nothing after it runs."""


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "renames":
        monkeypatch.setattr(module, "_exchanging_call", lambda: None)
    elif module._exchanging_call() is None:
        pytest.skip("this system cannot exchange two names")
    return str(request.param)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def fill(path: Path, text: str) -> None:
    with replace_folder(path) as work:
        (work / text).write_text(text)


def test_two_names_are_exchanged(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two names")
    assert names(tmp_path / "a") == ["b"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "nothing")


def test_a_reader_finds_a_whole_output_at_every_moment(tmp_path: Path) -> None:
    """The name exists all the time: without an exchange there is a moment without it."""
    if module._exchanging_call() is None:
        pytest.skip("this system cannot exchange two names")
    fill(tmp_path / "out", "x")
    gaps, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not (tmp_path / "out").exists():
                gaps.append(1)

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(50):
        fill(tmp_path / "out", "x")
    done.set()
    thread.join()
    assert not gaps


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_replacing(way: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for text in ("one", "two", "three"):
        if kind == "folder":
            fill(target, text)
            assert names(target) == [text]
        else:
            with replace_file(target) as work:
                work.write_text(text)
            assert target.read_text() == text
    assert names(tmp_path) == ["out"]


def test_a_link_to_a_folder_stays_a_link(way: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/data")
    for text in ("one", "two"):
        fill(tmp_path / "out", text)
        assert names(tmp_path / "disk/data") == [text]
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "disk") == ["data"]


def calls() -> Iterator[tuple[object, str]]:
    yield from ((Path, "rename"), (module, "sync_folder"), (module, "exchange"))


@pytest.mark.parametrize("number", range(1, 9))
def test_an_end_at_any_call_leaves_one_whole(
    way: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended after the n-th rename, flush or exchange, with nothing cleaned up; then read, then written again."""
    target = tmp_path / "out"
    fill(target, "old")
    with monkeypatch.context() as patch:
        count = 0
        for holder, name in calls():
            original = getattr(holder, name)

            def call(*words: object, original: object = original) -> object:
                nonlocal count
                if count >= number:  # ended: what would clean up does nothing
                    raise Killed
                found = original(*words)  # type: ignore[operator]
                count += 1
                if count == number:
                    raise Killed
                return found

            patch.setattr(holder, name, call)
        patch.setattr(module, "_remove", lambda path: None)
        try:
            fill(target, "new")
            ended = False
        except Killed:
            ended = True
    hidden_name(target, "lock").touch()  # what a killed process leaves
    if not target.exists():
        assert (way, ended) == ("renames", True)
        assert any(one.endswith(".old") for one in names(tmp_path))
    recover(target)
    assert names(target) in (["old"], ["new"])
    tidy(target)
    assert names(tmp_path) == ["out"]
    fill(target, "next")
    assert (names(target), names(tmp_path)) == (["next"], ["out"])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for the names of open files")
def test_everything_in_a_folder_is_flushed_and_a_failure_anywhere_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "deep" / f"{number}").write_text("x")
    flushed: list[Path] = []
    fails = ""

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append(path)
        if path.name == fails:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    sync_tree(tmp_path)
    assert sorted(flushed) == sorted([tmp_path, *tmp_path.rglob("*")])
    for name in ("er", "19", tmp_path.name):
        fails = name
        with pytest.raises(OSError, match="No space left"):
            sync_tree(tmp_path)


def test_a_folder_is_finished_behind_the_end_of_the_main_thread(tmp_path: Path) -> None:
    program = """
import sys, threading
from pathlib import Path
from viviane.core.files import replace_folder
ended = threading.Event()
def save():
    ended.wait()
    with replace_folder(Path(sys.argv[1])) as work:
        for number in range(10):
            (work / str(number)).write_text("x")
threading.Thread(target=save).start()
threading._register_atexit(ended.set)  # called when pools have ceased to take work
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=True, timeout=60)
    assert len(names(tmp_path / "out")) == 10


def test_an_old_output_of_an_earlier_release_comes_back(tmp_path: Path) -> None:
    """They renamed to .<name>.<process>.old, and a kill left it there."""
    (tmp_path / ".out.4711.old").mkdir()
    (tmp_path / ".out.4711.old/data").write_text("x")
    (tmp_path / ".other.12.old").mkdir()
    recover(tmp_path / "out")
    assert names(tmp_path) == [".other.12.old", "out"]
    assert names(tmp_path / "out") == ["data"]


def test_who_is_between_two_renames_is_left_alone(tmp_path: Path) -> None:
    hidden_name(tmp_path / "out", "old").mkdir()
    with locked(tmp_path / "out"):
        recover(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    recover(tmp_path / "out")
    assert (tmp_path / "out").exists()


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    others = [".out.tmp", ".out.abc.tmp", ".out.viviane.tmp.mine", ".outer.viviane.01234567.tmp", ".out.old"]
    for name in others:
        (tmp_path / name).write_text("not ours")
    (tmp_path / ".out.viviane.01234567.tmp").mkdir()
    fill(tmp_path / "out", "x")
    assert names(tmp_path) == sorted([*others, "out"])


def test_an_output_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "out", "theirs")

    def write() -> None:
        with replace_folder(tmp_path / "out", overwrite=False):
            pytest.fail("the block must not begin")

    with pytest.raises(ConfigError, match="the output exists"):
        write()
    assert names(tmp_path / "out") == ["theirs"]


def test_two_writers_of_one_output(tmp_path: Path) -> None:
    with reserved(tmp_path / "out") as work:
        said = []

        def other() -> None:
            try:
                fill(tmp_path / "out", "x")
            except ConfigError as error:
                said.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "this process is already writing this output" in said[0]
        assert work.exists(), "a refused writer must not clean up what another one needs"


def test_an_output_is_not_written_within_its_own_writing(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "out") as work:
        with pytest.raises(ConfigError, match="already writing this output"):
            fill(tmp_path / "out", "inner")
        (work / "outer").touch()
    assert names(tmp_path / "out") == ["outer"]


def test_small_files_reuse_what_a_killed_write_left(tmp_path: Path) -> None:
    left = hidden_name(tmp_path / "f", "tmp")
    left.write_text("half of a much longer text than the new one")
    write_bytes_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert names(tmp_path) == ["f"]


def test_a_temporary_name_of_something_else_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    temporary = hidden_name(tmp_path / "f", "tmp")
    temporary.symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_bytes_atomic(tmp_path / "f", b"x")
    temporary.unlink()
    os.link(tmp_path / "precious", temporary)
    write_bytes_atomic(tmp_path / "f", b"x")
    assert (tmp_path / "precious").read_text() == "mine"
    assert names(tmp_path) == ["f", "precious"]


def test_many_writers_of_one_small_file(tmp_path: Path) -> None:
    texts = [bytes([65 + n]) * 100_000 for n in range(8)]

    def write(text: bytes) -> None:
        for _ in range(20):
            write_bytes_atomic(tmp_path / "f", text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "f").exists():
            assert (tmp_path / "f").read_bytes() in texts
    for thread in threads:
        thread.join()
    assert names(tmp_path) == ["f"]
