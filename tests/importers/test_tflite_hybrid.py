"""Operators with float inputs and quantized weights: nnfmq's results are those of LiteRT's reference kernels.

TFLite quantizes the input, so a comparison with the dequantized weights alone is off by up to 1 % of the output.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.hybrid_cases import HYBRID_CASES, real_bias
from support.sixteen_bit_cases import channels, filter
from support.tflite_cases import Case, integers, x
from support.tflite_files import single

from nnfmq.importers import load

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


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("scales", [(0.02,), (0.02,) * 3, channels(3)])
def test_a_transposed_convolution_quantizes_its_images_as_litert_does(scales: tuple[float, ...], padding: int) -> None:
    size = integers(2, 12, 8, 3)
    given = [size, filter(3, 3, 2, 4, scales=scales), x(2, 6 - padding, 4, 4), real_bias(3)]
    options = {"Padding": padding, "StrideW": 2, "StrideH": 2}
    content = Case("TRANSPOSE_CONV", given, [x(2, 12, 8, 3)], "TransposeConvOptions", options).content()
    images = np.random.default_rng(3).normal(1, 1, (2, 6 - padding, 4, 4)).astype(np.float32)
    images[1] *= 5  # each image has a scale of its own
    (found,), (expected,) = ours(content)([images]), Theirs(content)([images])
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_constants_may_be_after_the_flatbuffer() -> None:
    tensors = [x(3, 33), filter(7, 33, scales=channels(7)), real_bias(7), x(3, 7, name="y")]
    made = [single("FULLY_CONNECTED", tensors, "FullyConnectedOptions", constants_follow=after) for after in (0, 1)]
    rows = np.random.default_rng(1).standard_normal((3, 33)).astype(np.float32)
    (near,), (far,), (expected,) = ours(made[0])([rows]), ours(made[1])([rows]), Theirs(made[1])([rows])
    assert len(load(made[1]).model.operand_values) == len(load(made[0]).model.operand_values)
    np.testing.assert_array_equal(near, far)
    np.testing.assert_allclose(far, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("case", [case for case in HYBRID_CASES if case.name != "EMBEDDING_LOOKUP"], ids=str)
def test_weights_that_are_multiplied_as_bytes_stay_bytes(case: Case) -> None:
    graph = load(case.content()).model.main
    found = [operation for operation in graph.operations if "HYBRID" in operation.type.name]
    is_product = case.name == "BATCH_MATMUL"
    several = "images" in case.note or case.name == "DEPTHWISE_CONV_2D" or (is_product and "broadcast" not in case.note)
    assert [each.type.name for each in found] == [
        f"nnfmq.tflite.HYBRID_{'FULLY_CONNECTED' if is_product else case.name}"
    ] * (2 if several else 1)
    kinds = {graph.operands[index].type.name for each in found for index in each.inputs[1:3]}
    assert any("QUANT8" in kind for kind in kinds)
    assert not any(operation.type.name.endswith(".DYNAMIC_QUANTIZE") for operation in graph.operations)
