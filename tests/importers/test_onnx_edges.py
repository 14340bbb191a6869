"""ONNX nodes at the edges of their definitions: ONNX Runtime's results, for inputs and for constants alike."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.onnx_files import OnnxCase, expected, results
from support.onnx_runtime import onnx

import nnfmq

F32 = np.float32


def with_constants(content: bytes, fed: dict[str, Any]) -> bytes:
    """Return the model with its inputs as constants, and its output multiplied by a new input."""
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    for name, array in fed.items():
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph.node.append(onnx.helper.make_node("Mul", [graph.output[0].name, "one"], ["found"]))
    del graph.input[:], graph.output[:]
    graph.input.append(onnx.helper.make_tensor_value_info("one", 1, [1]))
    graph.output.append(onnx.helper.make_empty_tensor_value_info("found"))
    return bytes(model.SerializeToString())


def assert_right(case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    (wanted,) = expected(content, fed)
    for found in (results(content, fed), results(with_constants(content, fed), {"one": np.ones(1, F32)})):
        np.testing.assert_allclose(found[0], wanted, 2e-5, 1e-7)
        assert found[0].shape == wanted.shape


STARTS, ENDS = (-9, -4, -3, -2, -1, 0, 1, 2, 3, 5), (-(2**31), -9, -4, -3, -1, 0, 1, 2, 3, 5)


@pytest.mark.parametrize("step", [1, 2, -1, -2, 7, -7])
def test_a_slice_clamps_its_starts_and_ends(step: int) -> None:
    """Starts before the first element, with a negative step, are that element; Python takes nothing then."""
    x = np.arange(12, dtype=F32).reshape(3, 4)
    for start, end in itertools.product(STARTS, ENDS):
        case = OnnxCase("Slice", [x, *(np.array([n]) for n in (start, end, 1, step))], {}, frozenset({1, 2, 3, 4}))
        (wanted,) = expected(case.content(), case.fed())
        if wanted.size:
            assert_right(case)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, -0.5, -2.0])
def test_celu_is_defined_for_any_slope(alpha: float) -> None:
    assert_right(OnnxCase("Celu", [np.array([-3, -0.5, -1e-4, 0, 1e-4, 2, 5], F32)], {"alpha": alpha}))


@pytest.mark.parametrize(
    ("sizes", "block", "attributes"),
    [
        ((5, 5), (2, 2), {}),
        ((5, 4), (2, 3), {"strides": [2, 1]}),
        ((5, 5), (2, 2), {"dilations": [2, 1], "pads": [1, 0, 0, 2]}),
        ((4, 4, 5), (2, 1, 3), {}),
    ],
)
def test_col2im_keeps_an_infinite_element_from_pixels_of_other_blocks(
    sizes: tuple[int, ...], block: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    rank = len(sizes)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    pads = attributes.get("pads", [0] * 2 * rank)
    counts = [
        (sizes[a] + pads[a] + pads[rank + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1 for a in range(rank)
    ]
    x = np.random.default_rng(3).standard_normal((2, 3 * int(np.prod(block)), int(np.prod(counts)))).astype(F32)
    x[0, 0, 0], x[1, -1, -1] = np.nan, np.inf
    shapes = [np.array(sizes), np.array(block)]
    assert_right(OnnxCase("Col2Im", [x, *shapes], attributes, frozenset({1, 2}), opset=18))


@pytest.mark.parametrize(("x", "is_sorted"), [([3, 1, 2], 0), ([3, np.nan, np.nan], 1)])
def test_unique_elements_in_another_order_or_with_nan_are_refused(x: list[float], is_sorted: int) -> None:
    case = OnnxCase("Unique", [np.array(x, F32)], {"sorted": is_sorted}, frozenset({0}))
    with pytest.raises(nnfmq.UnsupportedModel, match="sorted elements without NaN"):
        nnfmq.load(with_constants(case.content(), {}))


def with_function_and_branch() -> bytes:
    """Return a model with names of every kind, each of which begins with "NAME"."""
    h, types = onnx.helper, onnx.TensorProto
    inner = h.make_node("Abs", ["NAMEin"], ["NAMEout"], "NAMEinner")
    opsets = [h.make_opsetid("", 18), h.make_opsetid("NAMEdomain", 1)]
    function = h.make_function("NAMEdomain", "NAMEfunction", ["NAMEin"], ["NAMEout"], [inner], opsets)
    branch = h.make_graph(
        [h.make_node("Identity", ["NAMEx"], ["NAMEb"])], "g", [], [h.make_tensor_value_info("NAMEb", types.FLOAT, [2])]
    )
    nodes = [
        h.make_node("NAMEfunction", ["NAMEx"], ["NAMEy"], "NAMEnode", domain="NAMEdomain"),
        h.make_node("If", ["NAMEc"], ["NAMEz"], then_branch=branch, else_branch=branch),
    ]
    inputs = [h.make_tensor_value_info("NAMEx", types.FLOAT, [2]), h.make_tensor_value_info("NAMEc", types.BOOL, [])]
    outputs = [h.make_tensor_value_info(name, types.FLOAT, [2]) for name in ("NAMEy", "NAMEz")]
    graph = h.make_graph(nodes, "g", inputs, outputs, [h.make_tensor("NAMEw", types.FLOAT, [1], [0.0])])
    content: bytes = h.make_model(graph, opset_imports=opsets, functions=[function]).SerializeToString()
    return content


def test_a_model_with_names_of_every_kind_is_loaded() -> None:
    assert len(nnfmq.load(with_function_and_branch()).outputs) == 2


@pytest.mark.parametrize("name", ["in", "out", "inner", "domain", "function", "x", "b", "y", "node", "c", "z", "w"])
def test_a_name_that_is_not_utf_8_makes_the_file_corrupt(name: str) -> None:
    wrong = with_function_and_branch().replace(f"NAME{name}".encode(), b"NAME"[:3] + b"\xff" + name.encode())
    with pytest.raises(nnfmq.InvalidArgument, match=r"a corrupt ONNX model: the name .* is not UTF-8"):
        nnfmq.load(wrong)
