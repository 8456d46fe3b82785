import hashlib
import os
from pathlib import Path

import pytest

from viviane.core.files import file_sha256, replace_folder, write_bytes_atomic, write_json_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_bytes_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / "sub" / "f", b"x")
    assert (tmp_path / "sub" / "f").stat().st_mode & 0o777 == 0o644


def test_json_keeps_the_order_of_keys_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_json_atomic(path, {"b": 1, "a": "ä"})
    assert path.read_text(encoding="utf-8") == '{\n  "b": 1,\n  "a": "ä"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, float("nan"))


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "data"
    for text in ("one", "two"):
        with replace_folder(target) as work:
            (work / text).write_text(text)
            assert not (target / text).exists(), "nothing is visible before the block ends"
        assert names(target) == [text]
    assert names(tmp_path) == ["data"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_failed_block_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "data"
    with replace_folder(target) as work:
        (work / "old").write_text("old")

    def fail() -> None:
        with replace_folder(target) as work:
            (work / "half").write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert names(tmp_path) == ["data"]
    assert names(target) == ["old"]


def test_sha256(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(data)
    assert file_sha256(tmp_path / "f") == hashlib.sha256(data).hexdigest()
