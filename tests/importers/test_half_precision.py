"""Chains of float16 arithmetic in ONNX files are computed in float32, and rounded where something else reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.onnx_files import expected, file_of, results
from support.onnx_runtime import onnx
from support.oracles import Array

import nnfmq

HALF = onnx.TensorProto.FLOAT16


def node(operator: str, names: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operator, names.split(), [output], **attributes)


def halves(*numbers: float) -> Array:
    return np.array(numbers, np.float16)


def operations(content: bytes) -> list[str]:
    return [operation.type.name for operation in nnfmq.load(content).model.main.operations]


X = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float16)
X[0, 5], X[1, 7] = 2000, -30000
NORMALIZATION = [
    node("ReduceMean", "x", "mean", axes=[-1]), node("Sub", "x mean", "centered"),
    node("Pow", "centered two", "square"), node("ReduceMean", "square", "variance", axes=[-1]),
    node("Add", "variance epsilon", "shifted"), node("Sqrt", "shifted", "deviation"),
    node("Div", "centered deviation", "normal"), node("Mul", "normal scale", "scaled"), node("Add", "scaled bias", "y"),
]  # fmt: skip
CONSTANTS = {"two": halves(2), "epsilon": halves(1e-5), "scale": np.full(512, 2, np.float16), "bias": halves(1)}


def test_a_normalization_in_parts_does_not_overflow_at_an_outlier() -> None:
    content = file_of(NORMALIZATION, {"x": X}, ["y"], CONSTANTS)
    wide = X.astype(float)
    centered = wide - wide.mean(axis=1, keepdims=True)
    real = 2 * centered / np.sqrt(np.square(centered).mean(axis=1, keepdims=True) + 1e-5) + 1
    (found,) = results(content, {"x": X})
    assert operations(content).count("CAST") == 2 and found.dtype == np.float16
    np.testing.assert_allclose(found.astype(float), real, rtol=1e-3)
    np.testing.assert_allclose(found.astype(float), expected(content, {"x": X})[0].astype(float), rtol=1e-3)


def test_a_result_that_is_an_output_is_rounded_and_others_go_on_with_what_it_was() -> None:
    nodes = [node("Mul", "x x", "square"), node("Sqrt", "square", "y")]
    square, root = results(file_of(nodes, {"x": halves(300, 3)}, ["square", "y"]), {"x": halves(300, 3)})
    assert square.tolist() == [np.inf, 9] and root.tolist() == [300, 3]


def test_what_a_model_says_is_rounded_stays_so() -> None:
    nodes = [
        node("Mul", "x x", "square"), node("Cast", "square", "single", to=onnx.TensorProto.FLOAT),
        node("Sqrt", "single", "y"),
    ]  # fmt: skip
    (root,) = results(file_of(nodes, {"x": halves(300, 3)}, ["y"]), {"x": halves(300, 3)})
    assert root.tolist() == [np.inf, 3]


def test_numbers_that_are_equal_after_rounding_are_compared_after_it() -> None:
    nodes = [node("Add", "x x", "double"), node("Sub", "double third", "rest"), node("Equal", "rest limit", "y")]
    constants = {"third": halves(1 / 3), "limit": halves(float(np.float16(2) - np.float16(1 / 3)))}
    (same,) = results(file_of(nodes, {"x": halves(1)}, ["y"], constants), {"x": halves(1)})
    assert bool(same[0])


def test_elements_are_moved_between_arithmetic_in_float32_and_elsewhere_in_float16() -> None:
    nodes = [
        node("Transpose", "x", "turned"), node("Mul", "turned turned", "square"),
        node("Transpose", "square", "back"), node("Sqrt", "back", "root"), node("Transpose", "root", "y"),
    ]  # fmt: skip
    content, x = file_of(nodes, {"x": X}, ["y"]), {"x": X}
    assert operations(content) == ["TRANSPOSE", "CAST", "MUL", "TRANSPOSE", "SQRT", "CAST", "TRANSPOSE"]
    np.testing.assert_array_equal(results(content, x)[0], np.abs(X).T)


def test_an_operation_alone_stays_one_of_float16() -> None:
    assert operations(file_of([node("Exp", "x", "y")], {"x": X}, ["y"])) == ["EXP"]
