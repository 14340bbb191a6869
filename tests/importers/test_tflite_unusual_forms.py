"""Forms of TFLite operators that the HAL's operation does not have: expressed by others, or refused.

Results are those of LiteRT's reference kernels. A file is refused when it is loaded, not when a device prepares it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs, ours, ours_following_tflite
from support.tflite_cases import CASES, DTYPES, SAME, VALID, Case
from support.tflite_files import Tensor

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

SHAPE = (2, 1, 3, 2, 4)
POINTS = {"FLOAT32": (0.0, 0), "INT8": (0.05, 3), "UINT8": (0.05, 120), "INT16": (0.002, 0)}
REALS, BYTES = ("FLOAT32", "INT8", "UINT8"), ("INT8", "UINT8")


def x(*shape: int, kind: str = "FLOAT32", name: str = "x", quantized: tuple[float, int] | None = None) -> Any:
    scale, zero_point = POINTS.get(kind, (0.0, 0)) if quantized is None else quantized
    return Tensor(name, shape, kind, None, (scale,) if scale else (), (zero_point,) if scale else ())


def constant(values: Any, dtype: type = np.int32, name: str = "c") -> Any:
    array = np.array(values, dtype)
    return Tensor(name, array.shape, array.dtype.name.upper(), array.tobytes())


def numbers(*shape: int, name: str = "w", seed: int = 1) -> Any:
    return constant(np.random.default_rng(seed).standard_normal(shape), np.float32, name)


def compare(case: Case, follows_tflite: bool = False) -> None:
    content = case.content()
    imported, litert = (ours_following_tflite if follows_tflite else ours)(content), Theirs(content)
    rng = np.random.default_rng(len(content))
    for _ in range(3):
        inputs = case.draw(rng)
        for found, expected in zip(imported(inputs), litert(inputs), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            tolerance = 1e-5 if expected.dtype == np.float32 else 0
            np.testing.assert_allclose(found.astype(float), expected, rtol=tolerance, atol=tolerance)


FIXED = {  # the quantization of the results
    "LOGISTIC": {"INT8": (1 / 256, -128), "UINT8": (1 / 256, 0), "INT16": (1 / 32768, 0)},
    "TANH": {"INT8": (1 / 128, 0), "UINT8": (1 / 128, 128), "INT16": (1 / 32768, 0)},
    "SOFTMAX": {"INT8": (1 / 256, -128), "UINT8": (1 / 256, 0), "INT16": (1 / 32768, 0)},
    "LOG_SOFTMAX": {"INT8": (1 / 16, 127), "UINT8": (1 / 16, 255)},
    "L2_NORMALIZATION": {"INT8": (1 / 128, 0), "UINT8": (1 / 128, 128)},
}
TABLES = {"SOFTMAX": ("SoftmaxOptions", {"Beta": 0.5}), "L2_NORMALIZATION": ("L2NormOptions", {})}
FUNCTIONS = [
    *(("FLOOR", kind) for kind in ("FLOAT32",)),
    *((name, kind) for name in ("RELU", "RELU6", "RELU_N1_TO_1") for kind in REALS),
    *(("RELU", kind) for kind in ("INT16",)),
    *((name, kind) for name in ("LOGISTIC", "TANH", "SOFTMAX") for kind in (*REALS, "INT16")),
    *((name, kind) for name in ("LOG_SOFTMAX", "L2_NORMALIZATION") for kind in REALS),
    *((name, "FLOAT32") for name in ("ABS", "EXP", "NEG", "SIN", "SQUARE", "HARD_SWISH", "GELU", "COS")),
]


@pytest.mark.parametrize(("name", "kind"), FUNCTIONS, ids=map("-".join, FUNCTIONS))
def test_a_function_of_elements_or_rows_takes_tensors_of_rank_5(name: str, kind: str) -> None:
    table, options = TABLES.get(name, ("", {}))
    output = x(*SHAPE, kind=kind, name="y", quantized=FIXED.get(name, {}).get(kind))
    follows_tflite = name == "L2_NORMALIZATION"  # the HAL's has another rounding of INT8
    compare(Case(name, [x(*SHAPE, kind=kind)], [output], table, options), follows_tflite)


@pytest.mark.parametrize("kind", [*BYTES, "INT16"])
def test_quantized_tensors_of_rank_5_are_converted_to_floats(kind: str) -> None:
    compare(Case("DEQUANTIZE", [x(*SHAPE, kind=kind)], [x(*SHAPE, name="y")]))


MOVED = [
    Case("TRANSPOSE", [x(*SHAPE, kind="INT16"), constant([4, 2, 0, 3, 1])], [x(4, 3, 2, 2, 1, kind="INT16", name="y")]),
    Case("RESHAPE", [x(*SHAPE, kind="INT16"), constant([4, 2, 3, 2, 1])], [x(4, 2, 3, 2, 1, kind="INT16", name="y")]),
    Case("CONCATENATION", [x(*SHAPE, kind="INT16"), x(*SHAPE, kind="INT16", name="z")],
         [x(2, 2, 3, 2, 4, kind="INT16", name="y")], "ConcatenationOptions", {"Axis": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", MOVED, ids=str)
def test_elements_of_16_bits_move_in_tensors_of_rank_5(case: Case) -> None:
    compare(case)


ACTIVATIONS = {"NONE": 0, "RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}
ARITHMETIC = [
    *(("INT32", name) for name in ("ADD", "SUB", "MUL", "DIV")),
    *(("INT64", name) for name in ("ADD", "SUB", "MUL")),
]


@pytest.mark.parametrize("shape", [(3, 4), SHAPE], ids=["rank 2", "rank 5"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "name"), ARITHMETIC, ids=map("-".join, ARITHMETIC))
def test_integer_arithmetic_has_fused_activations(
    kind: str, name: str, activation: str, shape: tuple[int, ...]
) -> None:
    divisor = constant([[-3, 1, 2, -1]], DTYPES[kind])
    options = {"FusedActivationFunction": ACTIVATIONS[activation]}
    case = Case(name, [x(*shape, kind=kind), divisor], [x(*shape, kind=kind, name="y")], f"{name.title()}Options",
                options, low=-20, high=20)  # fmt: skip
    compare(case)


@pytest.mark.parametrize("stated", [(), (1,)], ids=["a scalar", "a vector"])
def test_a_dimension_is_added_to_a_result_of_rank_0(stated: tuple[int, ...]) -> None:
    case = Case("EXPAND_DIMS", [x(*stated), constant(0)], [x(*(1, *stated), name="y")])
    compare(case)


@pytest.mark.parametrize("keeps", [False, True], ids=["flat", "kept"])
@pytest.mark.parametrize("length", [4, 8])
def test_a_vector_is_multiplied_by_weights(length: int, keeps: bool) -> None:
    """TFLite divides it into rows; the HAL takes no vector."""
    result = (3,) if keeps else (length // 4, 3)
    if keeps and length != 4:
        return
    given = [x(length), numbers(3, 4), numbers(3, name="b")]
    compare(Case("FULLY_CONNECTED", given, [x(*result, name="y")], "FullyConnectedOptions", {"KeepNumDims": keeps}))


SIZES = [
    *((SAME, kernel, size) for kernel in (1, 2, 3) for size in ((9, 5), (10, 6), (9, 6))),
    *((VALID, kernel, (8 + kernel + more, 4 + kernel)) for kernel in (1, 2, 3) for more in (0, 1)),
    *((VALID, kernel, (8 + kernel, 5 + kernel)) for kernel in (1, 2, 3)),
]


def transposed(scheme: int, kernel: int, size: tuple[int, int]) -> Case:
    shape = (2, *size, 2)
    given = [constant(shape), numbers(2, kernel, kernel, 3), x(2, 5, 3, 3), numbers(2, name="b", seed=2)]
    options = {"Padding": scheme, "StrideW": 2, "StrideH": 2}
    return Case("TRANSPOSE_CONV", given, [x(*shape, name="y")], "TransposeConvOptions", options)


@pytest.mark.parametrize(("scheme", "kernel", "size"), SIZES, ids=str)
def test_a_transposed_convolution_has_the_size_that_the_file_wants(
    scheme: int, kernel: int, size: tuple[int, int]
) -> None:
    """The HAL's scheme VALID implies one size for each input; TFLite computes as many pixels as are wanted."""
    compare(transposed(scheme, kernel, size))


