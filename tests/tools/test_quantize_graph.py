"""What the quantizer makes of a model's tensors: which share a quantization, which is fixed, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import quantize_graph as tool
from quant_params import Affine, Range
from support.tflite_files import CONV, POOL, floats, ints
from tflite_reader import OMITTED, Graph
from tflite_writer import Operator, Tensor

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.operations import REGISTRY

SHARING = [name for name, rule in tool.RULES.items() if rule.shares]
FIXED = {"SOFTMAX": (1 / 256, -128), "LOGISTIC": (1 / 256, -128), "TANH": (1 / 128, 0)}  # TFLite's specification
HAL_NAMES = {"RELU_N1_TO_1": "RELU1"}


def graph(tensors: Sequence[Tensor], *operators: Operator) -> Graph:
    """Return a model whose first tensor is its input and whose last is its output."""
    return Graph(tuple(tensors), operators, (0,), (len(tensors) - 1,))


def chain(*names: str) -> Graph:
    """Return a model of operators with one input, one behind the other; tensor n is the result of the nth."""
    tensors = [Tensor(f"t{n}", (1, 4)) for n in range(len(names) + 1)]
    return graph(tensors, *(Operator(name, (n,), (n + 1,)) for n, name in enumerate(names)))


def ranges(*pairs: tuple[float, float]) -> dict[int, Range]:
    return {index: Range(*pair) for index, pair in enumerate(pairs)}


@pytest.mark.parametrize("name", SHARING)
def test_what_shares_has_one_quantization_for_the_union_of_its_ranges(name: str) -> None:
    found = tool.parameters(chain(name), ranges((-256, 0), (0, 254)), "int8")
    assert found == dict.fromkeys((0, 1), Affine(2.0, 0, "int8"))


@pytest.mark.parametrize("name", tool.RULES)
def test_the_operators_that_share_are_those_of_which_the_hal_demands_it(name: str) -> None:
    declaration = REGISTRY[OperationType[HAL_NAMES.get(name, name)]]
    demanded = declaration.same_quantization or name == "CONCATENATION"  # there it is TFLite that demands it
    assert tool.RULES[name].shares == demanded


def test_all_inputs_of_a_concatenation_share_with_its_result() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("a", (1, 2)), Tensor("b", (1, 2)), Tensor("y", (1, 6))]
    operators = [
        Operator("ADD", (0, 0), (1,)),
        Operator("MUL", (0, 0), (2,)),
        Operator("CONCATENATION", (0, 1, 2), (3,)),
    ]
    found = tool.parameters(graph(tensors, *operators), ranges((0, 1), (0, 2), (-1, 0), (0, 0)), "uint8")
    assert len(set(found.values())) == 1
    assert found[0] == Affine(float(np.float32(3 / 255)), 85, "uint8")


def test_sharing_reaches_through_several_operators_but_not_through_others() -> None:
    found = tool.parameters(chain("RESHAPE", "LOGISTIC", "PAD"), ranges((0, 51), (0, 51), (0, 1), (0, 1)), "int8")
    assert found[0] == found[1] == Affine(float(np.float32(0.2)), -128, "int8")
    assert found[2] == found[3] == Affine(1 / 256, -128, "int8")


@pytest.mark.parametrize("name", FIXED)
def test_an_output_that_the_specification_fixes_does_not_depend_on_its_range(name: str) -> None:
    scale, zero_point = FIXED[name]
    for dtype, offset in (("int8", 0), ("uint8", 128)):
        found = tool.parameters(chain(name), ranges((-9, 9), (0, 0.25)), dtype)
        assert found[1] == Affine(scale, zero_point + offset, dtype)


def test_a_fixed_quantization_that_another_tensor_does_not_fit_is_refused() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("p", (1, 2)), Tensor("y", (1, 4))]
    operators = [Operator("LOGISTIC", (0,), (1,)), Operator("CONCATENATION", (0, 1), (2,))]
    with pytest.raises(
        InvalidArgument, match=r"'x' and 'p' and 'y' must share .* 0 to 0\.996094, but reach from -3 to 4"
    ):
        tool.parameters(graph(tensors, *operators), ranges((-3, 4), (0, 1), (-3, 4)), "int8")


def test_two_fixed_quantizations_for_one_group_are_refused() -> None:
    tensors = [Tensor("x", (1, 2)), Tensor("p", (1, 2)), Tensor("q", (1, 2)), Tensor("y", (1, 4))]
    operators = [
        Operator("LOGISTIC", (0,), (1,)),
        Operator("TANH", (0,), (2,)),
        Operator("CONCATENATION", (1, 2), (3,)),
    ]
    with pytest.raises(InvalidArgument, match="'p' and 'q' have fixed quantizations, but must share one"):
        tool.parameters(graph(tensors, *operators), ranges((0, 1), (0, 1), (0, 1), (0, 1)), "int8")


def convolution(*, bias: bool = True, **changes: Mapping[str, Any]) -> Graph:
    tensors = [
        Tensor("x", (1, 4, 4, 2)), Tensor("w", (3, 1, 1, 2), data=floats(3, 1, 1, 2)),
        Tensor("b", (3,), data=floats(3)), Tensor("y", (1, 4, 4, 3)),
    ]  # fmt: skip
    for index, tensor in enumerate(tensors):
        tensors[index] = Tensor(**{**vars(tensor), **changes.get(tensor.name, {})})
    return graph(tensors, Operator("CONV_2D", (0, 1, 2 if bias else OMITTED), (3,), "Conv2DOptions", CONV))


def quantized(model: Graph, dtype: str = "int8", per_channel: bool = True, **spans: tuple[float, float]) -> Graph:
    """Quantize with ranges by name, -1 to 1 where none is given, and drop what is no longer used."""
    known = {n: Range(*spans.get(t.name, (-1, 1))) for n, t in enumerate(model.tensors) if t.data is None}
    return tool.quantized(model, tool.parameters(model, known, dtype), per_channel=per_channel).graph.compacted()


def by_name(model: Graph) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in model.tensors}


def test_a_convolution_gets_a_scale_for_each_output_channel() -> None:
    made = by_name(quantized(convolution(), x=(0, 255)))
    weights, bias = made["w"], made["b"]
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
    made = quantized(convolution(bias=False))
    assert made.operators[0].inputs == (0, 2, OMITTED)
    assert "b" not in by_name(made)


def test_operators_with_the_same_weights_get_biases_of_their_own() -> None:
    tensors = [
        Tensor("x", (1, 2)), Tensor("w", (2, 2), data=floats(2, 2)), Tensor("b", (2,), data=floats(2)),
        Tensor("h", (1, 2)), Tensor("y", (1, 2)),
    ]  # fmt: skip
    operators = [Operator("FULLY_CONNECTED", (0, 1, 2), (3,)), Operator("FULLY_CONNECTED", (3, 1, 2), (4,))]
    made = quantized(graph(tensors, *operators), x=(0, 255), h=(0, 510))
    first, second = (made.tensors[operator.inputs[2]].scales[0] for operator in made.operators)
    assert second == 2 * first


def test_a_constant_that_is_no_weight_is_quantized_by_its_own_range() -> None:
    tensors = [
        Tensor("x", (1, 4)),
        Tensor("c", (1, 4), data=np.float32([-255, 0, 1, 255]).tobytes()),
        Tensor("y", (1, 4)),
    ]
    made = by_name(quantized(graph(tensors, Operator("ADD", (0, 1), (2,), "AddOptions"))))["c"]
    assert (made.scales, made.zero_points) == ((2.0,), (-1,))  # -128 + 127.5, away from zero
    assert made.data == np.int8([-128, -1, 0, 127]).tobytes()


def test_integers_stay_as_they_are() -> None:
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
def test_operators_have_the_versions_that_brought_what_they_use(operator: Operator, expected: int) -> None:
    model = graph(convolution().tensors, operator)
    assert quantized(model).operators[0].version == expected
    assert quantized(model, "uint8", per_channel=False).operators[0].version == (expected if expected > 4 else 1)


def test_a_product_that_has_to_grow_is_of_a_later_version() -> None:
    model = graph([Tensor("x", (1, 4)), Tensor("y", (1, 4))], Operator("MUL", (0, 0), (1,)))
    assert quantized(model, x=(0, 255), y=(0, 1)).operators[0].version == 3


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (chain("RELU", "COS"), r"operator 1 \(COS\) cannot be quantized; what can: ADD, AVERAGE_POOL_2D, "),
        (convolution(x={"type": "INT32"}), "the model's input, 'x', is INT32: only float32"),
        (convolution(y={"type": "FLOAT16"}), r"the result of operator 0 \(CONV_2D\), 'y', is FLOAT16: only float32"),
        (convolution(w={"data": None}), r"operator 0 \(CONV_2D\): 'w' is no constant: float32 constants"),
        (convolution(b={"type": "FLOAT16"}), r"operator 0 \(CONV_2D\): 'b' is FLOAT16: float32 constants"),
    ],
)
def test_what_cannot_be_quantized_is_named(model: Graph, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        tool.check(model)
