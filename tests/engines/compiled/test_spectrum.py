"""Kernels of RFFT2D, REAL, IMAG and COMPLEX_ABS, compared with the interpreter, which computes in float64, too."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree, assert_kernels_agree_on
from support.small_models import one_operation, vector

from nnfmq.hal.extensions import NAME, PREFIX, TENSOR_COMPLEX64, TfliteOperation, operation_code
from nnfmq.hal.types import ExtensionNameAndPrefix, Model, Operand, OperandType

pytestmark = pytest.mark.instruction_sets

F32 = OperandType.TENSOR_FLOAT32


def model_of(name: str, arguments: list[object], output: Operand) -> Model:
    made = one_operation(operation_code(TfliteOperation[name]), arguments, output)
    return replace(made, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((5, 1, 4), 4),
        ((1, 1, 8), 8),
        ((3, 2, 1, 16), 16),
        ((7, 1, 20), 32),
        ((2, 1, 33), 64),
        ((9, 3, 300), 128),
        ((1, 100), 256),
        ((11, 1, 1000), 1024),
        ((1, 1, 1), 8),
    ],
)
def test_the_spectra_of_rows_match_the_interpreter(shape: tuple[int, ...], length: int) -> None:
    """Rows are whole, cut, or padded with zeros; the last group of rows is whole or not."""
    output = Operand(TENSOR_COMPLEX64, (*shape[:-2], 1, length // 2 + 1))
    assert_kernels_agree(model_of("RFFT2D", [Operand(F32, shape), vector([1, length])], output), tolerance=1e-6)


def test_the_spectrum_of_a_wave_has_one_line_and_no_imaginary_parts_at_its_ends() -> None:
    from nnfmq.engines.compiled.partition import prepare

    length, rows = 64, np.empty((3, 1, 64), np.float32)
    rows[0], rows[1] = np.cos(2 * np.pi * 5 * np.arange(length) / length), np.full(length, 3.0)
    rows[2] = np.where(np.arange(length) % 2, -1e30, 1e30)
    output = Operand(TENSOR_COMPLEX64, (3, 1, length // 2 + 1))
    model = model_of("RFFT2D", [Operand(F32, rows.shape), vector([1, length])], output)
    found = np.empty((3, 33), np.complex64)
    prepare(model).execute([rows], [found.reshape(3, 1, 33)])
    expected = np.zeros((3, 33))
    expected[0, 5], expected[1, 0], expected[2, 32] = 32, 192, 6.4e31
    np.testing.assert_allclose(found.real, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.imag, 0, atol=1e-5)
    assert not found.imag[:, [0, 32]].any()


@pytest.mark.parametrize("name", ["REAL", "IMAG", "COMPLEX_ABS"])
@pytest.mark.parametrize("shape", [(3, 7), (1,), (2, 5000), (4096,)])
def test_parts_of_complex_numbers_match_the_interpreter(name: str, shape: tuple[int, ...]) -> None:
    parts = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32) * np.float32(1e30)
    special = [0.0, np.inf, np.nan, 3e38, 1e-42, -np.inf]
    flat = parts.reshape(2, -1)[:, : len(special)]
    flat[0], flat[1] = special[: flat.shape[1]], special[::-1][: flat.shape[1]]
    numbers = np.empty(shape, np.complex64)
    numbers.real, numbers.imag = parts
    model = model_of(name, [Operand(TENSOR_COMPLEX64, shape)], Operand(F32, shape))
    assert_kernels_agree_on(model, [[numbers]], tolerance=1e-6 if name == "COMPLEX_ABS" else 0.0)
