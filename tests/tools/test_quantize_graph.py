"""The quantizer's conversion of a graph: same-scale groups, fixed outputs, weights, versions, and rejected models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import quantize as tool
from quantize import OMITTED, Graph, QuantParams, Range
from support.tflite_files import CONV, POOL, floats, ints
from tflite_writer import Operator, Tensor

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.operations import REGISTRY

SAME_SCALE = [name for name, rule in tool.RULES.items() if rule.same_scale]
FIXED_OUTPUTS = {
    "SOFTMAX": (1 / 256, -128),
    "LOGISTIC": (1 / 256, -128),
    "TANH": (1 / 128, 0),
}  # TFLite's specification
HAL_NAMES = {"RELU_N1_TO_1": "RELU1"}


def graph(tensors: Sequence[Tensor], *operators: Operator) -> Graph:
    """Return a model whose input is the first tensor and whose output is the last."""
    return Graph(tuple(tensors), operators, (0,), (len(tensors) - 1,))


def chain(*names: str) -> Graph:
    """Return a model of unary operators in sequence; tensor n is the result of the n-th operator (0: the input)."""
    tensors = [Tensor(f"t{n}", (1, 4)) for n in range(len(names) + 1)]
    return graph(tensors, *(Operator(name, (n,), (n + 1,)) for n, name in enumerate(names)))


def ranges(*pairs: tuple[float, float]) -> dict[int, Range]:
    return {index: Range(*pair) for index, pair in enumerate(pairs)}


@pytest.mark.parametrize("name", SAME_SCALE)
def test_same_scale_tensors_get_parameters_for_the_union_of_their_ranges(name: str) -> None:
    found = tool.choose_params(chain(name), ranges((-256, 0), (0, 254)), "int8")
    assert found == dict.fromkeys((0, 1), QuantParams(2.0, 0, "int8"))


@pytest.mark.parametrize("name", tool.RULES)
def test_same_scale_operators_are_those_for_which_the_hal_requires_it(name: str) -> None:
    declaration = REGISTRY[OperationType[HAL_NAMES.get(name, name)]]
    required = declaration.same_quantization or name == "CONCATENATION"  # required by TFLite
    assert tool.RULES[name].same_scale == required


def test_all_inputs_of_a_concatenation_have_the_same_scale_as_its_result() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("a", (1, 2)), Tensor("b", (1, 2)), Tensor("y", (1, 6))]
    operators = [
        Operator("ADD", (0, 0), (1,)),
        Operator("MUL", (0, 0), (2,)),
        Operator("CONCATENATION", (0, 1, 2), (3,)),
    ]
    found = tool.choose_params(graph(tensors, *operators), ranges((0, 1), (0, 2), (-1, 0), (0, 0)), "uint8")
    assert len(set(found.values())) == 1
    assert found[0] == QuantParams(float(np.float32(3 / 255)), 85, "uint8")


def test_a_same_scale_group_spans_same_scale_operators_only() -> None:
    found = tool.choose_params(chain("RESHAPE", "LOGISTIC", "PAD"), ranges((0, 51), (0, 51), (0, 1), (0, 1)), "int8")
    assert found[0] == found[1] == QuantParams(float(np.float32(0.2)), -128, "int8")
    assert found[2] == found[3] == QuantParams(1 / 256, -128, "int8")


@pytest.mark.parametrize("name", FIXED_OUTPUTS)
def test_a_fixed_output_does_not_depend_on_its_range(name: str) -> None:
    scale, zero_point = FIXED_OUTPUTS[name]
    for dtype, offset in (("int8", 0), ("uint8", 128)):
        found = tool.choose_params(chain(name), ranges((-9, 9), (0, 0.25)), dtype)
        assert found[1] == QuantParams(scale, zero_point + offset, dtype)


def test_a_group_whose_values_exceed_its_fixed_range_is_rejected() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("p", (1, 2)), Tensor("y", (1, 4))]
    operators = [Operator("LOGISTIC", (0,), (1,)), Operator("CONCATENATION", (0, 1), (2,))]
    with pytest.raises(
        InvalidArgument,
        match=r"'x' and 'p' and 'y' must have the same scale, .* 0 to 0\.996094, but their values reach from -3 to 4",
    ):
        tool.choose_params(graph(tensors, *operators), ranges((-3, 4), (0, 1), (-3, 4)), "int8")


def test_a_group_with_two_fixed_scales_is_rejected() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("p", (1, 2)), Tensor("q", (1, 2)), Tensor("y", (1, 4))]
    operators = [
        Operator("LOGISTIC", (0,), (1,)),
        Operator("TANH", (0,), (2,)),
        Operator("CONCATENATION", (1, 2), (3,)),
    ]
    with pytest.raises(InvalidArgument, match="'p' and 'q' have different fixed scales, but must have the same"):
        tool.choose_params(graph(tensors, *operators), ranges((0, 1), (0, 1), (0, 1), (0, 1)), "int8")


def convolution(*, bias: bool = True, **changes: Mapping[str, Any]) -> Graph:
    tensors = [
        Tensor("x", (1, 4, 4, 2)), Tensor("w", (3, 1, 1, 2), data=floats(3, 1, 1, 2)),
        Tensor("b", (3,), data=floats(3)), Tensor("y", (1, 4, 4, 3)),
    ]  # fmt: skip
    for index, tensor in enumerate(tensors):
        tensors[index] = Tensor(**{**vars(tensor), **changes.get(tensor.name, {})})
    return graph(tensors, Operator("CONV_2D", (0, 1, 2 if bias else OMITTED), (3,), "Conv2DOptions", CONV))


def quantized(
    model: Graph, dtype: str = "int8", per_channel: bool = True, **named_ranges: tuple[float, float]
) -> Graph:
    """Quantize with ranges by tensor name (default: -1 to 1), without unused tensors."""
    by_index = {n: Range(*named_ranges.get(t.name, (-1, 1))) for n, t in enumerate(model.tensors) if t.data is None}
    return tool.convert_graph(
        model, tool.choose_params(model, by_index, dtype), per_channel=per_channel
    ).graph.without_unused_tensors()


def by_name(model: Graph) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in model.tensors}


def test_a_convolution_gets_a_scale_for_each_output_channel() -> None:
    result = by_name(quantized(convolution(), x=(0, 255)))
    weights, bias = result["w"], result["b"]
    assert (weights.type, weights.dimension, list(weights.zero_points)) == ("INT8", 0, [0, 0, 0])
    assert list(weights.scales) == [float(np.float32(largest / 127)) for largest in (1, 3, 5)]
    assert (bias.type, list(bias.scales)) == ("INT32", list(weights.scales))  # the input's scale is 1
    assert bias.data == ints(*(round(value / scale) for value, scale in zip((0, 1, 2), weights.scales, strict=True)))


def test_a_depthwise_convolution_has_its_channels_in_the_last_dimension() -> None:
    tensors = [Tensor("x", (1, 4, 4, 2)), Tensor("w", (1, 3, 3, 2), data=floats(1, 3, 3, 2)), Tensor("y", (1, 4, 4, 2))]
    operator = Operator("DEPTHWISE_CONV_2D", (0, 1), (2,), "DepthwiseConv2DOptions", CONV)
    weights = by_name(quantized(graph(tensors, operator)))["w"]
    assert (weights.dimension, list(weights.scales)) == (3, [float(np.float32(16 / 127)), float(np.float32(17 / 127))])


@pytest.mark.parametrize(("dtype", "zero_point"), [("int8", 0), ("uint8", 128)])
def test_per_tensor_there_is_one_scale(dtype: str, zero_point: int) -> None:
    weights = by_name(quantized(convolution(), dtype, per_channel=False))["w"]
    assert (weights.type, list(weights.zero_points)) == (dtype.upper(), [zero_point])
    assert list(weights.scales) == [float(np.float32(5 / 127))]


def test_an_omitted_bias_stays_omitted() -> None:
    result = quantized(convolution(bias=False))
    assert result.operators[0].inputs == (0, 2, OMITTED)
    assert "b" not in by_name(result)


def test_operators_with_shared_weights_get_separate_biases() -> None:
    tensors = [
        Tensor("x", (1, 2)), Tensor("w", (2, 2), data=floats(2, 2)), Tensor("b", (2,), data=floats(2)),
        Tensor("h", (1, 2)), Tensor("y", (1, 2)),
    ]  # fmt: skip
    operators = [Operator("FULLY_CONNECTED", (0, 1, 2), (3,)), Operator("FULLY_CONNECTED", (3, 1, 2), (4,))]
    result = quantized(graph(tensors, *operators), x=(0, 255), h=(0, 510))
    first, second = (result.tensors[operator.inputs[2]].scales[0] for operator in result.operators)
    assert second == 2 * first


def test_a_constant_that_is_not_a_weight_is_quantized_with_its_own_range() -> None:
    tensors = [
        Tensor("x", (1, 4)),
        Tensor("c", (1, 4), data=np.float32([-255, 0, 1, 255]).tobytes()),
        Tensor("y", (1, 4)),
    ]
    result = by_name(quantized(graph(tensors, Operator("ADD", (0, 1), (2,), "AddOptions"))))["c"]
    assert (result.scales, result.zero_points) == ((2.0,), (-1,))  # -128 + 127.5, away from zero
    assert result.data == np.int8([-128, -1, 0, 127]).tobytes()


def test_integer_tensors_are_not_changed() -> None:
    paddings = Tensor("p", (2, 2), "INT32", ints(0, 0, 1, 1))
    model = graph([Tensor("x", (1, 4)), paddings, Tensor("y", (1, 6))], Operator("PAD", (0, 1), (2,)))
    assert by_name(quantized(model))["p"] == paddings


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (Operator("CONV_2D", (0, 1, 2), (3,), "Conv2DOptions", CONV), 3),
        (Operator("MAX_POOL_2D", (0,), (3,), "Pool2DOptions", POOL), 2),
        (Operator("RESHAPE", (0,), (3,)), 1),
        (Operator("MUL", (0, 0), (3,)), 2),
        (Operator("FULLY_CONNECTED", (0, 1, 2), (3,)), 4),
        (Operator("FULLY_CONNECTED", (0, 1, 2), (3,), "FullyConnectedOptions", {"KeepNumDims": True}), 5),
        (Operator("FULLY_CONNECTED", (0, 1), (3,)), 6),
    ],
)
def test_operators_have_the_first_version_that_supports_their_options(operator: Operator, expected: int) -> None:
    model = graph(convolution().tensors, operator)
    assert quantized(model).operators[0].version == expected
    assert quantized(model, "uint8", per_channel=False).operators[0].version == (expected if expected > 4 else 1)


def test_a_mul_with_a_rescaling_factor_above_one_has_a_later_version() -> None:
    model = graph([Tensor("x", (1, 4)), Tensor("y", (1, 4))], Operator("MUL", (0, 0), (1,)))
    assert quantized(model, x=(0, 255), y=(0, 1)).operators[0].version == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (chain("RELU", "COS"), r"operator 1 \(COS\) cannot be quantized; supported operators: ADD, AVERAGE_POOL_2D, "),
        (convolution(x={"type": "INT32"}), "the model's input, 'x', is INT32: only float32"),
        (convolution(y={"type": "FLOAT16"}), r"the result of operator 0 \(CONV_2D\), 'y', is FLOAT16: only float32"),
        (convolution(w={"data": None}), r"operator 0 \(CONV_2D\): 'w' is not a constant: weights and bias must be"),
        (convolution(b={"type": "FLOAT16"}), r"operator 0 \(CONV_2D\): 'b' is FLOAT16: weights and bias must be"),
    ],
)
def test_an_unsupported_operator_or_tensor_is_named(model: Graph, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tool.check_quantizable(model)
