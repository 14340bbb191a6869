"""Files as inputs: .npy and raw elements, and what is said of those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.cli.inputs import read_input, read_inputs
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo

FLOAT = np.dtype("float32")
SHAPE = (1, 2, 3)


def stored(path: Path, array: np.ndarray[Any, Any]) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float64", ">f4"])
@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 3)])
def test_an_array_of_the_input_s_shape_is_accepted(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = stored(tmp_path / "a.npy", np.arange(6, dtype=dtype).reshape(shape))
    read = read_input(path, SHAPE, FLOAT)
    assert (read.shape, read.dtype, read.flags.c_contiguous) == (SHAPE, FLOAT, True)
    assert read.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("array", "given"),
    [
        (np.zeros((1, 3, 2), np.float32), "1x3x2 float32"),
        (np.zeros(6, np.float32), "6 float32"),
        (np.zeros(SHAPE, np.uint8), "1x2x3 uint8"),
        (np.float32(1), "scalar float32"),
    ],
)
def test_an_array_that_does_not_fit_is_rejected_with_both_shapes(
    tmp_path: Path, array: np.ndarray[Any, Any], given: str
) -> None:
    path = stored(tmp_path / "a.npy", array)
    with pytest.raises(InvalidArgument, match=f"an array of {given}; the input needs 1x2x3 float32"):
        read_input(path, SHAPE, FLOAT)


def test_a_fortran_ordered_array_keeps_its_elements_positions(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(SHAPE))
    np.testing.assert_array_equal(read_input(stored(tmp_path / "a.npy", array), SHAPE, FLOAT), array)


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00{broken", b"something else entirely"]
)
def test_a_corrupt_npy_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"not a complete \.npy array"):
        read_input(path, SHAPE, FLOAT)


def test_a_truncated_npy_is_rejected(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.npy", np.zeros(SHAPE, np.float32))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidArgument, match=r"not a complete \.npy array"):
        read_input(path, SHAPE, FLOAT)


def test_a_pickle_inside_an_npy_is_never_loaded(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.npy", np.array([print], dtype=object))
    with pytest.raises(InvalidArgument, match=r"not a complete \.npy array"):
        read_input(path, SHAPE, FLOAT)


def test_raw_elements_are_little_endian(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    path.write_bytes(bytes.fromhex("01000200ffff0000"))
    assert read_input(path, (2, 2), np.dtype("int16")).tolist() == [[1, 2], [-1, 0]]


def test_raw_elements_of_another_size_are_rejected_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    path.write_bytes(bytes(23))
    with pytest.raises(InvalidArgument, match=r"has 23 bytes of raw elements; the input needs 24 \(1x2x3 float32\)"):
        read_input(path, SHAPE, FLOAT)


def test_a_number_of_files_other_than_the_number_of_inputs_is_rejected(tmp_path: Path) -> None:
    tensors = [TensorInfo("left", SHAPE, "float32"), TensorInfo("right", SHAPE, "float32")]
    with pytest.raises(InvalidArgument, match="--input was given 1 time; the model has 2 inputs: left, right"):
        read_inputs([tmp_path / "a.npy"], tensors)
