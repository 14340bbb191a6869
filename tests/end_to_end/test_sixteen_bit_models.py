"""A model with activations of 16 bits through a driver: both engines give LiteRT's results."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs
from support.sixteen_bit_cases import bias, channels, filter, wide
from support.tflite_cases import codes, integers
from support.tflite_files import CONV, Operator, writer

import nnfmq

SLOPE, SUM = {"Alpha": 0.3}, {"PotScaleInt16": False}


def model() -> bytes:
    """Return a residual block: a strided slice of x + LEAKY_RELU(CONV_2D(x)), requantized to 8 bits."""
    whole, part = wide(1, 8, 6, 4), wide(1, 4, 6, 4, name="part")
    vectors = [integers(*values) for values in ((0, 1, 0, 0), (1, 8, 6, 4), (1, 2, 1, 1))]
    tensors = [
        *(whole, filter(4, 3, 3, 4, scales=channels(4)), bias(4), wide(1, 8, 6, 4, scale=0.02, name="sums")),
        *(wide(1, 8, 6, 4, scale=0.02, name="curved"), wide(1, 8, 6, 4, scale=0.02, name="added"), *vectors, part),
        codes(1, 4, 6, 4, kind="INT8", scale=0.5, name="narrow"),
    ]
    operators = [
        Operator("CONV_2D", (0, 1, 2), (3,), "Conv2DOptions", CONV),
        Operator("LEAKY_RELU", (3,), (4,), "LeakyReluOptions", SLOPE),
        Operator("ADD", (0, 4), (5,), "AddOptions", SUM),
        Operator("STRIDED_SLICE", (5, 6, 7, 8), (9,), "StridedSliceOptions"),
        Operator("QUANTIZE", (9,), (10,)),
    ]
    content: bytes = writer.write(tensors, operators, (0,), (9, 10))
    return content


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_a_model_of_16_bits_is_executed_in_a_burst(device: str) -> None:
    content = model()
    image = np.random.default_rng(2).integers(-(2**15), 2**15, (1, 8, 6, 4)).astype(np.int16)
    with (
        nnfmq.connect(embedded=True) as client,
        client.device(device).prepare(nnfmq.load(content)) as prepared,
        prepared.burst() as burst,
    ):
        found = burst.execute(image)
    for ours, theirs in zip(found, Theirs(content)([image]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert len(np.unique(ours)) > 20
