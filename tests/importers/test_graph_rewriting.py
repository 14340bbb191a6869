"""What follows a convolution or product becomes part of it when an ONNX file is loaded; results stay ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import assert_close, expected, file_of, results
from support.onnx_runtime import onnx

from nnfmq.importers import load

RNG = np.random.default_rng(6)
node = onnx.helper.make_node
IMAGE = {"x": RNG.uniform(0.1, 1, (2, 4, 5, 5)).astype(np.float32)}
PIXELS = {"x": RNG.uniform(-1, 1, (2, 4, 5)).astype(np.float32)}
ROWS = {"x": RNG.uniform(-1, 1, (2, 3, 4)).astype(np.float32)}
CHANNELS = 6


def real(*shape: int) -> Any:
    return RNG.uniform(0.5, 1.5, shape).astype(np.float32)


NORMALIZATION = {name: real(CHANNELS) for name in ("scale", "shift", "mean", "variance")}
CONSTANTS = {
    **NORMALIZATION,
    "w": real(CHANNELS, 4, 3, 3),
    "row filter": real(CHANNELS, 4, 3),
    "depthwise": real(4, 1, 3, 3),
    "grouped": real(CHANNELS, 2, 3, 3),
    "transposed": real(4, CHANNELS, 3, 3),
    "matrix": real(4, CHANNELS),
    "bias": real(CHANNELS),
    "of channels": real(CHANNELS, 1, 1),
    "of 4 channels": real(4, 1, 1),
    "of rows": real(CHANNELS, 1),
    "of columns": real(3),
    "one": real(1),
    "three": np.float32([3]),
    "six": np.float32([6]),
    "sixth": np.float32([1 / 6]),
    "zero": np.float32([0]),
    "huge": np.full((CHANNELS, 1, 1), 3e38, np.float32),
    "low": np.float32(0),
    "high": np.float32(6),
}
CONV = node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1])
FACTOR, OFFSET = node("Mul", ["c", "of channels"], ["d"]), node("Add", ["of channels", "d"], ["y"])


def kinds(nodes: list[Any], fed: dict[str, Any], outputs: tuple[str, ...] = ("y",)) -> list[str]:
    """Return the operations of a model whose results are those of ONNX Runtime."""
    content = file_of(nodes, fed, outputs, CONSTANTS)
    assert_close(results(content, fed), expected(content, fed))
    return [operation.type.name for operation in load(content).model.main.operations]


@pytest.mark.parametrize(
    ("code", "nodes", "fed"),
    [
        ("CONV_2D", [CONV, node("BatchNormalization", ["c", *NORMALIZATION], ["y"])], IMAGE),
        ("CONV_2D", [CONV, FACTOR, OFFSET], IMAGE),
        ("CONV_2D", [CONV, node("Sub", ["c", "of channels"], ["d"]), node("Div", ["d", "one"], ["y"])], IMAGE),
        ("CONV_2D", [CONV, node("Relu", ["c"], ["y"])], IMAGE),
        ("CONV_2D", [CONV, FACTOR, node("Clip", ["d", "low", "high"], ["y"])], IMAGE),
        (
            "DEPTHWISE_CONV_2D",
            [node("Conv", ["x", "depthwise"], ["c"], group=4), node("Mul", ["c", "of 4 channels"], ["y"])],
            IMAGE,
        ),
        (
            "GROUPED_CONV_2D",
            [node("Conv", ["x", "grouped", "bias"], ["c"], group=2), node("Mul", ["c", "of channels"], ["y"])],
            IMAGE,
        ),
        (
            "TRANSPOSE_CONV_2D",
            [node("ConvTranspose", ["x", "transposed", "bias"], ["c"]), node("Mul", ["c", "of channels"], ["y"])],
            IMAGE,
        ),
    ],
)
def test_factors_offsets_and_activations_become_part_of_a_convolution(
    code: str, nodes: list[Any], fed: dict[str, Any]
) -> None:
    assert kinds(nodes, fed) == [code]


def test_they_become_part_of_a_convolution_of_rows_through_its_reshapes() -> None:
    nodes = [node("Conv", ["x", "row filter"], ["c"]), node("Mul", ["c", "of rows"], ["d"]), node("Relu", ["d"], ["y"])]

    assert kinds(nodes, PIXELS) == ["RESHAPE", "CONV_2D", "RESHAPE"]


def test_they_become_part_of_a_product_through_its_reshapes() -> None:
    nodes = [node("MatMul", ["x", "matrix"], ["c"]), node("Add", ["bias", "c"], ["d"]), node("Relu", ["d"], ["y"])]

    assert kinds(nodes, ROWS) == ["RESHAPE", "FULLY_CONNECTED", "RESHAPE"]


@pytest.mark.parametrize(
    ("kept", "nodes", "outputs"),
    [
        ("MUL", [CONV, node("Mul", ["c", "c"], ["y"])], ("y",)),
        ("MUL", [CONV, node("Mul", ["c", "x wide"], ["y"])], ("y",)),
        ("MUL", [CONV, node("Mul", ["c", "of columns"], ["y"])], ("y",)),
        ("MUL", [CONV, node("Mul", ["c", "of channels"], ["y"])], ("y", "c")),
        ("SUB", [CONV, node("Sub", ["of channels", "c"], ["y"])], ("y",)),
        ("DIV", [CONV, node("Div", ["of channels", "c"], ["y"])], ("y",)),
        ("RELU", [CONV, node("Relu", ["c"], ["y"])], ("y", "c")),
    ],
)
def test_what_is_no_constant_of_each_channel_or_has_another_reader_stays(
    kept: str, nodes: list[Any], outputs: tuple[str, ...]
) -> None:
    fed = {**IMAGE, "x wide": RNG.uniform(1, 2, (2, CHANNELS, 5, 5)).astype(np.float32)}
    fed = fed if "x wide" in nodes[1].input else IMAGE
    constants = {**CONSTANTS, "of columns": real(5)}
    content = file_of(nodes, fed, outputs, constants)

    assert_close(results(content, fed), expected(content, fed))
    assert [operation.type.name for operation in load(content).model.main.operations] == ["CONV_2D", kept]


def test_nothing_follows_an_activation_into_the_weights() -> None:
    assert kinds([CONV, node("Relu", ["c"], ["r"]), node("Add", ["r", "of channels"], ["y"])], IMAGE) == [
        "CONV_2D",
        "ADD",
    ]


def test_a_division_by_zero_and_factors_beyond_float32_stay() -> None:
    small = {"x": IMAGE["x"] * np.float32(1e-30)}
    assert kinds([CONV, node("Mul", ["c", "huge"], ["y"])], small) == ["CONV_2D", "MUL"]
    assert kinds([CONV, node("Div", ["c", "zero"], ["d"]), node("Clip", ["d", "low", "high"], ["y"])], IMAGE) == [
        "CONV_2D",
        "DIV",
        "RELU6",
    ]


def test_weights_of_two_convolutions_are_scaled_for_each() -> None:
    second = node("Conv", ["x", "w"], ["e"], pads=[1, 1, 1, 1])
    nodes = [CONV, second, node("Mul", ["c", "of channels"], ["f"]), node("Add", ["f", "e"], ["y"])]

    assert kinds(nodes, IMAGE) == ["CONV_2D", "CONV_2D", "ADD"]


def test_weights_that_were_replaced_are_not_in_the_model() -> None:
    plain, folded = (file_of(nodes, IMAGE, ["y"], CONSTANTS) for nodes in (
        [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        [CONV, FACTOR, OFFSET],
    ))  # fmt: skip

    sizes = [len(load(content).model.operand_values) for content in (plain, folded)]
    assert abs(sizes[1] - sizes[0]) < 4  # of padding: the order is another one


# -- hard swish --------------------------------------------------------------------------------------------------------

SHIFTED, GATE = node("Add", ["x", "three"], ["a"]), node("Clip", ["a", "low", "high"], ["g"])


@pytest.mark.parametrize(
    "nodes",
    [
        [SHIFTED, GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["m", "six"], ["y"])],
        [SHIFTED, GATE, node("Mul", ["g", "x"], ["m"]), node("Mul", ["sixth", "m"], ["y"])],
        [node("Add", ["three", "x"], ["a"]), GATE, node("Mul", ["x", "g"], ["m"]), node("Mul", ["m", "sixth"], ["y"])],
    ],
)
def test_a_hard_swish_of_several_operations_becomes_one(nodes: list[Any]) -> None:
    fed = {"x": np.linspace(-5, 5, 40, dtype=np.float32)}

    assert kinds(nodes, fed) == ["HARD_SWISH"]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ([SHIFTED, GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["six", "m"], ["y"])], ("y",)),
        ([SHIFTED, GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["m", "three"], ["y"])], ("y",)),
        ([SHIFTED, GATE, node("Mul", ["a", "g"], ["m"]), node("Div", ["m", "six"], ["y"])], ("y",)),
        ([SHIFTED, GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["m", "six"], ["y"])], ("y", "g")),
        ([SHIFTED, GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["m", "six"], ["y"])], ("y", "m")),
        (
            [node("Add", ["x", "six"], ["a"]), GATE, node("Mul", ["x", "g"], ["m"]), node("Div", ["m", "six"], ["y"])],
            ("y",),
        ),
    ],
)
def test_similar_operations_stay(nodes: list[Any], outputs: tuple[str, ...]) -> None:
    fed = {"x": np.linspace(0.5, 5, 40, dtype=np.float32)}

    assert len(kinds(nodes, fed, outputs)) == 4
