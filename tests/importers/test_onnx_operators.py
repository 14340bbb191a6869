"""Every ONNX operator that the importer knows, in a file of its own: nnfmq's result is ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import OnnxCase, assert_close, expected, file_of, results
from support.onnx_forms import BY_REFERENCE, FORMS
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.importers.onnx.operators import CONVERTERS, quantized

RNG = np.random.default_rng(15)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Any:
    return RNG.uniform(low, high, shape).astype(np.float32)


def truths(*shape: int) -> Any:
    return RNG.integers(0, 2, shape).astype(bool)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def case(
    operator: str, *inputs: Any, constants: tuple[int, ...] = (), outputs: int = 1, opset: int = 17, **attributes: Any
) -> OnnxCase:
    return OnnxCase(operator, inputs, attributes, frozenset(constants), outputs, opset)


def small(kind: str, *values: int) -> Any:
    """Return integers of a NumPy type, such as "i1" for int8; those beyond its range wrap."""
    return np.array(values).astype(kind)


IMAGE = real(1, 4, 5, 6)


def resize(mode: str, **options: Any) -> OnnxCase:
    """Return a Resize of opset 19 with the roi, scales or sizes, and the attributes, in `options`."""
    roi, scales = (np.float32(options[name]) if name in options else None for name in ("roi", "scales"))
    sizes = np.int64(options["sizes"]) if "sizes" in options else None
    attributes = {name: value for name, value in options.items() if name not in ("roi", "scales", "sizes")}
    return case("Resize", IMAGE, roi, scales, sizes, constants=(1, 2, 3), opset=19, mode=mode, **attributes)


UNARY = ["Abs", "Exp", "Neg", "Relu", "Sigmoid", "Tanh", "Floor", "Ceil", "Round", "HardSwish", "HardSigmoid", "Elu",
         "LeakyRelu", "Identity", "Sin", "Softmax", "LogSoftmax", "Dropout", "Size", "Flatten"]  # fmt: skip
COMBINED = ("add", "mul", "max", "min")
REDUCTIONS = ["ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
              "ReduceSumSquare"]  # fmt: skip
EINSUMS = [
    ("bij, bjk -> bik", real(2, 3, 4), real(2, 4, 5)),
    ("i,j->ij", real(3), real(4)),
    ("ijk->ik", real(2, 3, 4)),
    ("bhid,bhjd->bhij", real(2, 3, 4, 5), real(2, 3, 6, 5)),
    ("ijk,jm->mik", real(2, 3, 4), real(3, 5)),
    ("ij,ij", real(2, 3), real(2, 3)),
]
CASES = [
    *(case(name, real(2, 3, 4)) for name in UNARY),
    *(case(name, real(2, 3, low=0.1)) for name in ("Log", "Sqrt", "Reciprocal")),
    case("Round", np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 7, -0.2])),
    *(case(name, real(2, 3, 4), real(3, 1)) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")),
    case("Add", real(2, 3), np.float32(3.0)),
    case("Mul", np.int64([[1, -2], [3, 4]]), np.int64([5, -6])),
    case("Pow", real(2, 3, low=0.1), real(3)),
    case("Pow", real(2, 3), np.float32(2.0), constants=(1,)),
    *(case(name, real(2, 3), real(3)) for name in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual")),
    case("Equal", ints(1, 2, 3), ints(1, 5, 3)),
    *(case(name, truths(2, 3), truths(3)) for name in ("And", "Or", "Xor")),
    case("Not", truths(2, 3)),
    case("Where", truths(3, 1), real(2, 1, 4), real(4)),
    case("Cast", real(2, 3), to=7),
    case("Cast", ints(-1, 0, 5), to=1),
    case("Cast", truths(2, 3), to=1),
    case("Cast", np.float32([0, 1, -0.5]), to=9),
    case("CastLike", real(2, 3), ints(1)),
    case("Clip", real(2, 3), np.float32(-0.5), np.float32(1.0), constants=(1, 2)),
    case("Clip", real(2, 3), np.float32(0.0), np.float32(6.0), constants=(1, 2)),
    case("Clip", real(2, 3), None, np.float32(1.0)),
    case("Clip", real(2, 3), min=-0.5, max=0.5, opset=8),
    case("PRelu", IMAGE, real(4, 1, 1), constants=(1,)),
    case("Softmax", real(2, 3, 4), axis=1),
    case("Softmax", real(2, 3, 4), axis=1, opset=11),
    case("MatMul", real(2, 3, 4), real(4, 5), constants=(1,)),
    case("MatMul", real(2, 3, 4), real(4, 5)),
    case("MatMul", real(2, 1, 3, 4), real(3, 4, 5)),
    case("MatMul", real(4), real(2, 4, 3)),
    case("MatMul", real(2, 3), real(3)),
    case("Gemm", real(2, 3), real(3, 4), real(4), constants=(1, 2), alpha=0.5, beta=2.0),
    case("Gemm", real(3, 2), real(4, 3), real(2, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
    case("Conv", IMAGE, real(3, 4, 3, 3), real(3), constants=(1, 2), pads=[1, 0, 1, 2], strides=[2, 1]),
    case("Conv", IMAGE, real(8, 1, 3, 3), constants=(1,), group=4, dilations=[1, 2], pads=[1, 2, 1, 2]),
    case("Conv", IMAGE, real(8, 1, 2, 3), constants=(1,), group=4, strides=[2, 2], auto_pad="SAME_LOWER"),
    case("Conv", IMAGE, real(6, 2, 2, 2), constants=(1,), group=2, auto_pad="SAME_UPPER", strides=[2, 2]),
    case("Conv", IMAGE, real(3, 4, 1, 1), constants=(1,), pads=[2, 1, 0, 3]),
    case("Conv", real(2, 3, 9), real(4, 3, 3), real(4), constants=(1,), pads=[1, 1], dilations=[2]),
    case("ConvTranspose", IMAGE, real(4, 3, 3, 3), real(3), constants=(1, 2), strides=[2, 2], pads=[1, 1, 1, 1]),
    case("ConvTranspose", IMAGE, real(4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("ConvTranspose", real(1, 2, 5), real(2, 3, 4), strides=[3]),
    case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    case("AveragePool", real(1, 2, 9), kernel_shape=[3], strides=[2]),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
    case("BatchNormalization", IMAGE, real(4), real(4), real(4), real(4, low=0.1), constants=(1, 2, 3, 4)),
    case("InstanceNormalization", IMAGE, real(4), real(4), constants=(1, 2)),
    case("LayerNormalization", real(2, 3, 4), real(4), real(4), constants=(1, 2)),
    case("LayerNormalization", real(2, 3, 4), real(3, 4), axis=1),
    case("LRN", real(1, 7, 2, 3), size=3, alpha=0.1, bias=2.0),
    case("Concat", real(2, 3), real(2, 1), axis=-1),
    case("Concat", truths(2, 3), truths(1, 3), axis=0),
    case("Split", real(2, 7), ints(3, 4), constants=(1,), axis=1, outputs=2),
    case("Split", real(2, 6), axis=1, outputs=3, opset=11),
    case("Split", real(2, 7), axis=1, outputs=2, opset=18, num_outputs=2),
    case("Slice", real(4, 5, 6), ints(1, -3), ints(3, 100), ints(0, 2), constants=(1, 2, 3)),
    case("Slice", real(4, 5), ints(-1, 3), ints(-100, 0), ints(0, 1), ints(-1, -2), constants=(1, 2, 3, 4)),
    case("Slice", truths(4, 5), ints(1), ints(3), ints(1), constants=(1, 2, 3)),
    case("Pad", real(2, 3), ints(0, 1, 2, 0), np.float32(1.5), constants=(1, 2)),
    case("Pad", real(4, 3), ints(1, 2, 2, 0), constants=(1,), mode="reflect"),
    case("Pad", real(2, 3), opset=9, pads=[1, 0, 0, 2], value=0.5),
    case("Reshape", real(2, 3, 4), ints(0, -1), constants=(1,)),
    case("Flatten", IMAGE, axis=2),
    case("Squeeze", real(1, 3, 1), ints(-1), constants=(1,)),
    case("Squeeze", real(1, 3, 1), axes=[0], opset=11),
    case("Unsqueeze", real(2, 3), ints(0, -1), constants=(1,)),
    case("Transpose", IMAGE, perm=[0, 2, 3, 1]),
    case("Transpose", truths(2, 3)),
    case("Gather", real(4, 3), np.int64([[0, -1], [2, 1]]), constants=(1,)),
    case("Gather", real(4, 3), np.int64([[0, -1], [2, 1]]), axis=1),
    case("Gather", real(4, 3), np.array(-2), constants=(1,)),
    case("Expand", real(3, 1), ints(2, 1, 4), constants=(1,)),
    case("Expand", truths(3, 1), ints(2, 1, 4), constants=(1,)),
    case("Tile", real(2, 3), ints(2, 3), constants=(1,)),
    *(case(name, real(2, 3, 4), axes=[0, -1], keepdims=0) for name in REDUCTIONS),
    case("ReduceLogSum", real(2, 3, low=0.1), axes=[1]),
    case("ReduceMean", real(2, 3, 4)),
    case("ReduceMean", real(2, 3), keepdims=0),
    case("ReduceMax", real(2, 3), ints(1), constants=(1,), opset=18),
    case("QuantizeLinear", real(2, 3), np.float32(0.01), np.uint8(100), constants=(1, 2)),
    case("QuantizeLinear", real(2, 3), np.float32(0.02), np.int8(-3), constants=(1, 2)),
    case("QuantizeLinear", real(2, 3, low=0.1), np.float32(0.02), constants=(1,)),
    case("Erf", np.float32([[-4, -1, -0.3, 0, 1e-3], [0.2, 0.5, 1, 2, 9]])),
    case("LSTM", real(5, 2, 3), real(1, 16, 3), real(1, 16, 4), constants=(1, 2), outputs=3, hidden_size=4),
    case("LSTM", real(5, 2, 3), real(2, 16, 3), real(2, 16, 4), real(2, 32), None, real(2, 2, 4), real(2, 2, 4),
         constants=(1, 2, 3), outputs=3, hidden_size=4, direction="bidirectional"),
    case("LSTM", real(5, 2, 3), real(1, 16, 3), real(1, 16, 4), real(1, 32), np.int32([5, 5]), real(1, 2, 4),
         real(1, 2, 4), real(1, 12), constants=(1, 2, 3, 4, 5, 6, 7), outputs=2, hidden_size=4, direction="reverse"),
    case("ReduceSum", real(2, 3, 4), ints(1), constants=(1,), keepdims=0),
    case("ReduceSum", real(2, 3, 4), axes=[2], opset=11),
    case("ReduceSum", real(2, 3, 4), ints(1), constants=(1,), noop_with_empty_axes=1),
    case("ArgMax", real(2, 3, 4), axis=1, keepdims=0),
    case("ArgMin", real(2, 3, 4), axis=-1),
    case("TopK", real(3, 7), ints(3), constants=(1,), outputs=2),
    case("TopK", real(7, 3), ints(2), constants=(1,), axis=0, largest=0, outputs=2),
    case("TopK", np.float32([[1, 1, 0, 1], [2, 3, 3, 2]]), ints(3), constants=(1,), outputs=2),
    case("ArgMax", np.float32([[1, 3, 3], [2, 2, 0]]), axis=1, select_last_index=1),
    *(case(name, small(kind, 7, -7, -128, 100), small(kind, 2, 2, 3, 5))
      for name in ("Add", "Sub", "Mul", "Div", "Less") for kind in ("i1", "i2", "i4", "i8")),
    *(case(name, small(kind, 7, 200, 255, 100), small(kind, 2, 3, 201, 100))
      for name in ("Add", "Mul", "Div", "Mod", "Greater") for kind in ("u1", "u2", "u4", "u8")),
    *(case("Sub", small(kind, 7, 200), small(kind, 9, 201)) for kind in ("u1", "u2")),
    case("Div", small("i1", -128), small("i1", -1)),
    *(case("Cast", np.int32([1, -100, 7, 1000]), to=number) for number in (2, 3, 4, 5)),
    case("Mod", small("i1", 7, -7, 5, -6), small("i1", 3, 3, -3, -4)),
    case("Mod", small("i2", 7, -7, 5, -6), small("i2", 3, 3, -3, -4), fmod=1),
    case("Mod", real(2, 3), real(3, low=0.5), fmod=1),
    *(case("BitShift", small(kind, 1, 200, 7), small(kind, 2, 1, 0), direction=direction)
      for kind in ("u1", "u4", "u8") for direction in ("LEFT", "RIGHT")),
    *(case(f"Bitwise{name}", small(kind, 1, -100, 7), small(kind, 3, 99, -1), opset=18)
      for name in ("And", "Or", "Xor") for kind in ("i1", "u2", "i4")),
    case("BitwiseNot", small("u2", 0, 200, 7), opset=18),
    case("CumSum", real(2, 3, 4), ints(1), constants=(1,), exclusive=1),
    case("CumSum", real(2, 3, 4), ints(-1), constants=(1,), reverse=1),
    *(resize(mode, scales=scales, coordinate_transformation_mode=coordinates)
      for mode in ("cubic", "linear") for scales in ([1, 1, 2, 1.5], [1, 1, 0.6, 0.7])
      for coordinates in ("half_pixel", "asymmetric", "half_pixel_symmetric")),
    resize("cubic", scales=[1, 1, 2, 2], cubic_coeff_a=-0.5, exclude_outside=1),
    resize("cubic", sizes=[1, 4, 9, 7], coordinate_transformation_mode="align_corners"),
    resize("linear", sizes=[1, 4, 1, 3], coordinate_transformation_mode="pytorch_half_pixel"),
    *(resize(mode, scales=[1, 1, 0.6, 0.5], antialias=1, exclude_outside=1) for mode in ("linear", "cubic")),
    resize("linear", roi=[0, 0, 0.1, 0.2, 1, 1, 0.7, 1.2], sizes=[1, 4, 4, 5], extrapolation_value=3.0,
           coordinate_transformation_mode="tf_crop_and_resize"),
    *(resize("nearest", sizes=[7, 9], axes=[2, 3], keep_aspect_ratio_policy=policy)
      for policy in ("not_larger", "not_smaller")),
    resize("linear", scales=[2.0, 1.5], axes=[3, 2]),
    *(case("DFT", real(2, 5, 6, parts), None, np.array(axis), constants=(2,), opset=20, **flags)
      for parts, axis, flags in ((1, 1, {}), (2, 2, {}), (2, 1, {"inverse": 1}), (1, 2, {"onesided": 1}))),
    case("DFT", real(2, 5, 1), np.array(8), constants=(1,), opset=17, axis=1),
    case("DFT", real(2, 5, 1), np.array(3), constants=(1,), opset=17, axis=1, onesided=1),
    case("LpPool", IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], p=3),
    case("LpPool", real(1, 2, 9), kernel_shape=[3], pads=[2, 1], opset=18, dilations=[2]),
    case("EyeLike", real(3, 4), k=1),
    case("EyeLike", real(3, 3), dtype=6, k=-1),
    case("Dropout", real(2, 3), outputs=2),
    *(case("QuantizeLinear", real(2, 3), np.float32([0.01, 0.02, 0.3]), np.array([1, 2, 3], kind), constants=(1, 2),
           axis=1, opset=21) for kind in (np.uint8, np.int8, np.uint16, np.int16)),
    case("QuantizeLinear", real(4, 6), real(2, 6, low=0.1), constants=(1,), axis=0, block_size=2, opset=21),
    *(case("DequantizeLinear", small(kind, 1, 100, 7), np.float32([0.01, 0.02, 0.3]), small(kind, 3, 5, 7),
           constants=(1, 2), axis=0, opset=21) for kind in ("u1", "i1", "u2", "i2")),
    case("GatherElements", real(3, 4), np.int64([[0, -1], [2, 1]]), axis=1),
    case("GatherElements", real(3, 4), np.int64([[0, -1], [2, 1]]), constants=(1,)),
    case("GatherND", real(3, 4, 2), np.int64([[0, -1], [2, 1]])),
    case("ScatterElements", real(3, 4), np.int64([[0, -1], [2, 1]]), real(2, 2), axis=1),
    *(case("ScatterElements", real(3, 4), np.int64([[0, 1], [0, 1]]), real(2, 2), reduction=name, opset=18)
      for name in COMBINED),
    case("Scatter", real(3, 4), np.int64([[0, 3], [2, 1]]), real(2, 2), opset=10, axis=1),
    case("ScatterND", real(3, 4), np.int64([[0, -1], [2, 1]]), real(2)),
    *(case("ScatterND", real(3, 4), np.int64([[0], [0]]), real(2, 4), reduction=name, opset=18)
      for name in COMBINED),
    case("OneHot", np.int64([[0, -1], [2, 5]]), np.int64([4]), np.float32([-1, 2]), constants=(1,), axis=1),
    case("ReverseSequence", real(4, 3), np.int64([1, 4, 3]), time_axis=0, batch_axis=1),
    case("Hardmax", real(3, 4), axis=0),
    case("Trilu", real(2, 3, 4)),
    case("Trilu", real(3, 4), np.array(-1), constants=(1,), upper=0),
    case("Trilu", truths(3, 4), np.array(1), constants=(1,)),
    case("Pad", real(2, 3), ints(0, 1, 2, 0), np.float32(1.5), constants=(1,)),
    case("LpNormalization", real(2, 3), p=1, axis=0),
    case("LpNormalization", np.float32([[3, 4], [0, 0]])),
    case("MeanVarianceNormalization", real(2, 3, 4, 4)),
    case("RMSNormalization", real(2, 3, 4), real(4), opset=23),
    case("BatchNormalization", IMAGE, real(4), real(4), real(4), real(4, low=0.1)),
    *(case(name, real(2, 3)) for name in ("Cos", "Cosh", "Sinh", "Tan", "Atan", "Asinh", "Sign", "Celu", "Selu")),
    *(case(name, real(2, 3), opset=20) for name in ("Gelu", "Mish", "Softplus")),
    case("Gelu", real(2, 3), opset=20, approximate="tanh"),
    *(case(name, np.float32([-0.9, -0.1, 0, 0.5, 1])) for name in ("Asin", "Acos")),
    case("Atanh", np.float32([-0.9, -0.1, 0, 0.5])),
    case("Acosh", np.float32([1, 1.5, 9])),
    case("IsNaN", np.float32([1, np.nan, -np.inf])),
    case("IsInf", np.float32([1, np.nan, -np.inf, np.inf])),
    case("IsInf", np.float32([1, np.nan, -np.inf, np.inf]), detect_positive=0),
    case("Mod", ints(7, -7, 5, -5), ints(3, 3, -3, -3)),
    *(case("Einsum", *arrays, equation=equation) for equation, *arrays in EINSUMS),
    case("GRU", real(5, 2, 3), real(1, 12, 3), real(1, 12, 4), constants=(1, 2), outputs=2, hidden_size=4),
    case("GRU", real(5, 2, 3), real(2, 12, 3), real(2, 12, 4), real(2, 24), None, real(2, 2, 4), constants=(1, 2, 3),
         outputs=2, hidden_size=4, direction="bidirectional", linear_before_reset=1),
    case("RNN", real(5, 2, 3), real(1, 4, 3), real(1, 4, 4), real(1, 8), constants=(1, 2, 3), outputs=2, hidden_size=4,
         direction="reverse", activations=["Relu"]),
    case("Shape", real(2, 3)),
    case("Constant", value_floats=[1.0, 2.0]),
    case("ConstantOfShape", ints(2, 3), constants=(0,)),
    case("Resize", IMAGE, None, np.float32([1, 1, 2, 3]), constants=(2,)),
    case("Resize", IMAGE, None, None, ints(1, 4, 7, 11), constants=(3,), coordinate_transformation_mode="asymmetric",
         nearest_mode="floor"),
    case("Resize", IMAGE, None, np.float32([1, 1, 2, 2]), constants=(2,), mode="linear"),
    case("Resize", IMAGE, None, None, ints(1, 4, 9, 13), constants=(3,), mode="linear",
         coordinate_transformation_mode="align_corners"),
    case("Upsample", IMAGE, np.float32([1, 1, 2, 2]), constants=(1,), opset=9),
    case("DepthToSpace", IMAGE, blocksize=2),
    case("DepthToSpace", real(1, 8, 2, 3), blocksize=2, mode="CRD"),
    case("SpaceToDepth", real(1, 2, 4, 6), blocksize=2),
]  # fmt: skip
_IN_FORMS = {case.operator for case in (*FORMS, *BY_REFERENCE)} - {case.operator for case in CASES}
THROUGH_A_DRIVER = ("Add", "Conv", "MatMul", "ReduceMean", "Where", "Gather", "Resize")
FIRST_OF_EACH = [next(case for case in CASES if case.operator == name) for name in THROUGH_A_DRIVER]


def test_every_operator_of_the_table_has_a_case() -> None:
    without_reference = {"CumProd"}  # in ONNX Runtime
    elsewhere = quantized.CONVERTERS.keys() | {"SimplifiedLayerNormalization"} | _IN_FORMS
    of_onnx = {name for name in CONVERTERS if "." not in name}  # those of other domains have tests of their own
    assert {case.operator for case in CASES} == of_onnx - elsewhere - without_reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_imported_operator_is_onnx_runtime_s(case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    assert_close(results(content, fed), expected(content, fed))


def test_a_driver_computes_what_onnx_runtime_computes() -> None:
    with nnfmq.connect(embedded=True) as client:
        for case in FIRST_OF_EACH:
            content, fed = case.content(), case.fed()
            with client.prepare(nnfmq.load(content)) as model:
                assert_close(model.execute(*fed.values()), expected(content, fed))


@pytest.mark.parametrize("axis", [0, -1])
def test_cumulative_products_may_be_exclusive_and_reversed(axis: int) -> None:
    x = real(3, 4)
    plain, both = (case("CumProd", x, ints(axis), constants=(1,), opset=26, exclusive=f, reverse=f) for f in (0, 1))
    last = np.ones_like(np.take(x, [0], axis))
    shifted = np.concatenate([np.delete(x, 0, axis), last], axis)
    wanted = np.flip(np.cumprod(np.flip(shifted, axis), axis), axis)
    assert_close(results(plain.content(), plain.fed()), [np.cumprod(x, axis)])
    assert_close(results(both.content(), both.fed()), [wanted])


def cast_and_back(name: str, values: Any) -> bytes:
    """Return the file of a model that casts floats to an element type and back."""
    to, back = onnx.TensorProto.DataType.Value(name), onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Cast", ["x"], ["t"], to=to), onnx.helper.make_node("Cast", ["t"], ["y"], to=back)]
    return file_of(nodes, {"x": values}, ["y"], opset=19)


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"])
def test_floats_are_rounded_to_a_narrower_type(name: str) -> None:
    values = np.concatenate([real(200), real(50) * 1e-2, real(50) * 1e-5, real(50) * 1e5, np.float32([0, 1.0625])])
    values = values.astype(np.float32)
    content = cast_and_back(name, values)
    np.testing.assert_array_equal(results(content, {"x": values})[0], expected(content, {"x": values})[0])
