"""A model that is read with `tflite_reader` and written again is the same model."""

from __future__ import annotations

import pytest
import quantize as tool
from support.tflite_files import Operator, Tensor, everything, quantized, single, writer

import nnfmq
from nnfmq.hal.errors import InvalidArgument


def test_a_model_read_and_written_again_is_the_same_for_the_importer() -> None:
    assert nnfmq.load(tool.read(everything()).to_bytes()) == nnfmq.load(everything())


def test_the_packaged_model_is_written_again_to_the_same_bytes() -> None:
    content = nnfmq.example_path("digits.tflite").read_bytes()
    description = "Handwritten digits, 8x8 in 0..1; 434 of 450 held-out digits right."
    assert tool.read(content).to_bytes(description) == content


def test_omitted_inputs_and_every_kind_of_option_are_kept() -> None:
    operators = {operator.name: operator for operator in tool.read(everything()).operators}
    assert operators["DEPTHWISE_CONV_2D"].inputs[2] == tool.OMITTED
    assert operators["SQUEEZE"].options == {"SqueezeDims": [1, 2]}
    assert operators["CONV_2D"].options["DilationWFactor"] == 2
    assert operators["SOFTMAX"].options == {"Beta": 1.0}


def test_tensors_that_nothing_uses_are_dropped() -> None:
    tensors = [Tensor("unused", (3,)), Tensor("x", (2,)), Tensor("strange", (1,), "COMPLEX64"), Tensor("y", (2,))]
    graph = tool.read(writer.write(tensors, [Operator("RELU", (1,), (3,))], (1,), (3,)))
    assert [tensor.name for tensor in graph.tensors] == ["x", "y"]
    assert (graph.inputs, graph.outputs, graph.operators[0].inputs) == ((0,), (1,), (0,))


def test_a_quantized_tensor_is_rejected_with_its_name() -> None:
    with pytest.raises(InvalidArgument, match=r"tensor 0 \('x'\) is TENSOR_QUANT8_ASYMM_SIGNED"):
        tool.read(quantized())


def test_a_truncated_file_is_rejected() -> None:
    content = single("RELU", [Tensor("x", (2,)), Tensor("y", (2,))])
    with pytest.raises(InvalidArgument):
        tool.read(content[: len(content) // 2])
