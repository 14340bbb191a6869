"""Each operator's NNAPI form, and what is rejected, on models of one operator."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from support.tflite_files import CONV, POOL, Operator, Tensor, floats, ints, single, writer

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType
from nnfmq.importers import load
from nnfmq.validation import validate_model

F32 = OperandType.TENSOR_FLOAT32
I32 = OperandType.TENSOR_INT32
IMAGE = (1, 4, 4, 2)


def value(model: Model, operand: Operand) -> object:
    """Return a constant's value: a number, or a tuple of numbers; other operands by their lifetime."""
    if operand.lifetime != LifeTime.CONSTANT_COPY:
        return operand.lifetime.name
    begin = operand.location.offset
    data = model.operand_values[begin : begin + operand.location.length]
    form = {OperandType.BOOL: "?", OperandType.INT32: "i", OperandType.FLOAT32: "f", F32: "f", I32: "i"}[operand.type]
    numbers = struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data)
    return numbers if operand.dimensions else numbers[0]


def translated(data: bytes) -> tuple[Op, list[object]]:
    """Return the only operation of a model and the values of its inputs."""
    model = load(data).model
    (operation,) = model.main.operations
    return operation.type, [value(model, model.main.operands[index]) for index in operation.inputs]


def image(**extra: Any) -> Any:
    return Tensor("x", IMAGE, **extra)


WEIGHTS = (1.0, 2.0, 3.0, 4.0)
W = Tensor("w", (2, 1, 1, 2), data=struct.pack("<4f", *WEIGHTS))
DW = Tensor("w", (1, 1, 1, 4), data=struct.pack("<4f", *WEIGHTS))
B = Tensor("b", (2,), data=struct.pack("<2f", 5, 6))
B4 = Tensor("b", (4,), data=struct.pack("<4f", 5, 6, 7, 8))
X = "SUBGRAPH_INPUT"
HALF = Tensor("y", (1, 2, 2, 2))
VECTOR = Tensor("x", (1, 2))
FW = Tensor("w", (2, 2), data=struct.pack("<4f", *WEIGHTS))

