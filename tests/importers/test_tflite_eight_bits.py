"""Operators on tensors of 8 bits: nnfmq's result is that of LiteRT's reference kernels, bit by bit.

Scales and zero points are random, with the extremes of the zero points and quotients of scales that give ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs, ours
from support.tflite_cases import codes, integers
from support.tflite_files import Operator, single, writer

from nnfmq.hal.errors import GeneralFailure

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Array = npt.NDArray[Any]
Scheme = tuple[float, int]
MODELS = 60
BOTH = ("INT8", "UINT8")
# operator, types that LiteRT has a kernel for, least real value
FUNCTIONS: list[tuple[str, tuple[str, ...], float]] = [
    *((name, BOTH, -np.inf) for name in ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1")),
    *((name, ("INT8",), -np.inf) for name in ("ABS", "ELU", "EXP", "LOG")),
    *((name, ("INT8",), 0.0) for name in ("SQRT", "RSQRT")),
]


def stored_values(kind: str) -> Array:
    return np.arange(256, dtype=np.uint8).view(kind.lower())


def zero_point(rng: np.random.Generator, kind: str) -> int:
    info = np.iinfo(kind.lower())
    return int(rng.choice([info.min, info.max, rng.integers(info.min, info.max + 1)]))


def schemes(rng: np.random.Generator, kind: str) -> tuple[Scheme, Scheme]:
    """Return scale and zero point of an input and an output; a third of the scales are small decimals."""
    if rng.integers(3) == 0:
        scales = rng.integers(1, 20, 2) / 10
    else:
        scales = 10 ** rng.uniform(-3, 0.3) * np.array([1, 2 ** rng.uniform(-3, 3)])
    first, second = ((float(np.float32(scale)), zero_point(rng, kind)) for scale in scales)
    return first, second


def assert_equal_to_litert_s(content: bytes, inputs: list[Array], *, optimized: bool = False) -> None:
    for found, expected in zip(ours(content)(inputs), Theirs(content, optimized=optimized)(inputs), strict=True):
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def quantized(shape: tuple[int, ...], kind: str, scheme: Scheme, name: str) -> Any:
    return codes(*shape, kind=kind, scale=scheme[0], zero_point=scheme[1], name=name)


@pytest.mark.parametrize(
    ("name", "kind", "least"), [(name, kind, least) for name, kinds, least in FUNCTIONS for kind in kinds]
)
def test_a_function_of_any_stored_value_is_litert_s(name: str, kind: str, least: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(MODELS):
        given, result = schemes(rng, kind)
        values = stored_values(kind)
        if least == 0:
            values = np.maximum(values, np.asarray(given[1], values.dtype))
        content = single(name, [quantized((256,), kind, given, "x"), quantized((256,), kind, result, "y")])
        assert_equal_to_litert_s(content, [values], optimized=name == "ELU")


@pytest.mark.parametrize(("scheme", "lowest"), [((0.25, 0), -128), ((0.1, 5), 127)])
def test_neg_is_that_of_stored_values_if_these_are_symmetric(scheme: Scheme, lowest: int) -> None:
    """LiteRT negates stored values whatever the zero point is; nnfmq then computes the negative of the real values."""
    content = single("NEG", [quantized((256,), "INT8", scheme, name) for name in "xy"])
    values = stored_values("INT8")
    (found,) = ours(content)([values])
    assert found[128] == lowest
    if scheme[1] == 0:
        assert_equal_to_litert_s(content, [values])
    else:
        np.testing.assert_array_equal(found, np.clip(2 * scheme[1] - values.astype(int), -128, 127))


def test_a_function_without_a_real_result_is_saturated() -> None:
    """LiteRT refuses to compute a square root of a negative value."""
    expected: dict[str, Callable[[int], int]] = {"SQRT": lambda zero: zero, "RSQRT": lambda zero: 127}
    for name, limit in expected.items():
        content = single(name, [quantized((2,), "INT8", (0.1, 0), "x"), quantized((2,), "INT8", (0.1, 7), "y")])
        (found,) = ours(content)([np.array([-128, -1], np.int8)])
        assert found.tolist() == [limit(7)] * 2


def of_every_pair(
    name: str, kind: str, rng: np.random.Generator, table: str = ""
) -> tuple[bytes, list[Array], list[Scheme]]:
    """Return a model of a binary operator, arrays whose pairs are all pairs of stored values, and the schemes."""
    (first, second), (_, result) = schemes(rng, kind), schemes(rng, kind)
    result = (float(np.float32(max(first[0], second[0]) * 2 ** rng.uniform(-1, 4))), result[1])
    tensors = [
        quantized(shape, kind, scheme, name)
        for shape, scheme, name in zip(((256, 1), (256,), (256, 256)), (first, second, result), "xyz", strict=True)
    ]
    values = stored_values(kind)
    content = writer.write(tensors, [Operator(name, (0, 1), (2,), table, {})], (0, 1), (2,))
    return content, [values.reshape(256, 1), values], [first, second, result]


def test_squared_differences_of_all_stored_values_are_litert_s() -> None:
    rng = np.random.default_rng(3)
    for _ in range(MODELS // 2):
        content, inputs, _ = of_every_pair("SQUARED_DIFFERENCE", "INT8", rng)
        assert_equal_to_litert_s(content, inputs)


@pytest.mark.parametrize("kind", BOTH)
def test_quotients_of_all_stored_values_are_litert_s_unless_it_shifts_by_more_bits_than_there_are(kind: str) -> None:
    rng, compared = np.random.default_rng(3), 0
    for _ in range(MODELS // 2):
        content, inputs, (first, second, result) = of_every_pair("DIV", kind, rng, "DivOptions")
        inputs[1] = inputs[1][inputs[1] != second[1]].repeat(2)[:256]
        (found,), (expected,) = ours(content)(inputs), Theirs(content)(inputs)
        dividend = inputs[0].astype(int) - first[1]
        divisor = np.abs(inputs[1].astype(int) - second[1])
        exponent = np.frexp(np.float32(first[0]) / (np.float32(second[0]) * np.float32(result[0])))[1]
        shift = 30 + bits(divisor) - bits(np.where(dividend < 0, ~dividend, dividend)) - exponent
        defined = (shift >= 0) & (shift < 31) & (dividend != 0)
        np.testing.assert_array_equal(found[defined], expected[defined])
        exact = (dividend * np.sign(inputs[1].astype(int) - second[1])) / divisor * first[0] / second[0] / result[0]
        limits = np.iinfo(found.dtype)
        assert np.abs(found - np.clip(exact + result[1], limits.min, limits.max)).max() < 0.51
        compared += int(defined.sum())
    assert compared > 10**6


def bits(values: Array) -> Array:
    length: Array = np.frexp(values.astype(float))[1]
    return length


@pytest.mark.parametrize(("name", "table"), [("SQUARED_DIFFERENCE", ""), ("DIV", "DivOptions")])
@pytest.mark.parametrize("kind", BOTH)
def test_more_elements_than_pairs_have_the_results_of_fewer(name: str, table: str, kind: str) -> None:
    """A table of all pairs is computed then."""

    def content(rows: int) -> bytes:
        schemes = ((0.1, 3), (0.2, 100), (0.7, 0))
        tensors = [quantized((rows, 256), kind, scheme, name) for scheme, name in zip(schemes, "xyz", strict=True)]
        return writer.write(tensors, [Operator(name, (0, 1), (2,), table, {})], (0, 1), (2,))

    rng = np.random.default_rng(8)
    first, second = (rng.integers(0, 256, (300, 256)).astype(np.uint8).view(kind.lower()) for _ in range(2))
    second[second == 100] = 99
    (whole,) = ours(content(300))([first, second])
    part = ours(content(150))
    halves = [part([first[rows], second[rows]])[0] for rows in (slice(150), slice(150, 300))]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    second[7, 7] = 100
    if name == "DIV":
        with pytest.raises(GeneralFailure, match=r"a divisor is 0 \(C2\)"):
            ours(content(300))([first, second])


def test_a_divisor_of_0_is_rejected() -> None:
    content, inputs, (_, second, _) = of_every_pair("DIV", "INT8", np.random.default_rng(4), "DivOptions")
    inputs[1] = np.full(256, second[1], np.int8)
    with pytest.raises(GeneralFailure, match=r"a divisor is 0 \(C2\)"):
        ours(content)(inputs)


AXES = [(1, 2), (1,), (3,), (0, 1, 2, 3), (2, 3), (-1,), (2, 1)]
SHAPE = (2, 3, 4, 5)


def reduction(name: str, kind: str, axes: tuple[int, ...], keeps: bool, given: Scheme, result: Scheme) -> bytes:
    gone = {axis % 4 for axis in axes}
    kept = tuple(1 if axis in gone else size for axis, size in enumerate(SHAPE) if keeps or axis not in gone)
    tensors = [quantized(SHAPE, kind, given, "x"), integers(*axes), quantized(kept, kind, result, "y")]
    return single(name, tensors, "ReducerOptions", {"KeepDims": keeps})


def test_means_and_sums_are_litert_s() -> None:
    """LiteRT's sums of INT8 are not sums: those of UINT8, shifted by 128, are compared instead."""
    rng = np.random.default_rng(5)
    for number in range(4 * MODELS):
        axes, keeps = AXES[number % len(AXES)], bool(rng.integers(2))
        given, result = schemes(rng, "UINT8")
        values = rng.integers(0, 256, SHAPE).astype(np.uint8)
        signed = (values ^ 128).view(np.int8)
        for name in ("MEAN", "SUM"):
            content = reduction(name, "UINT8", axes, keeps, given, result)
            assert_equal_to_litert_s(content, [values])
            shifted = [(scale, zero - 128) for scale, zero in (given, result)]
            (found,) = ours(reduction(name, "INT8", axes, keeps, shifted[0], shifted[1]))([signed])
            np.testing.assert_array_equal(found, (ours(content)([values])[0] ^ 128).view(np.int8))
            if name == "MEAN":
                assert_equal_to_litert_s(reduction(name, "INT8", axes, keeps, shifted[0], shifted[1]), [signed])


