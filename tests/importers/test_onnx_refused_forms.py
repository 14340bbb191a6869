"""ONNX nodes that the package `onnx` accepts, without a result or with one that is not supported: refused, with why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.hal.errors import UnsupportedModel

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

X = (2, 3)
IMAGE = (1, 4, 6, 6)
STEPS = (5, 2, 3)
CASES: dict[str, tuple[str, tuple[int, ...], list[Any], dict[str, Any], int, str]] = {
    # operator, shape of its input, constant inputs after that, attributes, number of outputs, reason
    "another size": ("Reshape", X, [[7]], {}, 1, r"6 elements do not fit the shape \(7,\)"),
    "another number of parts": ("Split", X, [], {"num_outputs": 3, "axis": 1}, 2, "num_outputs is 3, and there are 2"),
    "no mode of padding": ("Pad", X, [[0, 1, 0, 1]], {"mode": "zeros"}, 1, "mode 'zeros' is not supported"),
    "no mode of depth": ("DepthToSpace", IMAGE, [], {"blocksize": 2, "mode": "XYZ"}, 1, "mode 'XYZ' is unknown"),
    "blocks that do not fit": ("SpaceToDepth", IMAGE, [], {"blocksize": 4}, 1, "blocks of 4 do not fit"),
    "another norm": ("LpNormalization", X, [], {"p": 3}, 1, "p is 3: it must be 1 or 2"),
    "an even size": ("LRN", IMAGE, [], {"size": 2}, 1, "a size of 2 is not supported: it must be odd"),
    "a vector": ("InstanceNormalization", X, [np.ones(3, np.float32)] * 2, {}, 1, "rank 2; it needs 3"),
    "indices of the maxima": ("MaxPool", IMAGE, [], {"kernel_shape": [2, 2]}, 2, "output of indices is not"),
    "no window": ("AveragePool", IMAGE, [], {}, 1, "kernel_shape"),
    "an approximation": ("Gelu", X, [], {"approximate": "erf"}, 1, "the approximation 'erf' is not supported"),
    "no index": ("Gather", X, [np.array([3])], {"axis": 1}, 1, "an index is outside the dimensions"),
    "another policy": (
        "Resize", IMAGE, [np.zeros(0, np.float32), np.zeros(0, np.float32), [1, 4, 3, 3]],
        {"keep_aspect_ratio_policy": "wide", "mode": "linear"}, 1, "keep_aspect_ratio_policy 'wide' is unknown",
    ),
    "no coordinates": (
        "Resize", IMAGE, [np.zeros(0, np.float32), np.zeros(0, np.float32), [1, 4, 3, 3]],
        {"coordinate_transformation_mode": "mine", "mode": "linear"}, 1, "coordinate_transformation_mode 'mine'",
    ),
    "no direction": (
        "LSTM", STEPS, [np.ones((1, 16, 3), np.float32), np.ones((1, 16, 4), np.float32)],
        {"hidden_size": 4, "direction": "both"}, 1, "direction 'both' is not supported",
    ),
    "groups that do not fit": (
        "Conv", IMAGE, [np.ones((4, 2, 3, 3), np.float32)], {"group": 3}, 1, "in 3 groups do not fit",
    ),
    "no padding": (
        "Conv", IMAGE, [np.ones((4, 4, 3, 3), np.float32)], {"auto_pad": "ALL"}, 1, "auto_pad 'ALL' is unknown",
    ),
}  # fmt: skip


def file_of(
    operator: str, shape: tuple[int, ...], constants: list[Any], attributes: dict[str, Any], outputs: int
) -> bytes:
    """Return a model of one node, whose first input is the model's."""
    helper, names = onnx.helper, [f"y{i}" for i in range(outputs)]
    arrays = [np.asarray(value, None if isinstance(value, np.ndarray) else np.int64) for value in constants]
    initializers = [onnx.numpy_helper.from_array(array, f"c{i}") for i, array in enumerate(arrays)]
    node = helper.make_node(operator, ["x", *(each.name for each in initializers)], names, **attributes)
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    graph = helper.make_graph([node], "one", [given], results, initializers)
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_node_that_does_not_fit_its_input_is_refused_with_the_reason(name: str) -> None:
    *parts, reason = CASES[name]
    with pytest.raises(UnsupportedModel, match=reason):
        nnfmq.load(file_of(*parts))


def test_an_input_whose_elements_are_not_supported_is_named() -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    inputs = [helper.make_tensor_value_info("words", kinds.STRING, [2])]
    outputs = [helper.make_tensor_value_info("out", kinds.STRING, [2])]
    graph = helper.make_graph([helper.make_node("StringNormalizer", ["words"], ["out"])], "graph", inputs, outputs)
    with pytest.raises(UnsupportedModel) as caught:
        nnfmq.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    assert [(problem.types, problem.reason) for problem in caught.value.problems] == [
        ("", "input 'words': tensors of string are not supported"),
        ("string → 1 output", "is not supported"),
    ]
