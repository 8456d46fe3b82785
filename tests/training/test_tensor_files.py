"""Files of tensors: what is written is read, also from files larger than memory; others are refused."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from viviane.core.errors import CheckpointError
from viviane.training.checkpoint.tensor_files import read_tensors, write_tensors

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool)  # fmt: skip


def sparse_file(path: Path, rows: int) -> None:
    """Make a file whose rows of 128 are zeros that take no disk, but for the last."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [rows, 128], "data_offsets": [0, rows * 512]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 512)
        file.seek(-512, 2)
        file.write(torch.arange(128.0).numpy().tobytes())


@given(
    described=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_what_is_written_is_read(tmp_path_factory, described):
    made = {
        name: torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
        for name, (dtype, shape) in described.items()
    }
    for write in (write_tensors, lambda file, tensors: save_file(tensors, file)):
        file = tmp_path_factory.mktemp("tensors") / "some.safetensors"
        write(file, made)
        found = read_tensors(file)
        assert set(found) == set(made)
        for name, tensor in made.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].storage_offset() == 0  # torch.set_rng_state ignores it
            assert torch.equal(found[name], tensor)


def test_changes_stay_in_memory(tmp_path):
    write_tensors(tmp_path / "some.safetensors", {"a": torch.zeros(4)})
    read_tensors(tmp_path / "some.safetensors")["a"][2] = 1
    assert read_tensors(tmp_path / "some.safetensors")["a"].tolist() == [0, 0, 0, 0]


def test_a_file_may_be_larger_than_memory(tmp_path):
    rows = (psutil.virtual_memory().total + psutil.swap_memory().total) // 512 + (1 << 21)
    sparse_file(tmp_path / "large.safetensors", rows)
    weight = read_tensors(tmp_path / "large.safetensors")["weight"]
    assert weight.shape == (rows, 128)
    assert weight[-1].tolist() == list(range(128))
    assert not weight[rows // 2].any()


def test_tensors_at_odd_addresses_are_read(tmp_path):
    """Other programs do not write wide types first."""
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    header["b"] = {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}
    text = json.dumps(header).encode()
    data = bytes([1, 2, 3]) + torch.tensor([4.0, 5.0]).numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = read_tensors(tmp_path / "odd.safetensors")
    assert found["a"].tolist() == [1, 2, 3]
    assert found["b"].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("kind", "shape", "num_bytes", "message"),
    [
        ("F32", [2], 4, "not a readable safetensors file"),
        ("F32", [1 << 62, 4], 16, "not a readable safetensors file"),
        ("F32", [0, 1 << 62, 1 << 62], 0, "an impossible shape"),
        ("F8_E4M3", [4], 4, "a type that is not supported"),
    ],
)
def test_other_files_are_refused(tmp_path, kind, shape, num_bytes, message):
    text = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path / "f.safetensors")


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}x"])
def test_files_of_other_bytes_are_refused(tmp_path, data):
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_tensors(tmp_path / "f.safetensors")
