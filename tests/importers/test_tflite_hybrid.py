"""Operators with float inputs and quantized weights: nnfmq's results are those of LiteRT's reference kernels.

TFLite quantizes the input, so a comparison with the dequantized weights alone is off by up to 1 % of the output.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.hybrid_cases import HYBRID_CASES
from support.tflite_cases import Case

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

TOLERANCE = 1e-5  # of the largest output


@pytest.mark.parametrize("case", HYBRID_CASES, ids=str)
def test_a_hybrid_operator_is_litert_s(case: Case) -> None:
    content = case.content()
    imported, litert = ours(content), Theirs(content)
    rng = np.random.default_rng(len(content))
    for _ in range(3):
        inputs = case.draw(rng)
        (found,), (expected,) = imported(inputs), litert(inputs)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
