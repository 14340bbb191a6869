"""Every operator that the importer knows, in a separate file: nnfmq's result is that of LiteRT's reference kernels.

LiteRT is an optional dependency; without it these tests are skipped. Codes must be equal, floats nearly. Here the
translation is under test; what the operations compute in all their types is in tests/operations. A few operators are
compared with LiteRT's ordinary kernels: it has no reference kernels of CEIL, ELU and ROUND, and that of
LOCAL_RESPONSE_NORMALIZATION leaves out the last neighbour.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.tflite_cases import CASES, Case
from support.tflite_extension_cases import CASES as EXTENSION_CASES

from nnfmq.importers.tflite.operators import CONVERTERS, control_flow, custom

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

STEPS = 3


def test_every_operator_of_the_table_has_a_case() -> None:
    elsewhere = {"BROADCAST_ARGS", "DENSIFY", "RANGE", "RANK", "SEGMENT_SUM", "SHAPE", "UNIQUE", "WHERE"}
    for module in (control_flow, custom, control_flow):
        elsewhere |= set(module.CONVERTERS)
    assert {case.name for case in (*CASES, *EXTENSION_CASES)} | elsewhere == set(CONVERTERS)


@pytest.mark.parametrize("case", [*CASES, *EXTENSION_CASES], ids=str)
def test_an_imported_operator_is_litert_s(case: Case) -> None:
    content = case.content()
    imported, litert = ours(content), Theirs(content, optimized=case.optimized)
    rng = np.random.default_rng(len(content))
    for _ in range(STEPS):  # operators with a state remember the steps before
        inputs = case.draw(rng)
        for found, expected in zip(imported(inputs), litert(inputs), strict=True):
            tolerance = 1e-5 if expected.dtype in (np.float32, np.complex64) else 0
            np.testing.assert_allclose(found.astype(complex), expected, rtol=tolerance, atol=tolerance)
            assert found.shape == expected.shape
