"""Copies between an application's arrays and those in shared memory, by each core."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from nnfmq.client.model.array_copies import CORES

SMALL, LARGE = 6, 6 * 8192  # elements; the compiled core leaves the larger ones to NumPy
TYPES = [np.float32, np.float16, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_]


@pytest.fixture(params=CORES.available())
def copies(request: pytest.FixtureRequest) -> Any:
    return CORES.load(request.param).ArrayCopies


def numbers(count: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (np.arange(count) % 100).astype(dtype).reshape(shape)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_of_each_type_are_copied(copies: Any, dtype: Any, count: int) -> None:
    inputs = [np.zeros((2, count // 2), dtype), np.zeros((), dtype), np.zeros((0, 3), dtype)]
    outputs = [numbers(count, dtype, (count // 3, 3)), np.ones((), dtype), np.zeros((2, 0), dtype)]
    values = (numbers(count, dtype, (2, count // 2)), np.ones((), dtype), np.zeros((0, 3), dtype))
    each = copies(inputs, outputs)
    assert each.copy_in(values)
    for target, value in zip(inputs, values, strict=True):
        np.testing.assert_array_equal(target, value)
    results = each.copy_out()
    for result, output in zip(results, outputs, strict=True):
        assert (result.dtype, result.shape) == (output.dtype, output.shape)
        assert result.flags.writeable and result.flags.c_contiguous and not np.shares_memory(result, output)
        np.testing.assert_array_equal(result, output)


def test_a_copy_has_every_bit(copies: Any) -> None:
    bits = np.array([0x7F800001, 0xFFC00002, 0x80000000, 0x00000001], np.uint32)  # NaNs, -0, a subnormal
    target = np.zeros(4, np.float32)
    each = copies([target], [bits.view(np.float32)])
    assert each.copy_in((bits.view(np.float32),))
    assert target.tobytes() == each.copy_out()[0].tobytes() == bits.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((3, 2), np.float32),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros((1, 2, 3), np.float32),
        np.zeros(6, np.float32),
        np.zeros((2, 3), [("a", np.float32)]),
        [[1.0, 2.0, 3.0]] * 2,
        {"name": np.zeros((2, 3), np.float32)},
        np.zeros((2, 3), np.float32).view(np.ma.MaskedArray),
        None,
    ],
)
def test_what_is_not_an_array_like_the_input_is_left_to_the_caller(copies: Any, value: Any) -> None:
    target = np.ones((2, 3), np.float32)
    assert not copies([target], []).copy_in((value,))
    assert target.all()


def test_another_number_of_values_is_left_to_the_caller(copies: Any) -> None:
    each = copies([np.zeros(3, np.float32)], [])
    assert not each.copy_in(())
    assert not each.copy_in((np.zeros(3, np.float32), np.zeros(3, np.float32)))


@pytest.mark.parametrize(
    "value",
    [np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T, np.arange(6, dtype=np.float32).reshape(2, 3)[::-1]],
    ids=["transposed", "reversed"],
)
def test_elements_that_are_not_contiguous_are_copied_in_order(copies: Any, value: Any) -> None:
    target = np.zeros((2, 3), np.float32)
    assert copies([target], []).copy_in((value,))
    np.testing.assert_array_equal(target, value)


def test_arrays_that_overlap_the_input_are_copied_as_numpy_does(copies: Any) -> None:
    memory = np.arange(9, dtype=np.float32)
    expected = memory[:6].copy()
    assert copies([memory[3:]], []).copy_in((memory[:6],))
    np.testing.assert_array_equal(memory[3:], expected)


def test_arrays_live_as_long_as_their_copies(copies: Any) -> None:
    source = np.zeros(3, np.float32)
    array = source[:]
    each, died = copies([array], [array]), weakref.ref(array)
    del array
    assert died() is not None
    assert each.copy_in((np.ones(3, np.float32),))
    assert source.all()
    del each
    gc.collect()
    assert died() is None
