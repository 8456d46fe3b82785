import hashlib
import io
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from viviane.core.errors import CheckpointError, ConfigError
from viviane.core.files import (
    file_sha256,
    read_array,
    replace_file,
    replace_folder,
    write_bytes_atomic,
    write_json_atomic,
)


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


def _write_whole(path: Path, data: bytes) -> None:
    with replace_file(path) as work:
        work.write_bytes(data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("write", [write_bytes_atomic, _write_whole])
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"rows")
    reader.join(10)
    assert read == [b"rows"]
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


@pytest.mark.skipif(not hasattr(os, "mknod"), reason="needs device files")
@pytest.mark.parametrize("write", [write_bytes_atomic, _write_whole])
def test_a_device_stays_a_device(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    """As root, /dev/null was replaced by a plain file, and every program of the machine read it."""
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.write_bytes(b"")
    except OSError:
        pytest.skip("only root makes devices")
    write(null, b"rows")
    assert null.is_char_device()
    with pytest.raises(ConfigError, match="cannot be written to a device or a pipe"), replace_folder(null):
        pass
    assert names(tmp_path) == ["null"]


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs sockets with names")
def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("own")
        with pytest.raises(ConfigError, match="a socket"):
            write_bytes_atomic(Path("own"), b"rows")
        assert Path("own").is_socket()


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


def npy(array: object, *, zipped: bool = False) -> bytes:
    content = io.BytesIO()
    (np.savez if zipped else np.save)(content, array)
    return content.getvalue()


WHOLE = npy(np.arange(6, dtype=np.int64))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x93NUMPY", WHOLE[:-1], WHOLE[:100], WHOLE.replace(b"(6,)", b"(9999999999999,)"),
        WHOLE.replace(b"(6,)", b"(-6,)"), WHOLE.replace(b"(6,), ", b"((((((("), WHOLE.replace(b"<i8", b"|O8"),
        npy(np.arange(6, dtype=np.int64), zipped=True), npy(np.arange(6.0)), npy(np.arange(6, dtype=">i8")),
        npy(np.arange(6).reshape(2, 3)), npy(np.array(3)), npy(np.array(["a"])),
        npy(np.zeros(3, dtype=[("x", "i4"), ("y", "f4")])), npy(np.array(["a", None], dtype=object)),
    ],
)  # fmt: skip
def test_untrusted_arrays_are_of_the_expected_kind(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_array(tmp_path / "a.npy", np.int64, 1, CheckpointError)
    assert "a.npy" in str(caught.value)


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.int64), np.empty(0, dtype=np.int64)])
def test_arrays_come_back(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    found = read_array(tmp_path / "a.npy", np.int64, 1, CheckpointError)
    assert type(found) is np.ndarray
    assert found.tolist() == array.tolist()
    found += 1  # a copy, not the file