# SAME is 1 and VALID 2, activations are NONE 0, RELU 1, RELU1 2, RELU6 3 in the HAL; SAME is 0, VALID 1 in TFLite.
FORMS: list[tuple[str, bytes, Op, list[object]]] = [
    ("conv", single("CONV_2D", [image(), W, B, HALF], "Conv2DOptions",
        {"Padding": 1, "StrideW": 2, "StrideH": 3, "FusedActivationFunction": 3}),
        Op.CONV_2D, [X, WEIGHTS, (5.0, 6.0), 2, 2, 3, 3]),
    ("conv with dilation", single("CONV_2D", [image(), W, B, image()], "Conv2DOptions",
        CONV | {"DilationWFactor": 4, "DilationHFactor": 5}),
        Op.CONV_2D, [X, WEIGHTS, (5.0, 6.0), 1, 1, 1, 0, False, 4, 5]),
    ("conv without bias", single("CONV_2D", [image(), W, image()], "Conv2DOptions", CONV),
        Op.CONV_2D, [X, WEIGHTS, (0.0, 0.0), 1, 1, 1, 0]),
    ("depthwise", single("DEPTHWISE_CONV_2D", [image(), DW, B4, Tensor("y", (1, 4, 4, 4))], "DepthwiseConv2DOptions",
        CONV | {"DepthMultiplier": 9, "FusedActivationFunction": 1}),
        Op.DEPTHWISE_CONV_2D, [X, WEIGHTS, (5.0, 6.0, 7.0, 8.0), 1, 1, 1, 2, 1]),
    ("depthwise with dilation", single("DEPTHWISE_CONV_2D", [image(), DW, B4, Tensor("y", (1, 4, 4, 4))],
        "DepthwiseConv2DOptions", CONV | {"DilationWFactor": 2, "DilationHFactor": 1}),
        Op.DEPTHWISE_CONV_2D, [X, WEIGHTS, (5.0, 6.0, 7.0, 8.0), 1, 1, 1, 2, 0, False, 2, 1]),
    ("fully connected", single("FULLY_CONNECTED", [VECTOR, FW, B, VECTOR], "FullyConnectedOptions",
        {"FusedActivationFunction": 2}),
        Op.FULLY_CONNECTED, [X, WEIGHTS, (5.0, 6.0), 2]),
    ("fully connected without options", single("FULLY_CONNECTED", [VECTOR, FW, VECTOR]),
        Op.FULLY_CONNECTED, [X, WEIGHTS, (0.0, 0.0), 0]),
    ("average pool", single("AVERAGE_POOL_2D", [image(), Tensor("y", (1, 2, 4, 2))], "Pool2DOptions",
        {"Padding": 0, "StrideW": 1, "StrideH": 2, "FilterWidth": 3, "FilterHeight": 4}),
        Op.AVERAGE_POOL_2D, [X, 1, 1, 2, 3, 4, 0]),
    ("max pool", single("MAX_POOL_2D", [image(), HALF], "Pool2DOptions", POOL | {"FusedActivationFunction": 1}),
        Op.MAX_POOL_2D, [X, 2, 2, 2, 2, 2, 1]),
    ("softmax", single("SOFTMAX", [VECTOR, VECTOR], "SoftmaxOptions", {"Beta": 0.5}), Op.SOFTMAX, [X, 0.5]),
    ("logistic", single("LOGISTIC", [VECTOR, VECTOR]), Op.LOGISTIC, [X]),
    ("relu", single("RELU", [VECTOR, VECTOR]), Op.RELU, [X]),
    ("relu1", single("RELU_N1_TO_1", [VECTOR, VECTOR]), Op.RELU1, [X]),
    ("relu6", single("RELU6", [VECTOR, VECTOR]), Op.RELU6, [X]),
    ("add", single("ADD", [VECTOR, B, VECTOR], "AddOptions", {"FusedActivationFunction": 1}),
        Op.ADD, [X, (5.0, 6.0), 1]),
    ("mul", single("MUL", [VECTOR, B, VECTOR]), Op.MUL, [X, (5.0, 6.0), 0]),
    ("mul by a number", single("MUL", [VECTOR, Tensor("two", (), data=struct.pack("<f", 2)), VECTOR]),
        Op.MUL, [X, (2.0,), 0]),
    ("concatenation", single("CONCATENATION", [VECTOR, FW, FW, Tensor("y", (5, 2))], "ConcatenationOptions",
        {"Axis": -2}),
        Op.CONCATENATION, [X, WEIGHTS, WEIGHTS, 0]),
    ("mean", single("MEAN", [image(), Tensor("axes", (2,), "INT32", ints(1, 2)), VECTOR]), Op.MEAN, [X, (1, 2), 0]),
    ("mean that keeps dimensions", single("MEAN",
        [image(), Tensor("axis", (), "INT32", ints(-1)), Tensor("y", (1, 4, 4, 1))],
        "ReducerOptions", {"KeepDims": True}),
        Op.MEAN, [X, (-1,), 1]),
    ("pad", single("PAD", [VECTOR, Tensor("p", (2, 2), "INT32", ints(0, 0, 1, 2)), Tensor("y", (1, 5))], "PadOptions"),
        Op.PAD, [X, (0, 0, 1, 2)]),
    ("squeeze", single("SQUEEZE", [Tensor("x", (1, 2, 1)), Tensor("y", (2,))], "SqueezeOptions",
        {"SqueezeDims": [0, -1]}),
        Op.SQUEEZE, [X, (0, 2)]),
    ("squeeze of all", single("SQUEEZE", [Tensor("x", (1, 2, 1)), Tensor("y", (2,))]), Op.SQUEEZE, [X, "NO_VALUE"]),
    ("reshape by a tensor", single("RESHAPE", [VECTOR, Tensor("s", (1,), "INT32", ints(-1)), Tensor("y", (2,))],
        "ReshapeOptions", {"NewShape": [7]}),
        Op.RESHAPE, [X, (-1,)]),
    ("reshape by its option", single("RESHAPE", [VECTOR, Tensor("y", (2, 1))], "ReshapeOptions", {"NewShape": [2, -1]}),
        Op.RESHAPE, [X, (2, -1)]),
    ("reshape by its output", single("RESHAPE", [VECTOR, Tensor("y", (2,))]), Op.RESHAPE, [X, (2,)]),
    ("quantize", single("QUANTIZE", [VECTOR, Tensor("y", (1, 2), "UINT8", scales=[0.5], zero_points=[9])]),
        Op.QUANTIZE, [X]),
    ("dequantize", single("DEQUANTIZE", [Tensor("x", (1, 2), "INT8", scales=[0.5], zero_points=[9]), VECTOR]),
        Op.DEQUANTIZE, [X]),
]  # fmt: skip


