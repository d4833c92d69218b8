"""Conversion between tensors and arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headgate.functions.arrays import Array, to_array, to_tensor
from headgate.functions.tensor import Block, Tensor

NUMBERS = ["?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"]


@given(
    hnp.arrays(
        st.sampled_from(NUMBERS).map(np.dtype),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_numbers_round_trip(array: Array) -> None:
    back = to_array(to_tensor("x", array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_bytes_round_trip(elements: list[bytes]) -> None:
    array = np.array([*elements, None], object)[:-1]
    assert to_array(to_tensor("x", array)).tolist() == elements


def test_text_is_sent_as_bytes() -> None:
    for array in (np.array(["ä", "b"]), np.array(["ä", "b"], object)):
        tensor = to_tensor("x", array)
        assert tensor.datatype == "BYTES"
        assert to_array(tensor).tolist() == ["ä".encode(), b"b"]


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.arange(9, dtype=">i4")[::2]])
def test_any_memory_layout_can_be_sent(array: Array) -> None:
    assert to_array(to_tensor("x", array)).tolist() == array.tolist()


@pytest.mark.parametrize(
    "array", [np.zeros(2, complex), np.zeros(2, "M8[s]"), np.array([1, 2], object)]
)
def test_unsupported_arrays_are_errors(array: Array) -> None:
    with pytest.raises(ValueError, match=r"x: .* sent"):
        to_tensor("x", array)


def test_arrays_are_aligned_and_read_only() -> None:
    """Copied only if misaligned in its message."""
    data = memoryview(bytes(17))
    for start in (0, 1):
        array = to_array(Tensor("x", "FP64", (2,), data[start : start + 16]))
        assert array.flags.aligned
        assert not array.flags.writeable
    even = np.zeros(2)
    assert np.shares_memory(to_array(to_tensor("x", even)), even)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "problem"),
    [
        ("FP32", (2,), b"1234", "x: FP32[2] needs 8 bytes, there are 4"),
        ("FP32", (-1,), b"", "x: its shape [-1] has a negative size"),
        ("FP32", (-1, -1), b"1234", "x: its shape [-1, -1] has a negative size"),
        ("FP32", (1 << 62, 1 << 62), b"", "x: FP32[4611686018427387904, 461168"),
        ("INT8", (1,) * 33, b"1", "x: has 33 dimensions, at most 32"),
        ("BYTES", (1,) * 33, b"1", "x: has 33 dimensions, at most 32"),
        ("BYTES", (1 << 40,), b"", "x: BYTES[1099511627776] needs at least 4398046511104 bytes"),
        ("BYTES", (-1, -1), b"\0\0\0\0", "x: its shape [-1, -1] has a negative size"),
        ("BYTES", (1,), b"\5\0\0\0abc", "x: element 0 exceeds the 7 bytes"),
        ("BYTES", (2,), b"\4\0\0\0abcd", "x: element 1 exceeds the 8 bytes"),
        ("BYTES", (1,), b"\1\0\0\0abc", "x: 2 bytes are left over after 1 elements"),
        ("BF16", (1,), b"12", "x: BF16 is taken only by functions that declare it"),
        ("FP8", (1,), b"1", "x: 'FP8' is not a datatype"),
    ],
)
def test_invalid_tensor_is_an_error(
    datatype: str, shape: tuple[int, ...], data: bytes, problem: str
) -> None:
    with pytest.raises(ValueError) as caught:
        to_array(Tensor("x", datatype, shape, memoryview(data)))
    assert str(caught.value).startswith(problem)


def test_huge_and_empty_shapes_are_errors() -> None:
    with pytest.raises(ValueError):
        to_array(Tensor("x", "FP32", (0, 1 << 62, 1 << 62), memoryview(b"")))


def test_tensor_in_shared_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        to_array(Tensor("x", "INT8", (1,), Block(0, 1)))


def test_bf16_is_passed_as_bits() -> None:
    tensor = to_tensor("x", np.array([1, 2], np.uint16), datatype="BF16")
    assert tensor.datatype == "BF16"
    assert to_array(tensor, raw_bf16=True).tolist() == [1, 2]
