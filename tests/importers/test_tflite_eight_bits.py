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
from support.tflite_cases import codes
from support.tflite_files import single

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