def test_products_are_litert_s_unless_an_intermediate_one_has_more_than_32_bits() -> None:
    rng = np.random.default_rng(6)
    for number in range(4 * MODELS):
        axes, keeps = AXES[number % len(AXES)], bool(rng.integers(2))
        given, result = schemes(rng, "INT8")
        count = int(np.prod([SHAPE[axis] for axis in axes]))
        given = (float(np.float32(rng.uniform(0.002, 0.02))), given[1])  # the real factors are then at most 5
        largest = max(int(min(127, 2 / given[0])) if count < 10 else int(min(127, 1 / given[0])), 1)
        values = np.clip(rng.integers(-largest, largest + 1, SHAPE) + given[1], -128, 127).astype(np.int8)
        assert_equal_to_litert_s(reduction("REDUCE_PROD", "INT8", axes, keeps, given, result), [values])


def test_a_product_of_too_many_bits_is_saturated() -> None:
    content = reduction("REDUCE_PROD", "INT8", (0, 1, 2, 3), False, (1.0, 0), (1.0, 0))
    for sign, limit in ((1, 127), (-1, -128)):
        values = np.full(SHAPE, 100, np.int8)
        values[0, 0, 0, 0] *= sign
        assert ours(content)([values])[0].item() == limit


@pytest.mark.parametrize("kind", BOTH)
def test_log_softmax_is_litert_s(kind: str) -> None:
    rng = np.random.default_rng(9)
    highest = int(np.iinfo(kind.lower()).max)
    for number in range(6 * MODELS):
        (scale, zero), _ = schemes(rng, kind)
        shape = (50, int(rng.integers(1, 60))) if number else (2, 4095)
        tensors = [quantized(shape, kind, (scale, zero), "x"), quantized(shape, kind, (1 / 16, highest), "y")]
        values = rng.integers(0, 256, shape).astype(np.uint8).view(kind.lower())
        assert_equal_to_litert_s(single("LOG_SOFTMAX", tensors), [values])


