"""Operators on tensors of 16 bits: nnfmq's result is that of LiteRT's reference kernels, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.sixteen_bit_cases import SIXTEEN_BIT_CASES
from support.tflite_cases import Case

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")


@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES, ids=str)
def test_an_operator_on_16_bits_is_litert_s(case: Case) -> None:
    content = case.content()
    imported, litert = ours(content), Theirs(content)
    inputs = case.draw(np.random.default_rng(len(content)))
    for found, expected in zip(imported(inputs), litert(inputs), strict=True):
        np.testing.assert_array_equal(found, expected)
