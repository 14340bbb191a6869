"""Operations that the HAL and TFLite define differently: with `follows_tflite`, LiteRT's result, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs, ours, ours_following_tflite
from support.tflite_cases import codes, integers, x
from support.tflite_files import Operator, Tensor, single, writer

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Array = npt.NDArray[Any]
KINDS = ("INT8", "UINT8")
COMPARISONS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")
MODELS = 20


def quantized(rng: np.random.Generator, kind: str, *shape: int, name: str) -> Any:
    """Return a tensor of a random scale below 1 and any zero point, extremes included."""
    info = np.iinfo(kind.lower())
    zero_point = int(rng.choice([info.min, info.max, rng.integers(info.min, info.max + 1)]))
    scale = float(np.float32(10 ** rng.uniform(-2.5, -0.1)))
    return codes(*shape, kind=kind, scale=scale, zero_point=zero_point, name=name)


def stored_values(kind: str) -> Array:
    return np.arange(256, dtype=np.uint8).view(kind.lower())


def differs_only_without(content: bytes, inputs: list[Array]) -> bool:
    """Assert that the results are LiteRT's, and return whether those with the HAL's definition differ."""
    expected = Theirs(content)(inputs)
    for found, result in zip(ours_following_tflite(content)(inputs), expected, strict=True):
        np.testing.assert_array_equal(found.reshape(result.shape), result)
    pairs = zip(ours(content)(inputs), expected, strict=True)
    return not all(np.array_equal(found.reshape(result.shape), result) for found, result in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*COMPARISONS, "MAXIMUM", "MINIMUM"])
def test_pairs_of_all_stored_values_give_litert_s(name: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    values, differ = stored_values(kind), []
    for _ in range(MODELS):
        shape = (256, 256)
        given = [quantized(rng, kind, 256, 1, name="a"), quantized(rng, kind, 256, name="b")]
        out = x(*shape, kind="BOOL") if name in COMPARISONS else quantized(rng, kind, *shape, name="y")
        content = writer.write([*given, out], [Operator(name, (0, 1), (2,))], (0, 1), (2,))
        differ.append(differs_only_without(content, [values.reshape(256, 1), values]))
    assert any(differ)


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons_of_scales_from_1_on_are_the_hal_s(kind: str) -> None:
    """LiteRT ends the process for such scales."""
    given = [codes(256, kind=kind, scale=1.5, zero_point=100, name=name) for name in "ab"]
    content = writer.write([*given, x(256, kind="BOOL")], [Operator("LESS", (0, 1), (2,))], (0, 1), (2,))
    (found,) = ours_following_tflite(content)([stored_values(kind), stored_values(kind)[::-1]])
    np.testing.assert_array_equal(found, stored_values(kind) < stored_values(kind)[::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_select_takes_stored_values(kind: str) -> None:
    rng = np.random.default_rng(2)
    tensors = [
        x(256, kind="BOOL", name="which"),
        *(quantized(rng, kind, 256, name=name) for name in ("a", "b", "y")),
    ]
    content = writer.write(tensors, [Operator("SELECT_V2", (0, 1, 2), (3,))], (0, 1, 2), (3,))
    values = stored_values(kind)
    assert differs_only_without(content, [rng.random(256) < 0.5, values, values[::-1].copy()])


@pytest.mark.parametrize("kind", ["FLOAT32", "INT32", *KINDS])
def test_the_first_of_equal_numbers_is_first(kind: str) -> None:
    scales = {"scales": (0.1,), "zero_points": (3,)} if kind in KINDS else {}
    given, values = Tensor("x", (9, 40), kind, **scales), Tensor("y", (9, 7), kind, **scales)
    tensors = [given, integers(7, shape=()), values, x(9, 7, kind="INT32")]
    content = writer.write(tensors, [Operator("TOPK_V2", (0, 1), (2, 3), "TopKV2Options", {})], (0,), (2, 3))
    numbers = np.random.default_rng(3).integers(0, 12, (9, 40))
    assert differs_only_without(content, [numbers.astype(kind.lower())])


@pytest.mark.parametrize("kind", KINDS)
def test_means_in_one_quantization_are_rounded(kind: str) -> None:
    rng = np.random.default_rng(4)
    for axes, kept in (((1, 2), (3, 1, 1, 6)), ((0, 3), (1, 4, 5, 1)), ((2,), (3, 4, 1, 6))):
        given = quantized(rng, kind, 3, 4, 5, 6, name="x")
        result = codes(*kept, kind=kind, scale=given.scales[0], zero_point=given.zero_points[0], name="y")
        content = single("MEAN", [given, integers(*axes), result], "ReducerOptions", {"KeepDims": True})
        values = rng.integers(0, 256, (3, 4, 5, 6)).astype(np.uint8).view(kind.lower())
        assert differs_only_without(content, [values])


def test_averages_of_int8_are_rounded_away_from_zero() -> None:
    rng, differ = np.random.default_rng(5), []
    for padding in (0, 1):
        for height, width, activation in ((2, 2, 0), (3, 1, 1), (1, 4, 3)):
            given = quantized(rng, "INT8", 2, 7, 6, 5, name="x")
            rows, columns = (7, 6) if padding == 0 else (8 - height, 7 - width)
            result = codes(2, rows, columns, 5, scale=given.scales[0], zero_point=given.zero_points[0], name="y")
            options = {"Padding": padding, "StrideW": 1, "StrideH": 1, "FilterHeight": height, "FilterWidth": width}
            options["FusedActivationFunction"] = activation
            content = single("AVERAGE_POOL_2D", [given, result], "Pool2DOptions", options)
            values = rng.integers(-128, 128, (2, 7, 6, 5)).astype(np.int8)
            differ.append(differs_only_without(content, [values]))
    assert any(differ)


@pytest.mark.parametrize("flag", ["", "AlignCorners", "HalfPixelCenters"])
def test_int8_is_resized_in_fixed_point(flag: str) -> None:
    rng, differ = np.random.default_rng(6), []
    for _ in range(MODELS):
        height, width, rows, columns = (int(size) for size in rng.integers(1, 12, 4))
        given = quantized(rng, "INT8", 2, height, width, 5, name="x")
        result = codes(2, rows, columns, 5, scale=given.scales[0], zero_point=given.zero_points[0], name="y")
        options = {flag: True} if flag else {}
        content = single("RESIZE_BILINEAR", [given, integers(rows, columns), result], "ResizeBilinearOptions", options)
        values = rng.integers(-128, 128, (2, height, width, 5)).astype(np.int8)
        differ.append(differs_only_without(content, [values]))
    assert any(differ)


def test_int8_is_normalized_with_tflite_s_number_of_bits() -> None:
    rng, differ = np.random.default_rng(7), []
    for size in range(1, MODELS):
        given = quantized(rng, "INT8", 20, size, name="x")
        content = single("L2_NORMALIZATION", [given, codes(20, size, scale=1 / 128, zero_point=0)], "L2NormOptions")
        differ.append(differs_only_without(content, [rng.integers(-128, 128, (20, size)).astype(np.int8)]))
    assert any(differ)


def product_model(rng: np.random.Generator, kind: str, case: int, activation: int) -> tuple[bytes, list[Array]]:
    """Return a FULLY_CONNECTED of random scales, small decimals or powers of two, and 500 rows of stored values."""
    rows, length, units = 500, 5, 7
    scales = [float(scale) for scale in 10 ** rng.uniform(-3, 0, 2)]
    scales = [scales, [1.0, 0.5], [float(n) / 10 for n in rng.integers(1, 30, 2)]][case % 3]
    factor = (2.0 ** rng.integers(0, 9), 2.0 ** rng.uniform(0, 9))[case % 2]
    info = np.iinfo(kind.lower())
    x_zero, w_zero, y_zero = (int(zero) for zero in rng.integers(info.min, info.max + 1, 3))
    weights = rng.integers(info.min, info.max + 1, (units, length)).astype(kind.lower())
    bias_scale = float(np.float32(np.float32(scales[0]) * np.float32(scales[1])))
    tensors = [
        codes(rows, length, kind=kind, scale=scales[0], zero_point=x_zero, name="x"),
        codes(units, length, kind=kind, scale=scales[1], zero_point=w_zero * (kind == "UINT8"), name="w"),
        codes(units, kind="INT32", scale=bias_scale, zero_point=0, name="b"),
        codes(rows, units, kind=kind, scale=bias_scale * float(factor), zero_point=y_zero, name="y"),
    ]
    biases = rng.integers(-3000, 3000, units).astype(np.int32)
    tensors[1], tensors[2] = (
        replace(tensor, data=array.tobytes()) for tensor, array in zip(tensors[1:3], (weights, biases), strict=True)
    )
    options = {"FusedActivationFunction": activation}
    values = rng.integers(info.min, info.max + 1, (rows, length)).astype(kind.lower())
    return single("FULLY_CONNECTED", tensors, "FullyConnectedOptions", options), [values]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_rounded_once(kind: str) -> None:
    rng = np.random.default_rng(8)
    differ = [differs_only_without(*product_model(rng, kind, case, (0, 0, 1, 3)[case % 4])) for case in range(60)]
    assert sum(differ) > 20


def test_products_with_a_scale_for_each_unit_are_rounded_once() -> None:
    rng, differ = np.random.default_rng(9), []
    for case in range(30):
        rows, length, units = 300, 4, 6
        scales = (2.0 ** -rng.integers(0, 5, units), 10 ** rng.uniform(-2, 0, units))[case % 2]
        filter, biases = rng.integers(-127, 128, (units, length)), rng.integers(-900, 900, units)
        quantization = {"scales": tuple(map(float, scales)), "zero_points": (0,) * units}
        weights = Tensor("w", (units, length), "INT8", filter.astype(np.int8).tobytes(), **quantization)
        bias = Tensor("b", (units,), "INT32", biases.astype(np.int32).tobytes(), **quantization)
        x_zero, y_zero = (int(zero) for zero in rng.integers(-128, 128, 2))
        given = codes(rows, length, scale=1.0, zero_point=x_zero, name="x")
        result = codes(rows, units, scale=float(scales.max() * 2 ** rng.integers(1, 8)), zero_point=y_zero, name="y")
        content = single("FULLY_CONNECTED", [given, weights, bias, result], "FullyConnectedOptions", {})
        differ.append(differs_only_without(content, [rng.integers(-128, 128, (rows, length)).astype(np.int8)]))
    assert sum(differ) > 10
