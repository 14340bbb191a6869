"""Operators on tensors of 16 bits: nnfmq's result is that of LiteRT's reference kernels, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.sixteen_bit_cases import SIXTEEN_BIT_CASES, wide
from support.tflite_cases import Case, codes
from support.tflite_files import Operator, single, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")


@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES, ids=str)
def test_an_operator_on_16_bits_is_litert_s(case: Case) -> None:
    content = case.content()
    imported, litert = ours(content), Theirs(content)
    inputs = case.draw(np.random.default_rng(len(content)))
    for found, expected in zip(imported(inputs), litert(inputs), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("kind", "scale", "beta"), [("INT8", 0.1, 0.7), ("UINT8", 0.02, 1.0)])
def test_16_bits_with_a_zero_point_between_softmax_and_quantize_are_litert_s(
    kind: str, scale: float, beta: float
) -> None:
    between = codes(6, 33, kind="INT16", scale=2.0**-16, zero_point=-(2**15))
    tensors = [codes(6, 33, kind=kind, scale=scale), between, codes(6, 33, kind="INT32", scale=1e-6, zero_point=0)]
    operators = [Operator("SOFTMAX", (0,), (1,), "SoftmaxOptions", {"Beta": beta}), Operator("QUANTIZE", (1,), (2,))]
    content = writer.write(tensors, operators, (0,), (2,))
    inputs = [np.random.default_rng(1).integers(0, 256, (6, 33)).astype(np.uint8).view(kind.lower())]
    (found,), (expected,) = ours(content)(inputs), Theirs(content)(inputs)
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) > 50


def test_other_16_bits_with_a_zero_point_are_rejected() -> None:
    off = codes(4, kind="INT16", zero_point=9)
    with pytest.raises(InvalidArgument, match=r"has zero point 9: here, that of INT16 must be 0"):
        load(single("RELU", [off, wide(4)]))
    with pytest.raises(InvalidArgument, match=r"has zero point 9: here, that of INT16 must be 0"):
        load(single("QUANTIZE", [codes(4), off]))