@pytest.mark.parametrize(("scheme", "size"), [(SAME, (8, 5)), (SAME, (11, 5)), (VALID, (9, 7)), (VALID, (13, 7))])
@pytest.mark.parametrize("shapes", [None, {0: (2, 5, 3, 3)}], ids=["the file's shapes", "shapes"])
def test_a_transposed_convolution_to_a_size_that_litert_refuses_is_refused(
    scheme: int, size: tuple[int, int], shapes: Any
) -> None:
    content = transposed(scheme, 3, size).content()
    with pytest.raises(RuntimeError, match="computed_input"):
        Theirs(content)
    with pytest.raises(InvalidArgument, match=r"an output of .* does not belong to an input of \[2, 5, 3, 3\]"):
        load(content, shapes=shapes)


def test_a_quantized_transposed_convolution_has_the_size_that_the_file_wants() -> None:
    weights = np.random.default_rng(3).integers(-127, 128, (2, 1, 1, 3)).astype(np.int8)
    filter = Tensor("w", weights.shape, "INT8", weights.tobytes(), (0.01,), (0,))
    given = [constant((2, 10, 6, 2)), filter, x(2, 5, 3, 3, kind="INT8")]
    options = {"Padding": VALID, "StrideW": 2, "StrideH": 2}
    compare(Case("TRANSPOSE_CONV", given, [x(2, 10, 6, 2, kind="INT8", name="y")], "TransposeConvOptions", options))


