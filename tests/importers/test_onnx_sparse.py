"""Sparse constants of ONNX models: a file states some elements, and the others are 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnx_files import assert_close, expected, file_of, results
from support.onnx_runtime import onnx

import nnfmq

helper, node = onnx.helper, onnx.helper.make_node
X = np.random.default_rng(3).uniform(-2, 2, (2, 3)).astype(np.float32)
VALUES = np.float32([1.5, -2, 3])


def sparse(places: Any, shape: tuple[int, ...] = (2, 3)) -> Any:
    values = onnx.numpy_helper.from_array(VALUES, "w")
    return helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(np.array(places), "places"), list(shape))


def initialized(tensor: Any) -> bytes:
    """Return the file of a model that adds a sparse initializer to its input."""
    model = onnx.load_model_from_string(file_of([node("Add", ["x", "w"], ["y"])], {"x": X}, ["y"]))
    model.graph.sparse_initializer.append(tensor)
    content: bytes = model.SerializeToString()
    return content


def constant(tensor: Any) -> bytes:
    """Return the file of a model that adds a sparse Constant to its input."""
    nodes = [node("Constant", [], ["w"], sparse_value=tensor), node("Add", ["x", "w"], ["y"])]
    return file_of(nodes, {"x": X}, ["y"])


def of_a_branch(tensor: Any) -> bytes:
    """Return the file of a model whose If has a branch that adds a sparse initializer of its own to the input."""
    result = [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, X.shape)]
    branch = helper.make_graph([node("Add", ["x", "w"], ["z"])], "then", [], result, sparse_initializer=[tensor])
    other = helper.make_graph([node("Neg", ["x"], ["z"])], "else", [], result)
    nodes = [
        node("ReduceMax", ["x"], ["highest"], keepdims=0),
        node("Greater", ["highest", "zero"], ["condition"]),
        node("If", ["condition"], ["y"], then_branch=branch, else_branch=other),
    ]
    return file_of(nodes, {"x": X}, ["y"], {"zero": np.float32(0)})


FORMS = (initialized, constant, of_a_branch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("places", [[0, 2, 5], [[0, 0], [0, 2], [1, 2]]], ids=["numbers", "coordinates"])
def test_elements_that_are_not_stated_are_0(form: Any, places: Any) -> None:
    content = form(sparse(places))
    assert_close(results(content, {"x": X}), expected(content, {"x": X}))


@pytest.mark.parametrize(
    ("places", "shape", "reason"),
    [
        ([0, 2, 6], (2, 3), "is corrupt"),
        ([-1, 2, 3], (2, 3), "do not ascend"),
        ([0, 2, 2], (2, 3), "do not ascend"),
        ([0, 2], (2, 3), "is corrupt"),
        ([[0, 0], [0, 3], [1, 2]], (2, 3), "is corrupt"),
        ([0, 2, 5], (1 << 20, 1 << 20), "elements"),
        ([0, 2, 5], (2, -3), "elements"),
    ],
)
def test_a_corrupt_sparse_tensor_is_refused(places: Any, shape: tuple[int, ...], reason: str) -> None:
    for form in FORMS:
        with pytest.raises(nnfmq.InvalidArgument, match=reason):
            nnfmq.load(form(sparse(places, shape)))