def test_log_softmax_of_a_row_that_overflows_litert_s_sum_is_that_of_the_real_values() -> None:
    tensors = [quantized((1, 1 << 15), "INT8", scheme, "x") for scheme in ((0.1, 0), (1 / 16, 127))]
    (found,) = ours(single("LOG_SOFTMAX", tensors))([np.zeros((1, 1 << 15), np.int8)])
    assert set(found.ravel().tolist()) == {round(127 - 16 * 15 * np.log(2))}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("slope", [0.0, 1e-4, 0.3, 1.0, 1.5, 3.7, 100.0, -0.5, -1.0, -2.5])
def test_leaky_relu_has_any_slope(slope: float, kind: str) -> None:
    rng = np.random.default_rng(31)
    for _ in range(12):
        tensors = [quantized((256,), kind, scheme, name) for scheme, name in zip(schemes(rng, kind), "xy", strict=True)]
        content = single("LEAKY_RELU", tensors, "LeakyReluOptions", {"Alpha": slope})
        assert_equal_to_litert_s(content, [stored_values(kind)])


def test_floats_become_the_nearest_integers_of_16_bits() -> None:
    values = np.float32([0, 0.5, -0.5, 1.5, -1.5, 32767.5, 32768, 40000, -32769, 3e9, -3e9, np.inf, -np.inf, np.nan])
    tensors = [writer.Tensor("x", values.shape), writer.Tensor("y", values.shape, "INT16")]
    content = single("CAST", tensors, "CastOptions", {"InDataType": 0, "OutDataType": 7})
    assert_equal_to_litert_s(content, [values])


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_fake_quantization_of_nan_is_the_lowest_value(bits: int) -> None:
    values = np.float32([-7, -6, -0.01, 0, 0.02, 3, 6, 7, np.inf, -np.inf, np.nan])
    tensors = [writer.Tensor("x", values.shape), writer.Tensor("y", values.shape)]
    content = single("FAKE_QUANT", tensors, "FakeQuantOptions", {"Min": -6.0, "Max": 6.0, "NumBits": bits})
    assert_equal_to_litert_s(content, [values])