STRIDES = {"StrideW": 1, "StrideH": 1, "Padding": VALID}
REFUSED = [
    Case("ATAN2", [x(3, 1), x(3, 4, name="z")], [x(3, 1, name="y")], note="shapes that broadcast to another one"),
    Case("CONV_2D", [x(1, 2, 2, 3), numbers(4, 3, 3, 3), numbers(4, name="b")], [x(1, 1, 1, 4, name="y")],
         "Conv2DOptions", {**STRIDES, "DilationWFactor": 1, "DilationHFactor": 1}, note="a filter above the image"),
    Case("MAX_POOL_2D", [x(1, 2, 2, 3)], [x(1, 1, 1, 3, name="y")], "Pool2DOptions",
         {**STRIDES, "FilterWidth": 3, "FilterHeight": 3}, note="a filter above the image"),
    Case("STRIDED_SLICE", [x(2, 5), constant([0, 5]), constant([2, 6]), constant([1, 1])], [x(2, name="y")],
         "StridedSliceOptions", {"ShrinkAxisMask": 2}, note="an element outside"),
    Case("STRIDED_SLICE", [x(3, 2, 7), constant([0, 1, 4]), constant([0, 2, 7]), constant([1, 1, 1])],
         [x(0, 7, name="y")], "StridedSliceOptions", {"ShrinkAxisMask": 2}, note="no elements"),
    Case("FULLY_CONNECTED", [x(2, 5), numbers(3, 4), numbers(3, name="b")], [x(2, 3, name="y")],
         "FullyConnectedOptions", note="no whole rows"),
    Case("CONCATENATION", [x(2, 3), x(3, 3, name="z")], [x(2, 6, name="y")], "ConcatenationOptions", {"Axis": 1},
         note="other extents"),
    Case("RELU", [x(2, 3)], [x(3, 2, name="y")], note="another shape"),
    Case("ADD", [x(2, 3), x(2, 4, name="z")], [x(2, 4, name="y")], "AddOptions", note="shapes that do not broadcast"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_no_device_prepares_is_refused_when_it_is_loaded(case: Case) -> None:
    with pytest.raises(InvalidArgument, match=rf"operator 0 \({case.name}\): no device can compute it: "):
        load(case.content())


USUAL = {
    *(
        "ADD",
        "AVERAGE_POOL_2D",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "DEQUANTIZE",
        "FULLY_CONNECTED",
        "LOGISTIC",
        "MAX_POOL_2D",
    ),
    *("MUL", "QUANTIZE", "RELU", "RELU6", "SOFTMAX", "SUB", "TANH"),
}
STATED = [case for case in CASES if case.name in USUAL and case.outputs[0].shape]


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("case", STATED, ids=str)
def test_a_file_that_states_another_shape_of_a_result_is_refused(case: Case, axis: int) -> None:
    """Also where the operation is usual, and its declaration is not imported to check it."""
    shape = list(case.outputs[0].shape)
    shape[axis] += 1
    content = replace(case, outputs=[replace(case.outputs[0], shape=tuple(shape)), *case.outputs[1:]]).content()
    with pytest.raises(InvalidArgument, match=r"no device can compute it|shape"):
        load(content)


COMPARISONS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("scales", [(0.02, 0.01), (0.01, 0.02), (0.5, 0.125), (0.01, 0.01)], ids=str)
def test_numbers_of_16_bits_are_compared_whatever_their_scales(name: str, scales: tuple[float, float]) -> None:
    """LiteRT does so in EQUAL and NOT_EQUAL only, with 8 bits after the binary point."""
    given = [x(6, 1, kind="INT16", quantized=(scales[0], 0)), x(9, kind="INT16", name="z", quantized=(scales[1], 0))]
    case = Case(name, given, [x(6, 9, kind="BOOL", name="y")])
    stored = np.array([[-40], [0], [7], [14], [100], [32767]], np.int16)
    other = np.array([-160, -20, 0, 7, 14, 28, 50, 200, -32768], np.int16)
    (found,) = ours(case.content())([stored, other])
    exact = [Fraction(scale).limit_denominator(1000) for scale in scales]
    real, others = (
        [[Fraction(int(n)) * scale for n in row] for row in rows]
        for rows, scale in zip((stored, other[None]), exact, strict=True)
    )
    ufunc = getattr(np, name.lower())
    np.testing.assert_array_equal(
        found.astype(bool), ufunc(np.array(real, object), np.array(others, object)).astype(bool)
    )
    if name in ("EQUAL", "NOT_EQUAL"):
        np.testing.assert_array_equal(found.astype(bool), Theirs(case.content())([stored, other])[0])
