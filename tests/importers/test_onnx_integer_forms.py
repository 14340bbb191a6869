"""Operators between dequantization and quantization become operations on integers, one step from ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import expected, file_of, results
from support.onnx_runtime import onnx

from nnfmq.importers import load

RNG = np.random.default_rng(11)
node = onnx.helper.make_node
SCALES = {"sx": np.float32(0.02), "sy": np.float32(0.05), "sw": np.float32(0.01), "sz": np.float32(0.03)}
ZEROS = {"uint8": (120, 131), "int8": (-3, 5)}


def integers(kind: str, *shape: int) -> Any:
    info = np.iinfo(kind)
    return RNG.integers(info.min, info.max, shape, kind, endpoint=True)


def bracketed(inner: list[Any]) -> list[Any]:
    """Return nodes that quantize x and dequantize it to xf before `inner`, and quantize and dequantize f after them."""
    before = [node("QuantizeLinear", ["x", "sx", "zx"], ["xq"]), node("DequantizeLinear", ["xq", "sx", "zx"], ["xf"])]
    after = [node("QuantizeLinear", ["f", "sy", "zy"], ["q"]), node("DequantizeLinear", ["q", "sy", "zy"], ["y"])]
    return [*before, *inner, *after]


def constants(kind: str, **more: Any) -> dict[str, Any]:
    zx, zy = (np.dtype(kind).type(zero) for zero in ZEROS[kind])
    return {**SCALES, "zx": zx, "zy": zy, **more}


def kinds(nodes: list[Any], fed: dict[str, Any], known: dict[str, Any], steps: int = 1) -> list[str]:
    """Return the operations of a model whose integers are within `steps` of those of ONNX Runtime."""
    content = file_of(nodes, fed, ["y"], known)
    (found,), (wanted,) = results(content, fed), expected(content, fed)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=(steps + 0.01) * float(known["sy"]))
    assert len(np.unique(wanted)) > 10  # not all are clamped
    first, *inner, last = (operation.type.name for operation in load(content).model.main.operations)
    assert (first, last) == (QUANTIZE, "DEQUANTIZE")
    return inner


def real(*shape: int) -> Any:
    return RNG.uniform(-2.5, 2.5, shape).astype(np.float32)


QUANTIZE = "nnfmq.tflite.QUANTIZE_LINEAR"
WEIGHTS = node("DequantizeLinear", ["w", "sw", "zw"], ["wf"])


@pytest.mark.parametrize("weight_kind", ["int8", "uint8"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ZEROS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_is_computed_from_integers(kind: str, zero: int, weight_kind: str, groups: int) -> None:
    zw = np.dtype(weight_kind).type(zero + (128 if weight_kind == "uint8" else 0))
    known = constants(
        kind,
        w=integers(weight_kind, 8, 4 // groups, 3, 3),
        zw=zw,
        b=RNG.integers(-900, 900, 8, np.int32),
        sb=np.float32(2e-4),
    )
    bias = node("DequantizeLinear", ["b", "sb"], ["bf"])
    conv = node("Conv", ["xf", "wf", "bf"], ["f"], group=groups, pads=[1, 0, 1, 1], strides=[2, 1])
    expected_code = {1: "CONV_2D", 2: "GROUPED_CONV_2D", 4: "DEPTHWISE_CONV_2D"}[groups]

    assert kinds(bracketed([WEIGHTS, bias, conv]), {"x": real(2, 4, 9, 8)}, known) == [expected_code]


@pytest.mark.parametrize("kind", ZEROS)
def test_weights_may_have_a_scale_for_each_output_channel(kind: str) -> None:
    known = constants(kind, w=integers("int8", 8, 4, 3, 3), zw=np.zeros(8, np.int8))
    known["sw"] = RNG.uniform(0.001, 0.02, 8).astype(np.float32)
    weights = node("DequantizeLinear", ["w", "sw", "zw"], ["wf"], axis=0)
    conv = node("Conv", ["xf", "wf"], ["f"])

    assert kinds(bracketed([weights, conv]), {"x": real(2, 4, 9, 8)}, known) == ["CONV_2D"]


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize(("operator", "attributes"), [("MatMul", {}), ("Gemm", {}), ("Gemm", {"transB": 1})])
@pytest.mark.parametrize("kind", ZEROS)
def test_a_product_is_computed_from_integers(
    kind: str, operator: str, attributes: dict[str, int], per_column: bool
) -> None:
    transposed, rank = "transB" in attributes, 3 if operator == "MatMul" else 2
    known = constants(
        kind, w=integers("int8", *((6, 20) if transposed else (20, 6))), c=np.float32([1, -1, 0.3, 0, 2, 5])
    )
    known["zw"] = np.zeros(6 if per_column else (), np.int8)
    known["sw"] = RNG.uniform(0.001, 0.02, 6).astype(np.float32) if per_column else SCALES["sw"]
    weights = node("DequantizeLinear", ["w", "sw", "zw"], ["wf"], axis=0 if transposed else 1)
    product = node(operator, ["xf", "wf", *(["c"] if operator == "Gemm" else [])], ["f"], **attributes)
    fed = {"x": real(*(2, 3, 20)[3 - rank :])}

    assert set(kinds(bracketed([weights, product]), fed, known)) == {"RESHAPE", "CONV_2D"}


@pytest.mark.parametrize(
    ("code", "movement"),
    [
        ("TRANSPOSE", node("Transpose", ["xf"], ["f"], perm=[0, 2, 3, 1])),
        ("RESHAPE", node("Flatten", ["xf"], ["f"])),
        ("MAX_POOL_2D", node("MaxPool", ["xf"], ["f"], kernel_shape=[2, 2])),
    ],
)
@pytest.mark.parametrize("kind", ZEROS)
def test_integers_are_moved_between_equal_scales(kind: str, code: str, movement: Any) -> None:
    known = constants(kind)
    known.update(sy=known["sx"], zy=known["zx"])

    assert kinds(bracketed([movement]), {"x": real(2, 4, 6, 6)}, known, steps=0) == [code]


@pytest.mark.parametrize("kind", ZEROS)
def test_a_relu_before_the_lowest_zero_point_is_the_clamp_of_the_result(kind: str) -> None:
    known = constants(kind, w=integers("int8", 8, 4, 3, 3), zw=np.int8(0))
    known["zy"] = np.dtype(kind).type(np.iinfo(kind).min)
    inner = [WEIGHTS, node("Conv", ["xf", "wf"], ["c"]), node("Relu", ["c"], ["f"])]

    assert kinds(bracketed(inner), {"x": real(2, 4, 9, 8)}, known) == ["CONV_2D"]


@pytest.mark.parametrize(
    ("kept", "inner", "changed"),
    [
        ("CONV_2D", [WEIGHTS, node("Conv", ["xf", "wf"], ["c"]), node("Relu", ["c"], ["f"])], {}),
        ("CONV_2D", [WEIGHTS, node("Conv", ["xf", "wf"], ["f"], pads=[3, 0, 3, 0])], {}),
        ("CONV_2D", [node("Conv", ["xf", "real"], ["f"])], {}),
        (
            "CONV_2D",
            [WEIGHTS, node("Conv", ["xf", "wf", "large"], ["f"])],
            {"sx": np.float32(1e-6), "sw": np.float32(1e-6)},
        ),
        ("TRANSPOSE", [node("Transpose", ["xf"], ["f"])], {}),
        ("CONV_2D", [WEIGHTS, node("Conv", ["xf", "wf"], ["f"])], {"zy": np.int8(3)}),
    ],
)
def test_what_integers_cannot_express_is_computed_in_float(
    kept: str, inner: list[Any], changed: dict[str, Any]
) -> None:
    weights = {"w": integers("int8", 8, 4, 3, 3), "zw": np.int8(0), "real": np.ones((8, 4, 3, 3), np.float32)}
    known = constants("uint8", **weights, large=np.linspace(-3000, 3000, 8, dtype=np.float32)) | changed
    fed = {"x": real(2, 4, 9, 8)}
    content = file_of(bracketed(inner), fed, ["y"], known)

    assert {"DEQUANTIZE", kept, QUANTIZE} <= {operation.type.name for operation in load(content).model.main.operations}
    assert results(content, {"x": real(2, 4, 9, 8)})
