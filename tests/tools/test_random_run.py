"""Random models: the generators, and how results are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import random_onnx
import random_onnx_operators
import random_run
from random_choices import Part, Value
from random_run import is_documented


def test_a_seed_always_gives_the_same_graph() -> None:
    first, second = (random_onnx.generate(7, random_onnx_operators.OPERATORS) for _ in range(2))
    assert first.whole().content == second.whole().content
    assert 3 <= len(first.nodes) <= 8


def test_a_seed_always_gives_the_same_tflite_graph() -> None:
    random_tflite = pytest.importorskip("random_tflite", reason="ai-edge-litert is not installed", exc_type=ImportError)
    first, second = (random_tflite.generate(7) for _ in range(2))
    assert first.whole().content == second.whole().content
    assert 2 <= len(first.nodes) <= 6


@pytest.mark.parametrize(
    ("found", "expected", "accumulates", "is_right"),
    [
        (np.float32([1.00001]), np.float32([1]), False, True),
        (np.float32([1.0001]), np.float32([1]), False, False),
        (np.float32([1.00001e-3, 1]), np.float32([1e-3, 1]), False, True),
        (np.float32([1.01e-3, 1]), np.float32([1e-3, 1]), False, False),
        (np.float32([1.01e-3, 1]), np.float32([1e-3, 1]), True, True),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), False, True),
        (np.float32([np.inf]), np.float32([-np.inf]), False, False),
        (np.float32([0]), np.float32([np.nan]), False, False),
        (np.float32([0]), np.float32([1e-39]), False, True),
        (np.int32([1]), np.int32([2]), False, False),
        (np.int32([1]), np.int64([1]), False, True),
        (np.int32([1]), np.int64([2**32 + 1]), False, False),
        (np.float32([1]), np.int32([1]), False, False),
        (np.float32([[1]]), np.float32([1]), False, False),
    ],
)
def test_results_are_compared_by_shape_type_and_tolerance(
    found: Any, expected: Any, accumulates: bool, is_right: bool
) -> None:
    assert (random_run.difference(found, expected, accumulates=accumulates) == "") is is_right


@pytest.mark.parametrize(
    ("operator", "given", "found", "expected", "is_right"),
    [
        ("ADD", [1, 1], [np.inf, 1], [np.finfo(np.float32).max, 1], True),
        ("ADD", [1, 1], [np.inf, 2], [np.finfo(np.float32).max, 1], False),
        ("MAXIMUM", [np.nan, 1], [np.nan], [1], True),
        ("ADD", [np.nan, 1], [np.nan], [1], False),
        ("CONV_2D", [1e30, 1], [np.inf, 1], [np.nan, 1], True),
        ("CONV_2D", [1, 1], [np.inf, 1], [np.nan, 1], False),
        ("CONV_2D", [1e30, 1], [np.inf, 1], [np.nan, 2], False),
        ("GELU", [-5.5], [-1e-7], [0], True),
        ("GELU", [-5.5], [-1e-4], [0], False),
    ],
)
def test_only_documented_differences_from_litert_are_expected(
    operator: str, given: Any, found: Any, expected: Any, is_right: bool
) -> None:
    def is_close(a: Any, b: Any) -> bool:
        return not random_run.difference(a, b, accumulates=False)

    values = [Value(name, np.float32(array)) for name, array in (("x", given), ("y", expected))]
    part = Part([operator], b"", values[:1], values[1:])
    assert is_documented(part, [np.float32(found)], is_close) is is_right
