"""Keys of any type become whole numbers of the same value, or an error that says which key of which row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from viviane.core.errors import DataError
from viviane.embedding.whole_keys import array_keys, keys_of_32_bits, whole_keys

HERE = "feature 'item'"
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">u8", "<i2")
SIGNIFICANDS = {"float16": 11, "float32": 24, "float64": 53, ">f8": 53}
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(INTEGERS))
def test_integers_keep_their_value_or_are_refused(data: st.DataObject, dtype: str) -> None:
    given_ = data.draw(arrays.arrays(dtype, shapes))
    beyond = [(at, int(value)) for at, value in np.ndenumerate(given_) if int(value) >= 2**63]
    if beyond:
        at, value = beyond[0]
        with pytest.raises(DataError, match="beyond 64 bits") as error:
            array_keys(given_, HERE)
        assert error.value.value == value
        assert str(error.value.where).startswith(f"{HERE}, " + (f"row {at[0]} " if at else "the only key"))
    else:
        found = array_keys(given_, HERE)
        assert found.dtype in (torch.int32, torch.int64)
        assert tuple(found.shape) == given_.shape
        assert found.tolist() == given_.tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(sorted(SIGNIFICANDS)))
def test_floats_are_exact_or_refused(data: st.DataObject, dtype: str) -> None:
    given_ = data.draw(arrays.arrays(dtype, shapes))
    limit = 2 ** SIGNIFICANDS[dtype]
    exact = [float(one).is_integer() and abs(float(one)) < limit for one in given_.flat]
    if all(exact):
        assert array_keys(given_, HERE).tolist() == given_.astype(object).astype("int64").tolist()
    else:
        with pytest.raises(DataError) as error:
            array_keys(given_, HERE)
        wrong = float(given_.flat[exact.index(False)])
        assert error.value.value == wrong or (np.isnan(wrong) and np.isnan(error.value.value))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24), (torch.float64, 53)]
)
def test_the_limit_is_where_a_type_skips_whole_numbers(dtype: torch.dtype, bits: int) -> None:
    last = torch.tensor([2**bits - 1, 1 - 2**bits], dtype=dtype)
    assert whole_keys(last, HERE).tolist() == [2**bits - 1, 1 - 2**bits]
    for value in (2**bits, -(2**bits)):
        with pytest.raises(DataError, match=rf"from 2\^{bits}"):
            whole_keys(torch.tensor([value], dtype=dtype), HERE)
    assert float(torch.tensor(2**bits + 1, dtype=torch.float64).to(dtype)) == 2**bits  # such a key was rounded


@pytest.mark.parametrize(
    ("value", "what"),
    [(1.5, "not a whole number"), (float("nan"), "NaN"), (float("-inf"), "infinite"), (1e30, "may have been rounded")],
)
def test_the_error_names_the_place(value: float, what: str) -> None:
    keys = np.zeros((2, 3), "float32")
    keys[1, 2] = value
    with pytest.raises(DataError, match=what) as error:
        array_keys(keys, HERE)
    assert error.value.where == "feature 'item', row 1 of the batch, column 2"
    assert "below 2^24" in str(error.value.allowed)
    assert error.value.fix
    with pytest.raises(DataError, match=r"row 1 of the batch, column 2"):  # flattened on the way, as XLA wants it
        whole_keys(torch.from_numpy(keys).reshape(-1), HERE, (2, 3))
    with pytest.raises(DataError, match=r"row 0 of the batch, place \[1, 2\]"):
        array_keys(keys[None], HERE)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (np.array([True]), "bool"),
        (np.array(["7"]), "str"),
        (np.array([b"7"]), "bytes"),
        (np.array([None]), "object"),
        (np.array([1j]), "complex"),
        (np.array(["2024-01-01"], "datetime64[D]"), "datetime64"),
        (np.array([1.0], np.longdouble), "longdouble|float128|float96"),
    ],
)
def test_other_types_are_refused(keys: np.ndarray, name: str) -> None:
    with pytest.raises(DataError, match=name):
        array_keys(keys, HERE)


def test_lists_and_large_integers() -> None:
    assert array_keys([[1, 2]], HERE).tolist() == [[1, 2]]
    with pytest.raises(DataError, match="beyond 64 bits") as error:
        array_keys([[1, 2**64 + 1]], HERE)
    assert error.value.value == 2**64 + 1
    with pytest.raises(DataError, match="form no array"):
        array_keys([[1, 2], [3]], HERE)


def test_memory_of_the_caller_is_not_written_to() -> None:
    keys = np.arange(4, dtype="int32")
    keys.flags.writeable = False
    found = array_keys(keys, HERE)
    found += 1
    assert keys.tolist() == [0, 1, 2, 3]


def test_64_bits_in_32() -> None:
    assert keys_of_32_bits(torch.tensor([-(2**31), 2**31 - 1]), HERE, "").dtype == torch.int32
    for value in (2**31, -(2**31) - 1, 2**32 + 1):
        with pytest.raises(DataError, match="would be cut to 32"):
            keys_of_32_bits(torch.tensor([[0, value]]), HERE, "")