@pytest.mark.parametrize(("data", "operation", "inputs"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_an_operator_gets_its_nnapi_overload(data: bytes, operation: Op, inputs: list[object]) -> None:
    assert translated(data) == (operation, inputs)


@pytest.mark.parametrize("data", [f[1] for f in FORMS], ids=[f[0] for f in FORMS])
def test_a_translated_operator_is_a_valid_model(data: bytes) -> None:
    assert 1 <= validate_model(load(data).model) <= 4


def test_a_half_precision_softmax_gets_a_half_precision_beta() -> None:
    half = Tensor("x", (1, 2), "FLOAT16")
    model = load(single("SOFTMAX", [half, half], "SoftmaxOptions", {"Beta": 1.0})).model
    beta = model.main.operands[model.main.operations[0].inputs[1]]
    begin = beta.location.offset
    assert (beta.type, model.operand_values[begin : begin + 2]) == (OperandType.FLOAT16, struct.pack("<e", 1.0))


def test_a_fully_connected_that_keeps_dimensions_is_reshaped_afterwards() -> None:
    tensors = [Tensor("x", (2, 3, 2)), FW, Tensor("y", (2, 3, 2))]
    model = load(single("FULLY_CONNECTED", tensors, "FullyConnectedOptions", {"KeepNumDims": True})).model
    product, reshape = model.main.operations
    flat, shape = (model.main.operands[index] for index in reshape.inputs)
    assert (product.type, reshape.type) == (Op.FULLY_CONNECTED, Op.RESHAPE)
    assert (product.outputs[0], flat.dimensions, value(model, shape)) == (reshape.inputs[0], (6, 2), (2, 3, 2))


def quantized_conv(bias_scale: float, *scales: float, input_scale: float = 0.5) -> bytes:
    tensors = [
        image(type="INT8", scales=[input_scale], zero_points=[3]),
        Tensor("w", (2, 1, 1, 2), "INT8", bytes(4), scales=scales, zero_points=[0] * len(scales)),
        Tensor("b", (2,), "INT32", ints(1, 2), scales=[bias_scale], zero_points=[0]),
        image(type="INT8", scales=[0.75], zero_points=[-1]),
    ]
    return single("CONV_2D", tensors, "Conv2DOptions", CONV)


def test_a_quantized_bias_gets_the_product_of_the_scales_in_float32() -> None:
    model = load(quantized_conv(0.1, 0.2, input_scale=0.5)).model
    bias = model.main.operands[model.main.operations[0].inputs[2]]
    fifth = struct.unpack("<f", struct.pack("<f", 0.2))[0]
    assert (bias.type, bias.scale, bias.zero_point) == (I32, fifth / 2, 0)


def test_the_bias_of_a_filter_quantized_per_channel_has_no_scale() -> None:
    model = load(quantized_conv(0.1, 0.25, 0.5)).model
    weights, bias = (model.main.operands[index] for index in model.main.operations[0].inputs[1:3])
    assert weights.type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    assert weights.channel_quant is not None
    assert (weights.channel_quant.scales, weights.channel_quant.channel_dim) == ((0.25, 0.5), 0)
    assert (weights.scale, weights.zero_point, bias.type, bias.scale) == (0.0, 0, I32, 0.0)


def test_a_missing_quantized_bias_becomes_int32_zeros_with_the_product_scale() -> None:
    x = image(type="UINT8", scales=[0.5], zero_points=[128])
    w = Tensor("w", (2, 1, 1, 2), "UINT8", bytes(4), scales=[0.25], zero_points=[7])
    model = load(single("CONV_2D", [x, w, x], "Conv2DOptions", CONV)).model
    bias = model.main.operands[model.main.operations[0].inputs[2]]
    assert (bias.type, bias.dimensions, bias.scale, value(model, bias)) == (I32, (2,), 0.125, (0, 0))


def test_one_bias_of_two_convolutions_has_a_scale_for_each_and_one_value() -> None:
    def quantized(scale: float) -> Any:
        return Tensor("w", (2, 1, 1, 2), "UINT8", bytes(4), scales=[scale], zero_points=[0])

    x = image(type="UINT8", scales=[1.0], zero_points=[0])
    bias = Tensor("b", (2,), "INT32", ints(1, 2))
    operators = [Operator("CONV_2D", (0, w, 3), (3 + w,), "Conv2DOptions", CONV) for w in (1, 2)]
    data = writer.write([x, quantized(0.5), quantized(0.25), bias, x, x], operators, (0,), (4, 5))
    model = load(data).model
    first, second = (model.main.operands[operation.inputs[2]] for operation in model.main.operations)
    assert (first.scale, second.scale) == (0.5, 0.25)
    assert first.location == second.location


def test_constants_are_aligned_as_the_hal_asks() -> None:
    odd = Tensor("w", (1, 3), "UINT8", bytes(3), scales=[0.5], zero_points=[0])
    x = Tensor("x", (1, 3), "UINT8", scales=[0.5], zero_points=[0])
    operators = [Operator("MUL", (0, 1), (2,)), Operator("ADD", (2, 3), (4,), "AddOptions")]
    model = load(writer.write([x, odd, x, odd, x], operators, (0,), (4,))).model
    starts = {(o.location.length, o.location.offset % 4) for o in model.main.operands if o.location.length}
    assert {length for length, _ in starts} == {3, 4}
    assert all(rest % (2 if length == 3 else 4) == 0 for length, rest in starts)


VARIABLE = Tensor("v", (1, 2), extra={"IsVariable": 1})


def strided(options: dict[str, int], rank: int = 2, value: int = 1) -> bytes:
    """Return a STRIDED_SLICE of a matrix."""
    vectors = [Tensor(name, (rank,), "INT32", ints(*[value] * rank)) for name in ("begin", "end", "strides")]
    return single("STRIDED_SLICE", [VECTOR, *vectors, VECTOR], "StridedSliceOptions", options)


PER_CHANNEL = {"scales": [0.5, 0.5], "zero_points": [0, 0]}
BYTES = {"scales": [0.5], "zero_points": [0]}
REJECTED: list[tuple[str, bytes, str]] = [
    ("an unknown operator", single("SKIP_GRAM", [VECTOR, VECTOR]), r"operator 0 \(SKIP_GRAM\): is not supported"),
    ("a custom operator", single("My_op", [VECTOR, VECTOR]), r"operator 0 \(CUSTOM 'My_op'\): is not supported"),
    ("a tensor type", single("RELU", [Tensor("x", (2,), "FLOAT64"), VECTOR]), r"tensor 0 \('x'\): tensor type FLOAT64"),
    ("bytes without scale", single("RELU", [Tensor("x", (2,), "INT8"), VECTOR]), r"INT8 without a quantization"),
    ("a scale of zero", single("RELU", [Tensor("x", (2,), "UINT8", scales=[0.0]), VECTOR]), r"not a positive number"),
    ("a zero point out of range", single("RELU", [Tensor("x", (2,), "INT8", scales=[1.0], zero_points=[128]), VECTOR]),
        r"zero points \[128\]: one in -128..127"),
    ("an activation", single("ADD", [VECTOR, B, VECTOR], "AddOptions", {"FusedActivationFunction": 4}),
        r"operator 0 \(ADD\): fused activation 4"),
    ("an activation of a concatenation", single("CONCATENATION", [VECTOR, VECTOR], "ConcatenationOptions",
        {"FusedActivationFunction": 1}), r"CONCATENATION\): a fused activation"),
    ("a padding", single("MAX_POOL_2D", [image(), image()], "Pool2DOptions", POOL | {"Padding": 2}), r"padding 2"),
    ("a stride of zero", single("MAX_POOL_2D", [image(), image()], "Pool2DOptions", POOL | {"StrideH": 0}),
        r"stride_h is 0"),
    ("missing options", single("MAX_POOL_2D", [image(), image()]), r"has no Pool2DOptions"),
    ("options of another operator", single("MAX_POOL_2D", [image(), image()], "SoftmaxOptions"),
        r"has SoftmaxOptions instead of Pool2DOptions"),
    ("too many inputs", single("RELU", [VECTOR, VECTOR, VECTOR]), r"2 inputs: 1 are allowed"),
    ("an omitted input", writer.write([VECTOR, VECTOR], [Operator("RELU", (-1,), (1,))], (0,), (1,)),
        r"tensor index -1"),
    ("two outputs", writer.write([VECTOR, VECTOR, VECTOR], [Operator("RELU", (0,), (1, 2))], (0,), (1,)),
        r"2 outputs: 1 are allowed"),
    ("a tensor read before it is written", single("MUL", [VECTOR, Tensor("late", (1, 2)), VECTOR]),
        r"MUL\): tensor 1 \('late'\) is read before it is written"),
    ("a constant that is written", writer.write([VECTOR, B], [Operator("RELU", (0,), (1,))], (0,), (1,)),
        r"tensor 1 \('b'\) cannot be written"),
    ("an input that is a constant", writer.write([B, VECTOR], [Operator("RELU", (0,), (1,))], (0,), (1,)),
        r"tensor 0 \('b'\) cannot be a model input"),
    ("an input listed twice", writer.write([VECTOR, VECTOR], [Operator("RELU", (0,), (1,))], (0, 0), (1,)),
        r"cannot be a model input"),
    ("an output that nobody writes", writer.write([VECTOR] * 3, [Operator("RELU", (0,), (1,))], (0,), (2,)),
        r"tensor 2 \('x'\) cannot be a model output"),
    ("no outputs", writer.write([VECTOR] * 2, [Operator("RELU", (0,), (1,))], (0,), ()), "the model has no outputs"),
    ("no subgraph", single("RELU", [VECTOR, VECTOR], more=None), r"0 subgraphs"),
    ("a variable as an input", single("RELU", [Tensor("x", (2,), extra={"IsVariable": 1}), VECTOR]),
        r"tensor 0 \('x'\) cannot be a model input"),
    ("a variable that is no state", single("MUL", [VECTOR, Tensor("v", (2,), extra={"IsVariable": 1}), VECTOR]),
        r"tensor 1 \('v'\) is a variable tensor: only the state"),
    ("a variable that is written", writer.write([VECTOR, Tensor("v", (1, 2), extra={"IsVariable": 1})],
        [Operator("RELU", (0,), (1,))], (0,), (1,)), r"tensor 1 \('v'\) cannot be written"),
    ("a variable with a value", single("MUL", [VECTOR, Tensor("v", (2,), data=bytes(8), extra={"IsVariable": 1}),
        VECTOR]), r"a variable tensor with an initial value"),
    ("a rank of nine", single("RELU", [Tensor("x", (1,) * 9), VECTOR]), r"rank 9"),
    ("a negative extent", single("RELU", [Tensor("x", (-1, 2)), VECTOR]), r"shape \[-1, 2\] has a negative extent"),
    ("more than 32 bits", single("RELU", [Tensor("x", (0, 1 << 16, 1 << 15)), VECTOR]), r"more than 4294967295 bytes"),
    ("a buffer of another size", single("MUL", [VECTOR, Tensor("w", (2,), data=bytes(7)), VECTOR]),
        r"tensor 1 \('w'\): shape \[2\] of TENSOR_FLOAT32 is 8 bytes, its buffer has 7"),
    ("uneven groups", single("CONV_2D", [Tensor("x", (1, 4, 4, 3)), W, image()], "Conv2DOptions", CONV), r"no groups"),
    ("groups of uneven size", single("CONV_2D", [Tensor("x", (1, 4, 4, 6)), W, image()], "Conv2DOptions", CONV),
        r"no groups"),
    ("groups with dilation", single("CONV_2D", [Tensor("x", (1, 4, 4, 4)), W, image()], "Conv2DOptions",
        CONV | {"DilationWFactor": 2}), r"grouped convolution with dilation"),
    ("an uneven depth multiplier", single("DEPTHWISE_CONV_2D", [Tensor("x", (1, 4, 4, 3)), DW, image()],
        "DepthwiseConv2DOptions", CONV), r"no multiple of the input's 3"),
    ("a filter of rank two", single("CONV_2D", [image(), FW, image()], "Conv2DOptions", CONV), r"rank 2: it must be 4"),
    ("float inputs with quantized weights that come in", single("FULLY_CONNECTED", [VECTOR, Tensor("w", (2, 2), "INT8",
        **BYTES), VECTOR]), r"TENSOR_FLOAT32 but tensor 1 \('w'\) is TENSOR_QUANT8_ASYMM_SIGNED"),
    ("shuffled weights", single("FULLY_CONNECTED", [VECTOR, FW, VECTOR], "FullyConnectedOptions",
        {"WeightsFormat": 1}), r"weights format 1"),
    ("a bias of another scale", quantized_conv(0.2, 0.25), r"scale 0.2, input times filter make 0.125"),
    ("a scale that vanishes", quantized_conv(0.2, 1e-30, input_scale=1e-30), r"that is no float32 scale"),
    ("a scale without end", quantized_conv(0.2, 1e30, input_scale=1e30), r"that is no float32 scale"),
    ("per channel of an activation", single("RELU", [Tensor("x", (2,), "INT8", **PER_CHANNEL), VECTOR]),
        r"only constants may be quantized per channel"),
    ("per channel of the wrong count", single("RELU", [Tensor("x", (3,), "INT8", **PER_CHANNEL), VECTOR]),
        r"2 scales for dimension 0 of shape \[3\]"),
    ("INT4 of another size", single("FULLY_CONNECTED",
        [VECTOR, Tensor("w", (1, 2), "INT4", bytes(2), [0.5], [0]), VECTOR]),
        r"2 elements of INT4 need a constant of 1 bytes"),
    ("an input of INT4", single("RELU", [Tensor("x", (2,), "INT4", scales=[0.5], zero_points=[0]), VECTOR]),
        r"2 elements of INT4 need a constant"),
    ("per channel of unsigned bytes", single("RELU", [Tensor("x", (2,), "UINT8", **PER_CHANNEL), VECTOR]),
        r"INT8 and INT4 only, not for UINT8"),
    ("a softmax without slope", single("SOFTMAX", [VECTOR, VECTOR], "SoftmaxOptions", {"Beta": 0.0}), r"beta is 0.0"),
    ("an axis out of range", single("CONCATENATION", [VECTOR, VECTOR], "ConcatenationOptions", {"Axis": 2}),
        r"axis 2 is not in -2..1"),
    ("a squeeze out of range", single("SQUEEZE", [VECTOR, VECTOR], "SqueezeOptions", {"SqueezeDims": [5]}),
        r"dimensions \[5\] are not all in -2..1"),
    ("a shape that is not INT32", single("RESHAPE", [VECTOR, B, VECTOR]), r"a shape must be INT32"),
    ("an axis that the model computes", single("ARG_MAX", [VECTOR, Tensor("axis", (1,), "INT32"), Tensor("y", (1,),
        "INT32")]), r"tensor 1 \('axis'\) must be a constant of type INT32 or INT64"),
    ("an axis of two elements", single("ARG_MAX", [VECTOR, Tensor("a", (2,), "INT32", ints(0, 1)), VECTOR]),
        r"2 elements: one is required"),
    ("an endless argument", single("ARG_MAX", [VECTOR, Tensor("a", (99,), "INT32", bytes(396)), VECTOR]),
        r"99 elements: at most 16"),
    ("two ellipses", strided({"EllipsisMask": 3}, 2), r"0 slices and 2 ellipses"),
    ("a slice without elements", strided({"Offset": 1}), r"a slice without elements"),
    ("an end beyond 32 bits", strided({"ShrinkAxisMask": 1}, value=2**31 - 1), r"2147483648 does not fit 32 bits"),
    ("more begins than dimensions", strided({}, 3), r"begin, end and strides of 3, 3 and 3 for rank 2"),
    ("batch dimensions", single("GATHER", [VECTOR, Tensor("i", (1,), "INT32", ints(0)), VECTOR], "GatherOptions",
        {"BatchDims": 1}), r"1 batch dimensions before axis 0"),
    ("a condition of another shape", single("SELECT", [Tensor("c", (2,), "BOOL"), FW, FW, Tensor("y", (2, 2))]),
        r"NNAPI's SELECT has one shape"),
    ("a repetition that does not fit", single("BROADCAST_TO", [VECTOR, Tensor("s", (2,), "INT32", ints(3, 3)),
        Tensor("y", (3, 3))]), r"of shape \[1, 2\] cannot be repeated to \[3, 3\]"),
    ("a slope without end", single("LEAKY_RELU", [VECTOR, VECTOR], "LeakyReluOptions", {"Alpha": float("inf")}),
        r"slope is inf"),
    ("a scalar of many elements", single("PADV2", [VECTOR, Tensor("p", (2, 2), "INT32", ints(0, 0, 0, 1)), B, VECTOR]),
        r"tensor 2 \('b'\) must be a constant of one element"),
    ("a size of three", single("RESIZE_BILINEAR", [image(), Tensor("s", (3,), "INT32", ints(1, 2, 3)), image()],
        "ResizeBilinearOptions"), r"a size of 3 elements"),
    ("sizes that do not go with the outputs", single("SPLIT_V", [VECTOR, Tensor("s", (1,), "INT32", ints(2)),
        Tensor("a", (1,), "INT32", ints(5)), VECTOR], "SplitVOptions"), r"axis 5 is not in -2..1"),
    ("a basic LSTM", single("LSTM", [VECTOR] * 21, "LSTMOptions", {"KernelType": 1}), r"the basic kernel"),
    ("an LSTM of bytes", single("LSTM", [Tensor("x", (1, 2), "UINT8", **BYTES)] * 21, "LSTMOptions"),
        r"only recurrent operators of floats and INT8"),
    ("an LSTM of codes", single("LSTM", [Tensor("x", (1, 2), "INT8", **BYTES)] * 21, "LSTMOptions"),
        r"0 intermediate tensors: 5 are needed"),
    ("an RNN whose state is no variable", single("RNN", [VECTOR, FW, FW, B, VECTOR, VECTOR], "RNNOptions"),
        r"tensor 4 \('x'\) is not a variable tensor"),
    ("a sign bit as activation", single("RNN", [VECTOR, FW, FW, B, VARIABLE, VECTOR], "RNNOptions",
        {"FusedActivationFunction": 5}), r"activation 5 is not supported"),
    ("diagonal recurrent weights", single("UNIDIRECTIONAL_SEQUENCE_LSTM", [VECTOR] * 21,
        "UnidirectionalSequenceLSTMOptions", {"DiagonalRecurrentTensors": 1}), r"diagonal recurrent weights"),
    ("an unknown projection", single("LSH_PROJECTION", [VECTOR, FW, VECTOR], "LSHProjectionOptions", {"Type": 0}),
        r"projection type 0"),
    ("crops of a vector", single("BATCH_TO_SPACE_ND", [VECTOR, Tensor("b", (1,), "INT32", ints(2)), Tensor("c", (2,),
        "INT32", ints(0, 1)), VECTOR]), r"only images can be cropped"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), [r[1:] for r in REJECTED], ids=[r[0] for r in REJECTED])
def test_unsupported_features_are_rejected_by_name(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(data)


def test_an_unused_tensor_of_an_unsupported_type_does_no_harm() -> None:
    unused = Tensor("unused", (1,), "COMPLEX64")
    data = writer.write([VECTOR, VECTOR, unused], [Operator("RELU", (0,), (1,))], (0,), (1,))
    assert len(load(data).model.main.operands) == 2


def test_inputs_and_outputs_are_described_in_the_models_order() -> None:
    tensors = [
        Tensor("a", (1, 2), "UINT8", scales=[0.5], zero_points=[7]), Tensor("b", (2,)), Tensor("c", (1, 2)),
        Tensor("d", (2,)),
    ]  # fmt: skip
    operators = [Operator("DEQUANTIZE", (0,), (2,)), Operator("RELU", (1,), (3,))]
    loaded = load(writer.write(tensors, operators, (1, 0), (3, 2)))
    described = [(t.name, t.shape, t.dtype, t.scale, t.zero_point) for t in (*loaded.inputs, *loaded.outputs)]
    assert described == [
        ("b", (2,), "float32", 0.0, 0), ("a", (1, 2), "uint8", 0.5, 7),
        ("d", (2,), "float32", 0.0, 0), ("c", (1, 2), "float32", 0.0, 0),
    ]  # fmt: skip


def test_float_constants_keep_every_byte() -> None:
    data = floats(64)
    model = load(single("MUL", [Tensor("x", (64,)), Tensor("w", (64,), data=data), Tensor("y", (64,))])).model
    weights = model.main.operands[model.main.operations[0].inputs[1]].location
    assert model.operand_values[weights.offset : weights.offset + weights.length] == data
